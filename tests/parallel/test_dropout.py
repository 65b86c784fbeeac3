import copy
import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from geartrain.errors import ConfigError
from geartrain.parallel.dropout import (
    PlanInvariantDropout,
    convert_dropout,
)
from geartrain.parallel.sample_context import SampleContext, use_sample_context
from local_ranks import run_ranks


def context_of(indices: list[int], *, step: int = 3, seed: int = 1) -> SampleContext:
    return SampleContext(
        seed=seed, step=step, sample_indices=torch.tensor(indices, dtype=torch.int64)
    )


def run(module: nn.Module, x: torch.Tensor, context: SampleContext) -> torch.Tensor:
    with use_sample_context(context):
        output = module(x)
    assert isinstance(output, torch.Tensor)
    return output


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9])
def test_the_kept_fraction_is_right(p: float) -> None:
    output = run(
        PlanInvariantDropout(p, "drop"), torch.ones(32, 8192), context_of([*range(32)])
    )

    kept = output != 0
    assert (
        abs(float(kept.double().mean()) - (1 - p)) < 5 * (p * (1 - p) / kept.numel()) ** 0.5
    )
    torch.testing.assert_close(output[kept], torch.full((int(kept.sum()),), 1 / (1 - p)))


KINDS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.Dropout(0.5), (7, 3)),
    (lambda: nn.Dropout1d(0.5), (9, 4)),
    (lambda: nn.Dropout2d(0.5), (9, 2, 4)),
    (lambda: nn.Dropout2d(0.5), (9, 4)),
    (lambda: nn.Dropout3d(0.5), (9, 1, 2, 2)),
    (lambda: nn.AlphaDropout(0.5), (11,)),
]


@pytest.mark.parametrize(("make", "shape"), KINDS)
def test_masks_do_not_depend_on_the_split(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    model = convert_dropout(nn.Sequential(make()))
    indices = [5, 17, 2, 900, 33, 4, 8]
    x = torch.randn(7, *shape, generator=torch.Generator().manual_seed(0))
    whole = run(model, x, context_of(indices))

    for sizes in ([1] * 7, [3, 0, 4], [6, 1]):
        parts = [
            run(model, part, context_of([indices[i] for i in rows.tolist()]))
            for part, rows in zip(
                torch.split(x, sizes), torch.split(torch.arange(7), sizes), strict=True
            )
        ]
        assert torch.equal(torch.cat(parts), whole)
    assert not torch.equal(whole, x)


@pytest.mark.parametrize(("make", "shape"), KINDS[1:5])
def test_whole_channels_are_dropped(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    output = run(convert_dropout(make()), torch.ones(7, *shape), context_of([*range(7)]))

    channels = output.flatten(2)
    assert set(torch.unique(channels).tolist()) == {0.0, 2.0}
    assert torch.equal(channels.amin(-1), channels.amax(-1))


def test_alpha_dropout_keeps_mean_and_variance() -> None:
    model = convert_dropout(nn.Sequential(nn.SELU(), nn.AlphaDropout(0.2)))
    x = torch.randn(64, 8192, generator=torch.Generator().manual_seed(0))

    output = run(model, x, context_of([*range(64)]))

    assert abs(float(output.mean())) < 0.01
    assert abs(float(output.var()) - 1) < 0.01


def test_masks_differ_by_sample_step_seed_layer_and_call() -> None:
    x = torch.ones(2, 64)
    drop = PlanInvariantDropout(0.5, "a")
    base = run(drop, x, context_of([0, 1]))

    assert torch.equal(run(drop, x, context_of([0, 1])), base)
    assert not torch.equal(base[0], base[1])
    assert not torch.equal(run(drop, x, context_of([0, 1], step=4)), base)
    assert not torch.equal(run(drop, x, context_of([0, 1], seed=2)), base)
    assert not torch.equal(run(PlanInvariantDropout(0.5, "b"), x, context_of([0, 1])), base)
    with use_sample_context(context_of([0, 1])):
        first, second = drop(x), drop(x)
    assert torch.equal(first, base)
    assert not torch.equal(second, base)


def test_the_default_generator_does_not_matter() -> None:
    drop = PlanInvariantDropout(0.5, "a")
    torch.manual_seed(0)
    first = run(drop, torch.ones(2, 64), context_of([0, 1]))
    torch.manual_seed(1)

    assert torch.equal(run(drop, torch.ones(2, 64), context_of([0, 1])), first)


class SharedDropout(nn.Module):
    """One dropout called in two checkpointed segments, twice in each."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.drop = nn.Dropout(0.5)

    def segment(self, x: torch.Tensor) -> torch.Tensor:
        output = self.drop(self.drop(x).exp())
        assert isinstance(output, torch.Tensor)
        return output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mode == "plain":
            return self.segment(self.segment(x))
        reentrant = self.mode == "reentrant"
        for _ in range(2):
            x = checkpoint(self.segment, x, use_reentrant=reentrant)
        return x


@pytest.mark.parametrize("mode", ["reentrant", "non-reentrant"])
def test_recompute_replays_the_masks(mode: str) -> None:
    grads = []
    for each in ("plain", mode):
        model = convert_dropout(SharedDropout(each))
        x = torch.linspace(-1, 1, 64, dtype=torch.float64).reshape(2, 32).requires_grad_()
        # Backward runs outside the context, as it does in an accelerator's thread.
        output = run(model, x, context_of([4, 5]))
        torch.autograd.backward(output.sum())
        assert x.grad is not None
        grads.append(x.grad)

    assert torch.equal(grads[0], grads[1])


def test_recompute_without_the_generators_state_is_refused() -> None:
    drop = PlanInvariantDropout(0.5, "a")
    x = torch.ones(2, 8, requires_grad=True)
    with use_sample_context(context_of([0, 1])):
        output = checkpoint(drop, x.exp(), use_reentrant=False, preserve_rng_state=False)

    with pytest.raises(ConfigError, match="preserve_rng_state=True"):
        output.sum().backward()


def share_masks(rank: int, world_size: int) -> torch.Tensor:
    torch.manual_seed(rank)
    model = convert_dropout(nn.Sequential(nn.Identity(), nn.Dropout(0.3)))
    indices = [[0, 1, 2], [], [3, 4]][rank]
    return run(model, torch.ones(len(indices), 33), context_of(indices))


def test_ranks_draw_what_one_device_draws() -> None:
    parts = run_ranks(share_masks, 3)

    model = convert_dropout(nn.Sequential(nn.Identity(), nn.Dropout(0.3)))
    assert torch.equal(
        torch.cat(parts), run(model, torch.ones(5, 33), context_of([*range(5)]))
    )


def test_eval_and_zero_rate_are_the_identity() -> None:
    x = torch.randn(3, 4)

    assert PlanInvariantDropout(0.5, "a").eval()(x) is x
    assert PlanInvariantDropout(0.0, "a")(x) is x


@pytest.mark.parametrize("make", [lambda: nn.Dropout(1.0), lambda: nn.AlphaDropout(1.0)])
def test_a_rate_of_one_drops_all(make: Callable[[], nn.Module]) -> None:
    output = run(convert_dropout(make()), torch.randn(3, 100), context_of([0, 1, 2]))

    assert not output.any()


@pytest.mark.parametrize("make", [nn.Dropout, nn.Dropout1d, nn.AlphaDropout])
def test_in_place_equals_out_of_place(make: Callable[..., nn.Module]) -> None:
    x = torch.randn(3, 5, 4)
    expected = run(convert_dropout(make(0.4)), x, context_of([0, 1, 2]))

    output = run(convert_dropout(make(0.4, inplace=True)), x, context_of([0, 1, 2]))

    assert output.data_ptr() == x.data_ptr()
    torch.testing.assert_close(output, expected)


def test_the_gradient_passes_where_kept() -> None:
    x = torch.ones(4, 64, requires_grad=True)

    output = run(PlanInvariantDropout(0.25, "a"), x, context_of([0, 1, 2, 3]))
    (grad,) = torch.autograd.grad(output.sum(), x)

    assert torch.equal(grad, output)


def test_an_input_without_the_samples_dim_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"shape \(6, 2\) in a micro-batch of 3 samples"):
        run(PlanInvariantDropout(0.5, "a"), torch.ones(6, 2), context_of([0, 1, 2]))
    with pytest.raises(ConfigError, match="of \\(5,\\) dims"):
        run(
            convert_dropout(nn.Dropout3d(0.5)),
            torch.ones(3, 2, 2, 2),
            context_of([0, 1, 2]),
        )


def test_training_outside_a_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="outside a step"):
        PlanInvariantDropout(0.5, "a")(torch.ones(2, 2))


def test_a_context_needs_a_vector_of_int64() -> None:
    with pytest.raises(ConfigError, match="expected int64"):
        SampleContext(seed=0, step=0, sample_indices=torch.zeros(2))


def test_conversion_names_layers_by_their_place_and_keeps_flags() -> None:
    shared = nn.Dropout(0.2)
    inner = nn.Sequential(shared, nn.Linear(2, 2))
    model = nn.Sequential(inner, shared, nn.Dropout(0.3).eval())

    convert_dropout(model)

    first, last = inner[0], model[2]
    assert model[1] is first
    assert isinstance(first, PlanInvariantDropout)
    assert isinstance(last, PlanInvariantDropout)
    assert (first.layer_id, first.p, first.training) == ("0.0", 0.2, True)
    assert (last.layer_id, last.p, last.training) == ("2", 0.3, False)
    assert copy.deepcopy(last).layer_id == "2"


def test_what_cannot_be_converted_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(4, 2, dropout=0.1),
            "plain": nn.MultiheadAttention(4, 2),
            "recurrent": nn.LSTM(2, 2, num_layers=2, dropout=0.1),
            "feature": nn.FeatureAlphaDropout(0.1),
            "drop": nn.Dropout(0.1),
            "wrapper": SharedDropout("plain"),
        }
    )

    with caplog.at_level(logging.WARNING):
        convert_dropout(model)

    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert all(name in message for name in ("attention", "recurrent", "feature"))
    assert "plain" not in message
    assert "drop (" not in message
    assert "wrapper" not in message
