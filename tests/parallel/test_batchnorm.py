import copy
import os
import signal
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from geartrain.errors import CommunicationError, ConfigError
from geartrain.parallel.batchnorm import (
    convert_batchnorm,
    has_batchnorm,
    set_group,
)
from geartrain.parallel.normalise import TooFewValuesError
from geartrain.parallel.sample_context import SampleContext, use_sample_context
from local_ranks import run_ranks

NUM_STEPS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    kind: str
    shape: tuple[int, ...]
    rows: tuple[int, ...]
    ghosts: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float64
    momentum: float | None = 0.1
    affine: bool = True
    track: bool = True
    channels_last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    outputs: list[torch.Tensor]
    input_grads: list[torch.Tensor]
    parameter_grads: list[torch.Tensor]
    state: dict[str, torch.Tensor]


CASES = [
    Case(kind="BatchNorm1d", shape=(5,), rows=(3, 1)),
    Case(kind="BatchNorm1d", shape=(3, 7), rows=(4, 0, 1), ghosts=(1,)),
    Case(kind="BatchNorm2d", shape=(4, 3, 5), rows=(5, 0, 2, 1)),
    Case(
        kind="BatchNorm2d", shape=(4, 3, 5), rows=(5, 0, 2), ghosts=(1,), channels_last=True
    ),
    Case(kind="BatchNorm3d", shape=(2, 2, 3, 2), rows=(1, 0, 6, 2, 3), momentum=None),
    Case(kind="BatchNorm2d", shape=(3, 2, 2), rows=(2, 3), affine=False, track=False),
    Case(kind="SyncBatchNorm", shape=(3, 2, 2), rows=(2, 3)),
    Case(kind="BatchNorm1d", shape=(5,), rows=(30, 1, 0), dtype=torch.float32),
    Case(
        kind="BatchNorm2d",
        shape=(4, 9, 9),
        rows=(5, 0, 2),
        dtype=torch.float32,
        ghosts=(1,),
    ),
]


def make_model(case: Case) -> nn.Module:
    kind = case.kind
    if kind == "SyncBatchNorm" and not dist.is_initialized():
        kind = "BatchNorm2d"
    torch.manual_seed(0)
    norm: nn.Module = getattr(nn, kind)(
        case.shape[0],
        momentum=case.momentum,
        affine=case.affine,
        track_running_stats=case.track,
        dtype=case.dtype,
    )
    for parameter in norm.parameters():
        nn.init.normal_(parameter, mean=1.0)
    return norm


def make_batch(case: Case, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    shape = (sum(case.rows), *case.shape)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * 3 + 2
    grad = torch.randn(shape, generator=generator, dtype=torch.float64)
    x, grad = x.to(case.dtype), grad.to(case.dtype)
    if case.channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    return x, grad


def train(model: nn.Module, case: Case, rows: slice, *, ghost: bool = False) -> Seen:
    seen = Seen(outputs=[], input_grads=[], parameter_grads=[], state={})
    for step in range(NUM_STEPS):
        all_x, all_grad = make_batch(case, step)
        x = (all_x[:1] if ghost else all_x[rows]).requires_grad_()
        grad = torch.zeros_like(x) if ghost else all_grad[rows]
        context = SampleContext(
            seed=0, step=step, sample_indices=torch.arange(len(x)), is_ghost=ghost
        )
        with use_sample_context(context):
            output = model(x)
        (output * grad).sum().backward()
        assert x.grad is not None
        seen.outputs.append(output.detach()[: 0 if ghost else None])
        seen.input_grads.append(x.grad)
    seen.parameter_grads.extend(p.grad for p in model.parameters() if p.grad is not None)
    seen.state.update(model.state_dict())
    return seen


def train_share(rank: int, world_size: int, case: Case) -> Seen:
    model = convert_batchnorm(make_model(case), group=None)
    start = sum(case.rows[:rank])
    rows = slice(start, start + case.rows[rank])
    seen = train(model, case, rows, ghost=rank in case.ghosts)
    if rank in case.ghosts:
        assert all(not grad.any() for grad in seen.input_grads)
        seen.input_grads[:] = [grad[:0] for grad in seen.input_grads]
    return seen


def difference(seen: torch.Tensor, expected: torch.Tensor) -> float:
    assert seen.shape == expected.shape
    assert seen.dtype == expected.dtype
    return float((seen - expected).double().norm() / expected.double().norm())


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind}-{case.rows}")
def test_uneven_shares_equal_one_device(case: Case) -> None:
    tolerance = 1e-12 if case.dtype == torch.float64 else 1e-5
    expected = train(make_model(case), case, slice(None))

    ranks = run_ranks(train_share, len(case.rows), case)

    for step in range(NUM_STEPS):
        output = torch.cat([rank.outputs[step] for rank in ranks])
        assert difference(output, expected.outputs[step]) <= tolerance
        grad = torch.cat([rank.input_grads[step] for rank in ranks])
        assert difference(grad, expected.input_grads[step]) <= tolerance
    for index, parameter_grad in enumerate(expected.parameter_grads):
        total = sum(rank.parameter_grads[index] for rank in ranks)
        assert isinstance(total, torch.Tensor)
        assert difference(total, parameter_grad) <= tolerance
    for rank in ranks:
        for name, value in expected.state.items():
            assert difference(rank.state[name], value) <= tolerance
            assert torch.equal(rank.state[name], ranks[0].state[name])


def train_mixed(rank: int, world_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    case = Case(kind="BatchNorm2d", shape=(4, 5, 5), rows=(3, 1), dtype=torch.float32)
    model = convert_batchnorm(make_model(case), group=None)
    x, grad = (value[3 * rank : 3 + rank].to(dtype) for value in make_batch(case, 0))
    x.requires_grad_()
    output = model(x)
    output.backward(grad)
    assert x.grad is not None
    return (
        output.detach(),
        x.grad,
        *(p.grad for p in model.parameters() if p.grad is not None),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_input_keeps_float32_statistics(dtype: torch.dtype) -> None:
    case = Case(kind="BatchNorm2d", shape=(4, 5, 5), rows=(3, 1), dtype=torch.float32)
    model = make_model(case)
    all_x, all_grad = make_batch(case, 0)
    x = all_x.to(dtype).float().requires_grad_()
    output = model(x)
    output.backward(all_grad.to(dtype).float())
    assert x.grad is not None

    ranks = run_ranks(train_mixed, 2, dtype)

    assert ranks[0][0].dtype == ranks[0][1].dtype == dtype
    tolerance = 2 * torch.finfo(dtype).eps
    for index, expected in enumerate((output.detach(), x.grad)):
        seen = torch.cat([rank[index] for rank in ranks]).float()
        assert difference(seen, expected) <= tolerance
    for index, parameter in enumerate(model.parameters(), start=2):
        assert parameter.grad is not None
        assert difference(ranks[0][index] + ranks[1][index], parameter.grad) <= 1e-5


def single_value_error(rank: int, world_size: int) -> str:
    model = convert_batchnorm(nn.BatchNorm1d(3), group=None)
    with pytest.raises(ValueError, match="more than 1 when training") as caught:
        model(torch.ones(1 if rank == 1 else 0, 3))
    dist.barrier()
    return type(caught.value).__name__


def test_a_single_value_is_refused_on_every_rank() -> None:
    assert run_ranks(single_value_error, 3) == [TooFewValuesError.__name__] * 3


def lose_a_peer(rank: int, world_size: int) -> str:
    model = convert_batchnorm(nn.BatchNorm1d(3), group=None)
    model(torch.ones(2, 3))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(CommunicationError, match="BatchNorm could not be exchanged"):
        model(torch.ones(2, 3))
    return "told"


def test_a_lost_peer_is_a_communication_error() -> None:
    assert run_ranks(lose_a_peer, 2, may_die={1}) == ["told", None]


def second_derivative(rank: int, world_size: int) -> None:
    model = convert_batchnorm(nn.BatchNorm1d(3), group=None)
    x = torch.randn(4, 3, requires_grad=True)
    torch.autograd.grad(model(x).square().sum(), x, create_graph=True)


def test_second_derivatives_are_refused() -> None:
    with pytest.raises(ConfigError, match="create_graph"):
        run_ranks(second_derivative, 2)


def frozen_and_regrouped(rank: int, world_size: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    model = convert_batchnorm(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)), group=None)
    x = torch.randn(6, 3)
    shares = {0: x[:4], 1: x[4:5], 2: x[5:]}
    first = model(shares[rank])
    pair = dist.new_group([0, 1])
    if rank == 2:
        return first, first
    set_group(model, pair)
    copied = copy.deepcopy(model)
    return first.detach(), copied(shares[rank]).detach()


def test_the_group_can_be_changed() -> None:
    ranks = run_ranks(frozen_and_regrouped, 3)

    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
    x = torch.randn(6, 3)
    everyone, pair = model(x), model(x[:5])
    torch.testing.assert_close(torch.cat([rank[0] for rank in ranks]), everyone)
    torch.testing.assert_close(torch.cat([rank[1] for rank in ranks[:2]]), pair)


def test_without_a_group_and_in_eval_it_is_torch_bit_for_bit() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))
    converted = convert_batchnorm(copy.deepcopy(plain), group=None)
    x = torch.randn(4, 2, 6, 6)

    for training in (True, False):
        plain.train(training)
        converted.train(training)
        expected, output = plain(x), converted(x)
        expected.sum().backward()
        output.sum().backward()
        assert torch.equal(output, expected)
        for ours, theirs in zip(converted.parameters(), plain.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            assert torch.equal(ours.grad, theirs.grad)


def test_conversion_keeps_objects_hooks_and_flags() -> None:
    norm = nn.BatchNorm2d(3).eval()
    calls: list[str] = []
    norm.register_forward_hook(lambda *_: calls.append("hook"))
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.Sequential(norm))
    before = [id(p) for p in model.parameters()]
    assert has_batchnorm(model)

    assert convert_batchnorm(model, group=None) is model

    assert not has_batchnorm(model)
    assert [id(p) for p in model.parameters()] == before
    assert isinstance(norm, nn.BatchNorm2d)
    assert not norm.training
    model(torch.ones(1, 2, 4, 4))
    assert calls == ["hook"]


def test_the_module_itself_is_converted() -> None:
    norm = nn.BatchNorm1d(3)

    assert convert_batchnorm(norm, group=None) is norm

    assert not has_batchnorm(norm)


def test_a_lazy_batchnorm_is_refused_and_nothing_is_changed() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.LazyBatchNorm1d())

    with pytest.raises(ConfigError, match="run the model once"):
        convert_batchnorm(model, group=None)

    assert type(model[0]) is nn.BatchNorm1d


def test_a_derived_batchnorm_is_refused() -> None:
    class Own(nn.BatchNorm1d):
        pass

    with pytest.raises(ConfigError, match="is a Own"):
        convert_batchnorm(nn.Sequential(Own(3)), group=None)
