"""What compression does to training, with the exchange simulated in one process.

Six workers with unequal batches; each rack's weighted gradient sum goes through the
codec, as on the slow hop. With two racks the partial sums are swapped; with three,
partial sums go to an owner, which codes the total again.
"""

import functools
import gzip
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from geartrain.collectives.codecs.error_feedback import ErrorFeedback, MomentumUndo
from geartrain.collectives.codecs.registry import QUALITY, make_codec

STEPS = 500
MOMENTUM = 0.9
RACKS = {2: ((24, 12, 12), (8, 4, 4)), 3: ((24, 12), (12, 8), (4, 4))}
"""Samples of each worker, by rack; 64 in all."""
DATASETS = Path(__file__).resolve().parents[4] / "shared" / "data" / "datasets"

Samples = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Coder:
    """Codes intervals and remembers what that lost."""

    codec_name: str
    use_feedback: bool
    momentum: float = 0.0
    feedback: ErrorFeedback = field(init=False)

    def __post_init__(self) -> None:
        self.codec = make_codec(self.codec_name)
        self.feedback = ErrorFeedback(self.momentum)

    def decoded(self, start: int, values: torch.Tensor) -> torch.Tensor:
        values = values.clone()
        if self.use_feedback:
            self.feedback.compensate("0", start, values)
        code = torch.zeros(self.codec.encoded_bytes(values.numel()), dtype=torch.uint8)
        self.codec.encode(values, code)
        decoded = torch.empty_like(values)
        self.codec.decode(code, decoded)
        if self.use_feedback:
            self.feedback.keep("0", start, values, decoded)
        return decoded


@dataclass
class SlowHop:
    """The sum over racks as every rank gets it."""

    codec_name: str
    num_racks: int
    use_feedback: bool = True
    momentum: float = 0.0

    def __post_init__(self) -> None:
        def coder(momentum: float) -> Coder:
            return Coder(self.codec_name, self.use_feedback, momentum)

        self.partial = [coder(self.momentum) for _ in range(self.num_racks)]
        self.total = coder(0.0)
        self.undo = MomentumUndo(self.momentum)

    def sum_over(self, partial_sums: list[torch.Tensor]) -> torch.Tensor:
        total = torch.empty_like(partial_sums[0])
        cuts = torch.linspace(0, total.numel(), 2 * self.num_racks + 1).int().tolist()
        for index, (start, stop) in enumerate(itertools.pairwise(cuts)):
            pieces = [rack_sum[start:stop] for rack_sum in partial_sums]
            total[start:stop] = self._piece_sum(index % self.num_racks, start, pieces)
        if self.momentum:
            self.undo.undo_("0", 0, total)
        return total

    def _piece_sum(
        self, owner: int, start: int, pieces: list[torch.Tensor]
    ) -> torch.Tensor:
        coded = [c.decoded(start, p) for c, p in zip(self.partial, pieces, strict=True)]
        if self.num_racks == 2:
            return coded[0] + coded[1]
        if not self.momentum:
            coded[owner] = pieces[owner]  # its own sum needs no code on its way
        return self.total.decoded(start, torch.stack(coded).sum(0))


def synthetic() -> tuple[Samples, Samples]:
    generator = torch.Generator().manual_seed(1)
    w1, w2 = (
        torch.randn(64, 96, generator=generator),
        torch.randn(96, 10, generator=generator),
    )

    def draw(count: int) -> Samples:
        inputs = torch.randn(count, 64, generator=generator)
        return inputs, (torch.tanh(inputs @ w1 / 4) @ w2).argmax(1)

    return draw(32_000), draw(8_000)


def mnist() -> tuple[Samples, Samples]:
    def read(name: str, header_bytes: int) -> torch.Tensor:
        with gzip.open(DATASETS / name) as file:
            return torch.from_numpy(
                np.frombuffer(file.read(), np.uint8, offset=header_bytes).copy()
            )

    if not (DATASETS / "mnist-t10k-images-idx3-ubyte.gz").exists():
        pytest.skip("no MNIST in shared/data/datasets beside this checkout")
    images = read("mnist-t10k-images-idx3-ubyte.gz", 16).view(-1, 28, 28).float() / 255
    images = nn.functional.avg_pool2d(images.unsqueeze(1), 2).flatten(1)
    labels = read("mnist-t10k-labels-idx1-ubyte.gz", 8).long()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(2))
    images, labels = images[order] * 2 - 0.3, labels[order]
    return (images[:8000], labels[:8000]), (images[8000:], labels[8000:])


TASKS: dict[str, Callable[[], tuple[Samples, Samples]]] = {
    "synthetic": synthetic,
    "mnist": mnist,
}
samples_of = functools.cache(lambda task: TASKS[task]())


@functools.cache
def held_out_loss(
    task: str,
    optimizer_name: str,
    codec_name: str = "none",
    num_racks: int = 2,
    use_feedback: bool = True,
    momentum: float = 0.0,
) -> float:
    """Loss on unseen samples after ``STEPS`` steps."""
    (inputs, labels), (test_inputs, test_labels) = samples_of(task)
    torch.manual_seed(0)
    width = inputs.shape[1]
    model = nn.Sequential(
        nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 96), nn.ReLU(), nn.Linear(96, 10)
    )
    optimizer: torch.optim.Optimizer
    if optimizer_name == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=MOMENTUM)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    parameters = list(model.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    hop = SlowHop(codec_name, num_racks, use_feedback, momentum)
    # To zero: a constant rate would end wherever the last steps happened to lead.
    decay = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / STEPS)
    draw = torch.Generator().manual_seed(5)
    for _ in range(STEPS):
        batch = torch.randint(
            len(labels), (sum(map(sum, RACKS[num_racks])),), generator=draw
        )
        partial_sums, first = [], 0
        for workers in RACKS[num_racks]:
            optimizer.zero_grad()
            mine = batch[first : first + sum(workers)]
            first += len(mine)
            losses = nn.functional.cross_entropy(
                model(inputs[mine]), labels[mine], reduction="none"
            )
            own_means = [part.mean() for part in torch.split(losses, list(workers))]
            weights = torch.tensor(workers) / len(batch)
            torch.dot(torch.stack(own_means), weights).backward()  # type: ignore[no-untyped-call]
            partial_sums.append(
                torch.cat([p.grad.flatten() for p in parameters if p.grad is not None])
            )
        total = hop.sum_over(partial_sums)
        for parameter, grad in zip(parameters, torch.split(total, sizes), strict=True):
            parameter.grad = grad.view_as(parameter)
        optimizer.step()
        decay.step()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(test_inputs), test_labels))


def loss_ratio(
    task: str,
    optimizer_name: str,
    codec_name: str,
    num_racks: int = 2,
    use_feedback: bool = True,
    momentum: float = 0.0,
) -> float:
    exact = held_out_loss(task, optimizer_name, num_racks=num_racks)
    coded = held_out_loss(
        task, optimizer_name, codec_name, num_racks, use_feedback, momentum
    )
    return coded / exact


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_eight_bits_train_as_well_as_the_exact_exchange() -> None:
    assert loss_ratio("synthetic", "sgd", "int8") <= QUALITY["int8"].max_loss_ratio


def test_ten_percent_of_the_values_train_nearly_as_well() -> None:
    assert loss_ratio("synthetic", "sgd", "topk") <= QUALITY["topk"].max_loss_ratio


@pytest.mark.slow
@pytest.mark.parametrize("codec_name", [name for name in QUALITY if name != "none"])
@pytest.mark.parametrize("optimizer_name", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("task", "num_racks"), [("synthetic", 2), ("synthetic", 3), ("mnist", 2)]
)
def test_every_codec_keeps_the_loss_within_what_it_states(
    task: str, num_racks: int, optimizer_name: str, codec_name: str
) -> None:
    quality = QUALITY[codec_name]
    ratio = loss_ratio(
        task, optimizer_name, codec_name, num_racks, use_feedback=quality.needs_feedback
    )
    assert ratio <= quality.max_loss_ratio


@pytest.mark.slow
def test_momentum_correction_pays_where_few_values_are_sent() -> None:
    plain = loss_ratio("mnist", "sgd", "topk")
    corrected = loss_ratio("mnist", "sgd", "topk", momentum=MOMENTUM)
    assert corrected < plain
