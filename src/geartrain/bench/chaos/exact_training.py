"""A training whose weights do not depend on who computed which sample, bit for bit.

Inputs are small whole numbers, the loss is the absolute error, and the global batch is a
power of two: every gradient is a whole number divided by that power, and sums of those
are exact in any order. So whatever happens to the fleet, the weights must be those of a run
to which nothing happened; one lost or doubled sample changes them.

It saves every so often and goes on where it can't.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import geartrain as gt

NUM_SAMPLES = 2_048
GLOBAL_BATCH_SIZE = 64
NUM_INPUTS = 48
NUM_OUTPUTS = 64
_LARGEST_INPUT = 8

Batch = tuple[Tensor, Tensor]


class WholeNumbers(torch.utils.data.Dataset[Batch]):
    """Samples of whole numbers: inputs (NUM_INPUTS,), targets (NUM_OUTPUTS,)."""

    def __init__(self, seed: int) -> None:
        dice = torch.Generator().manual_seed(seed)
        low, high = -_LARGEST_INPUT, _LARGEST_INPUT + 1
        shape = (NUM_SAMPLES, NUM_INPUTS)
        self.inputs = torch.randint(low, high, shape, generator=dice).double()
        hidden = torch.randint(-2, 3, (NUM_INPUTS, NUM_OUTPUTS), generator=dice).double()
        self.targets = self.inputs @ hidden + 0.5  # never met exactly: no sign is 0

    def __len__(self) -> int:
        """Return the number of samples."""
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Batch:
        """Return one sample."""
        return self.inputs[index], self.targets[index]


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--sample-s", type=float, default=0.002, help="what a sample costs a device"
    )
    parser.add_argument("--save-every", type=int, default=0, help="steps; 0: never")
    parser.add_argument("--save-to", type=Path, help="where to; needed to save")
    return parser.parse_args()


def main() -> None:
    """Train until the steps are made or the run is stopped."""
    options = parse_arguments()
    session = gt.Session(seed=options.seed)
    model = nn.Linear(NUM_INPUTS, NUM_OUTPUTS, bias=False).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2**-7)

    def absolute_errors(output: Tensor, batch: Batch) -> tuple[Tensor, int]:
        # Sleeping stands for computing, so that a small machine has room for a fleet.
        time.sleep(options.sample_s * len(output))
        return (output - batch[1]).abs().sum(), len(output)

    session.setup(model, optimizer, loss_fn=absolute_errors)
    loader = session.setup_dataloader(
        WholeNumbers(options.seed), global_batch_size=GLOBAL_BATCH_SIZE, seed=options.seed
    )
    while session.step_index < options.steps:
        for batch in loader:
            session.step(batch)
            due = options.save_every and not session.step_index % options.save_every
            if due and options.save_to is not None:
                save(session, options.save_to)
            if session.step_index >= options.steps:
                break


def save(session: gt.Session, path: Path) -> None:
    """Save, and go on where it can't be: the next one may succeed."""
    try:
        session.save(path)
    except gt.CheckpointError as error:
        sys.stderr.write(f"not saved after {session.step_index} steps: {error}\n")


if __name__ == "__main__":
    main()
