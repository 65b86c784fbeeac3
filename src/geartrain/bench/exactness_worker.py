"""Runs on every rank: the fleet's gradient of one global batch against one device's.

Started by the launcher with the path of an ``ExactnessSettings`` document.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from geartrain.bench.byte_gpt import SourceWindows, byte_losses, make_model
from geartrain.bench.competitors import GlobalBatches
from geartrain.bench.fleet_run import MEASUREMENT_NAME
from geartrain.bench.gpu_settings import ExactnessMeasurement, ExactnessSettings
from geartrain.session import Session
from geartrain.telemetry import read_document, write_document

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


def gradient_of_fleet(
    session: Session, settings: ExactnessSettings
) -> tuple[Tensor, float]:
    """Make one step by the pinned plan.

    Returns:
        The aggregated gradient, float64 of shape (num_parameters,), and the loss.
    """
    model = make_model(settings.model, settings.seed).to(_DTYPES[settings.dtype])
    # A learning rate of 0: only the gradient is of interest.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    session.setup(model, optimizer, loss_fn=byte_losses)
    loader = session.setup_dataloader(
        SourceWindows(settings.model.context),
        global_batch_size=settings.plan.global_batch_size,
        seed=settings.seed,
        prefetch=False,
    )
    loss = session.step(next(iter(loader)))
    return _flat_gradient(model), loss


def gradient_of_one_device(settings: ExactnessSettings) -> tuple[Tensor, float]:
    """The same of plain PyTorch on the CPU, in float64."""
    total = settings.plan.global_batch_size
    windows = SourceWindows(settings.model.context)
    batches = GlobalBatches(windows, total, settings.seed)
    # Rounded to the fleet's dtype first: both start from the very same weights.
    model = make_model(settings.model, settings.seed).to(_DTYPES[settings.dtype]).double()
    (batch,) = batches.micro_batches(0, 0, total, total)
    loss = byte_losses(model(batch[0]), batch).mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return _flat_gradient(model), float(loss.detach())


def _flat_gradient(model: nn.Module) -> Tensor:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return torch.cat([g.detach().cpu().double().flatten() for g in gradients])


def main() -> None:
    """Compare, and have rank 0 write the errors."""
    settings = read_document(Path(sys.argv[1]), ExactnessSettings)
    session = Session(seed=settings.seed, plan=settings.plan)
    gradient, loss = gradient_of_fleet(session, settings)
    if not session.is_main:
        return
    expected, expected_loss = gradient_of_one_device(settings)
    measurement = ExactnessMeasurement(
        gradient_error=float((gradient - expected).norm() / expected.norm()),
        loss_error=abs(loss / expected_loss - 1),
    )
    assert session.spec is not None
    write_document(Path(session.spec.run_dir) / MEASUREMENT_NAME, measurement)


if __name__ == "__main__":
    main()
