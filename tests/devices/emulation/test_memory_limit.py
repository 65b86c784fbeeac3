"""Tensors counted and refused beyond a limit, with torch's own error."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from geartrain.devices.adapters.cpu import CpuAdapter
from geartrain.devices.adapters.emulated import EmulatedAdapter
from geartrain.devices.emulation.memory_limit import TensorMemoryLimit
from geartrain.errors import ConfigError

MIB = 2**20


def small_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, inputs: torch.Tensor
) -> float:
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def test_count_is_exact_over_training_steps() -> None:
    limit = TensorMemoryLimit(None)
    with limit:
        model, optimizer = small_model()
        inputs = torch.randn(32, 64)
        train_step(model, optimizer, inputs)
        train_step(model, optimizer, inputs)
        parameter_bytes = sum(p.numel() * 4 for p in model.parameters())
        step_counts = 4 * len(list(model.parameters()))

        # Parameters, gradients, two moments, AdamW's step counts, and the batch.
        expected = 4 * parameter_bytes + step_counts + inputs.numel() * 4
        assert abs(limit.in_use_bytes - expected) <= step_counts
        assert limit.peak_bytes > limit.in_use_bytes

        limit.reset_peak()
        assert limit.peak_bytes == limit.in_use_bytes

        del model, optimizer, inputs
        gc.collect()
    assert limit.in_use_bytes == 0


def test_training_under_the_limit_is_unchanged() -> None:
    model, optimizer = small_model()
    inputs = torch.randn(32, 64)
    plain = [train_step(model, optimizer, inputs) for _ in range(3)]

    with TensorMemoryLimit(64 * MIB):
        model, optimizer = small_model()
        inputs = torch.randn(32, 64)
        counted = [train_step(model, optimizer, inputs) for _ in range(3)]

    assert counted == plain


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(2**20),
        lambda: torch.zeros(1024, 1024),
        lambda: torch.randn(2**21),
        lambda: torch.ones(1024, 1).expand(1024, 1024).contiguous(),
        lambda: torch.ones(1024, 1) @ torch.ones(1, 1024),
        lambda: [torch.ones(2**18) for _ in range(4)],
        lambda: torch.ones(1).resize_(2**20),
    ],
    ids=["empty", "zeros", "randn", "contiguous", "matmul", "many", "resize"],
)
def test_exceeding_the_limit_raises_torchs_error(allocate: Callable[[], object]) -> None:
    with TensorMemoryLimit(3 * MIB) as limit:
        with pytest.raises(torch.OutOfMemoryError, match=rf"holds 3\.0 MiB \({3 * MIB}"):
            allocate()
        gc.collect()
        assert limit.in_use_bytes < MIB


def test_error_tells_bytes_wanted_in_use_and_the_limit() -> None:
    with TensorMemoryLimit(3 * MIB):
        held = torch.empty(MIB // 2)  # 2 MiB
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(MIB // 2)

    assert "tried to allocate 2.0 MiB (2097152 bytes)" in str(caught.value)
    assert "with 2.0 MiB (2097152 bytes) in use" in str(caught.value)
    assert held.numel() == MIB // 2


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(2**34),  # 64 GiB
        lambda: torch.zeros(2**17, 2**17),
        lambda: torch.ones(2**22).new_empty((2**34,)),
    ],
    ids=["empty", "zeros", "new_empty"],
)
def test_huge_tensor_is_refused_before_it_is_made(
    allocate: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        TensorMemoryLimit(64 * MIB) as limit,
        pytest.raises(torch.OutOfMemoryError, match=r"tried to allocate 64\.0 GiB"),
    ):
        allocate()
    assert limit.peak_bytes <= 16 * MIB


def test_smaller_batch_runs_after_an_out_of_memory() -> None:
    with TensorMemoryLimit(4 * MIB):
        model, optimizer = small_model()
        with pytest.raises(torch.OutOfMemoryError):
            train_step(model, optimizer, torch.randn(8192, 64))
        optimizer.zero_grad()
        gc.collect()

        assert train_step(model, optimizer, torch.randn(64, 64)) > 0


def test_out_of_memory_in_backward_is_the_same_error() -> None:
    class Greedy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
            return value.clone()

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            return torch.zeros(4 * MIB).sum() * gradient

    with TensorMemoryLimit(2 * MIB):
        value = torch.ones(4, requires_grad=True)
        output = Greedy.apply(value).sum()  # type: ignore[no-untyped-call]  # torch's
        with pytest.raises(torch.OutOfMemoryError, match="in use"):
            output.backward()


def test_views_and_in_place_operators_add_nothing() -> None:
    with TensorMemoryLimit(None) as limit:
        value = torch.ones(1024, 1024)
        before = limit.in_use_bytes
        views = [
            value[0],
            value.t(),
            value.view(-1),
            value.detach(),
            value.expand(1, -1, -1),
        ]
        value.add_(1).mul_(2)
        torch._foreach_add_([value], 1.0)
        torch.add(value, 1, out=value)

        assert limit.in_use_bytes == before
        assert limit.peak_bytes <= before + 8  # a scalar of foreach at most
        assert len(views) == 5


def test_other_dispatch_modes_of_the_user_work_inside() -> None:
    class CountOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
        num_calls = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.num_calls += 1
            return func(*args, **(kwargs or {}))

    counter = CountOperators()  # type: ignore[no-untyped-call]  # torch's
    with TensorMemoryLimit(64 * MIB) as limit, counter:
        held = torch.ones(MIB // 4)

        assert counter.num_calls > 0
        assert limit.in_use_bytes == MIB
        assert held.sum() == MIB // 4


def test_fake_tensors_take_no_memory() -> None:
    from torch._subclasses import FakeTensorMode

    with TensorMemoryLimit(MIB) as limit, FakeTensorMode():
        product = torch.empty(4096, 4096) @ torch.empty(4096, 4096)

        assert product.shape == (4096, 4096)
    assert limit.in_use_bytes == 0


def test_adapters_tell_counted_bytes_while_counting() -> None:
    adapter = EmulatedAdapter()
    resident = adapter.memory_stats("emulated:0")
    with TensorMemoryLimit(64 * MIB):
        held = torch.ones(MIB // 4)
        counted = adapter.memory_stats("emulated:0")
        on_cpu = CpuAdapter().memory_stats("cpu")

    assert resident.counts == "resident"
    assert resident.in_use_bytes > 50 * MIB
    assert counted.counts == "tensors"
    assert counted.in_use_bytes == on_cpu.in_use_bytes == held.numel() * 4
    assert counted.limit_bytes == 64 * MIB


def test_limit_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="limit_bytes=0 must be > 0"):
        TensorMemoryLimit(0)
