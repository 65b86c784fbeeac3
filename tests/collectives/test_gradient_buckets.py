"""Gradients in flat buckets: sent in order, each once, whatever backward fills first."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from geartrain.collectives.gradient_buckets import GradientBuckets
from geartrain.collectives.torch_collective import LocalCollective, apply_weight_
from geartrain.errors import ConfigError


@dataclass
class Doubling:
    """Two members with the same gradients: every sum is twice the tensor."""

    num_members: int = 2
    sent: list[int] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)

    def all_reduce(
        self, tensor: torch.Tensor, weight: float = 1.0, *, key: str | None = None
    ) -> Doubling:
        self.sent.append(tensor.numel())
        self.keys.append(key)
        self.last_dtype = tensor.dtype
        apply_weight_(tensor, weight)
        tensor.mul_(2)
        return self

    def predict_s(self, num_bytes: int) -> float:
        return 0.0

    def wait(self) -> None:
        """Done at once."""


class TwoPaths(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.second(self.first(x))
        return output


def buckets_of(model: nn.Module, bucket_bytes: int) -> tuple[GradientBuckets, Doubling]:
    group = Doubling()
    buckets = GradientBuckets(list(model.named_parameters()), bucket_bytes)
    buckets.collective = group
    buckets.begin_step()
    return buckets, group


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize("bucket_bytes", [1, 48, 60, 10**6])
@pytest.mark.parametrize("overlap", [False, True])
def test_gradients_are_summed_in_buckets_of_any_size(
    bucket_bytes: int, overlap: bool
) -> None:
    model, reference = TwoPaths(), TwoPaths()
    reference.load_state_dict(model.state_dict())
    buckets, group = buckets_of(model, bucket_bytes)
    backward(reference)

    if overlap:
        buckets.send_during_backward()
    backward(model)
    buckets.send_rest()
    buckets.wait()
    buckets.scale_(0.5)
    buckets.drop_untouched(buckets.touched)

    assert sum(group.sent) == 36
    assert len(group.sent) == len(buckets.flats)
    assert model.unused.weight.grad is None
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad, theirs.grad)


def test_buckets_that_backward_filled_are_sent_before_it_ends() -> None:
    model = TwoPaths()
    del model.unused
    buckets, group = buckets_of(model, bucket_bytes=48)
    sent_at_input: list[int] = []
    x = torch.ones(2, 3, requires_grad=True)
    x.register_hook(  # type: ignore[no-untyped-call]  # torch's
        lambda _: sent_at_input.append(len(group.sent))
    )

    buckets.send_during_backward()
    model(x).sum().backward()

    assert sent_at_input[0] > 0
    assert len(group.sent) == len(buckets.flats)


def test_micro_batches_add_up_before_they_are_sent() -> None:
    model = TwoPaths()
    buckets, group = buckets_of(model, bucket_bytes=10**6)

    backward(model)
    backward(model)
    assert group.sent == []
    buckets.send_during_backward()
    backward(model)
    buckets.send_rest()
    buckets.wait()

    assert model.second.bias.grad is not None
    torch.testing.assert_close(
        model.second.bias.grad, torch.full((3,), 2 * 3 * 2.0), rtol=0, atol=0
    )


def test_a_gradient_that_the_user_dropped_starts_anew() -> None:
    model = TwoPaths()
    buckets, _ = buckets_of(model, bucket_bytes=10**6)
    backward(model)
    model.zero_grad(set_to_none=True)

    backward(model)
    buckets.send_rest()
    buckets.wait()

    assert model.second.bias.grad is not None
    assert model.second.bias.grad.tolist() == [4.0, 4.0, 4.0]


def test_sixteen_bit_gradients_travel_as_float32() -> None:
    model = TwoPaths().bfloat16()
    buckets, group = buckets_of(model, bucket_bytes=10**6)

    model(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    buckets.send_rest()
    buckets.wait()

    assert group.last_dtype == torch.float32
    assert model.second.bias.grad is not None
    assert model.second.bias.grad.dtype == torch.bfloat16
    assert model.second.bias.grad.tolist() == [4.0, 4.0, 4.0]


def test_buckets_are_weighted_and_named_alike_in_every_step() -> None:
    model = TwoPaths()
    buckets, group = buckets_of(model, bucket_bytes=48)
    buckets.weight = 0.25

    for _ in range(2):
        buckets.begin_step()
        backward(model)
        buckets.send_rest()
        buckets.wait()

    assert model.second.bias.grad is not None
    assert model.second.bias.grad.tolist() == [2 * 2 * 0.25] * 3
    half = len(group.keys) // 2
    assert len(set(group.keys)) == half
    assert group.keys[:half] == group.keys[half:]


def test_gradients_of_weight_zero_do_not_count_whatever_they_hold() -> None:
    tensor = torch.tensor([float("nan"), 1.0])

    LocalCollective().all_reduce(tensor, 0.0).wait()

    assert tensor.tolist() == [0.0, 0.0]


class Reentrant(nn.Module):
    """Uses one layer within two reentrant checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.layer, x.requires_grad_(), use_reentrant=True)
        output: torch.Tensor = checkpoint(self.layer, hidden, use_reentrant=True)
        return output


def test_a_gradient_that_comes_twice_is_refused_with_overlap() -> None:
    model = Reentrant()
    buckets, _ = buckets_of(model, bucket_bytes=10**6)
    buckets.send_during_backward()

    with pytest.raises(ConfigError, match=r"layer\..* twice in one backward.*overlap"):
        backward(model)


def test_a_gradient_may_come_twice_without_overlap() -> None:
    model, reference = Reentrant(), Reentrant()
    reference.load_state_dict(model.state_dict())
    buckets, _ = buckets_of(model, bucket_bytes=10**6)

    backward(model)
    backward(reference)
    buckets.send_rest()
    buckets.wait()
    buckets.scale_(0.5)

    torch.testing.assert_close(model.layer.weight.grad, reference.layer.weight.grad)


def test_a_model_without_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match="no parameter that takes a gradient"):
        GradientBuckets([])
