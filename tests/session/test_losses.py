"""All forms of a loss function, over uneven shares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import geartrain as gt
from geartrain.errors import ConfigError
from local_ranks import run_ranks
from small_models import Gpt, masked_cross_entropy, plan_of, tokens, two_terms, vectors
from training_jobs import (
    Job,
    largest_difference,
    make_sgd,
    relative_error,
    train_on_ranks,
    train_plainly,
)

EXPECTED = Job(make_model=Gpt, make_data=tokens, loss_fn=masked_cross_entropy)
PLAN = plan_of([7, 0, 5], [2, 1, 1])


def token_losses(output: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(
        output.flatten(0, -2), batch[1].flatten(), reduction="none", ignore_index=-100
    )


def mean_of_tokens(output: Any, batch: Any) -> torch.Tensor:
    """nan where a micro-batch is all masked, which some of one sample are."""
    return F.cross_entropy(output.flatten(0, -2), batch[1].flatten(), ignore_index=-100)


def count_tokens(batch: Any) -> int:
    return int((batch[1] != -100).sum())


def one_named_term(output: Any, batch: Any) -> Any:
    return {"tokens": masked_cross_entropy(output, batch)}


@pytest.mark.parametrize(
    ("loss_fn", "options"),
    [
        (masked_cross_entropy, {}),
        (one_named_term, {}),
        (mean_of_tokens, {"count_fn": count_tokens}),
        (token_losses, {"count_fn": count_tokens}),
    ],
)
def test_each_form_trains_like_one_device(loss_fn: Any, options: Any) -> None:
    expected = train_plainly(EXPECTED)
    job = Job(make_model=Gpt, make_data=tokens, loss_fn=loss_fn, options=options)

    results = run_ranks(train_on_ranks, 3, job, {0: PLAN})

    assert largest_difference(results[1].losses, expected.losses) <= 1e-10
    assert relative_error(results[2].parameters, expected.parameters) <= 1e-10


def terms_that_may_be_absent(output: Any, batch: Any) -> Any:
    """Where a part has no sample for a term, the term is a constant 0 of count 0."""
    rows = batch[0][:, 0] > 0
    terms = {"all": (F.cross_entropy(output, batch[1], reduction="sum"), len(output))}
    terms["positive"] = (
        (output[rows].square().sum(), int(rows.sum()))
        if rows.any()
        else (output.new_zeros(()), 0)
    )
    return terms


def count_terms(batch: Any) -> dict[str, int]:
    return {"all": len(batch[0]), "positive": int((batch[0][:, 0] > 0).sum())}


@pytest.mark.parametrize("options", [{}, {"count_fn": count_terms}])
def test_a_term_may_be_absent_from_a_micro_batch(options: Any) -> None:
    job = Job(loss_fn=terms_that_may_be_absent, options=options)
    expected = train_plainly(job)

    results = run_ranks(train_on_ranks, 3, job, {0: PLAN})

    assert largest_difference(results[0].losses, expected.losses) <= 1e-10
    assert relative_error(results[0].parameters, expected.parameters) <= 1e-10


def one_large_value(output: Any, batch: Any) -> Any:
    return output.flatten() * 0 + 1000


def test_a_sum_of_16_bit_losses_does_not_overflow() -> None:
    job = Job(loss_fn=one_large_value, dtype=torch.float16, num_steps=1, num_samples=120)
    plan = plan_of([100, 20])

    results = run_ranks(
        train_on_ranks, 2, Job(**{**vars(job), "batch_size": 120}), {0: plan}
    )

    assert results[0].losses == [1000.0]


def wrong_counts(batch: Any) -> dict[str, int]:
    return {"tokens": batch[1].numel(), "norm": len(batch[1])}


def test_counts_that_contradict_the_loss_are_refused_on_all_ranks() -> None:
    job = Job(
        make_model=Gpt,
        make_data=tokens,
        loss_fn=two_terms,
        options={"count_fn": wrong_counts},
    )

    with pytest.raises(ConfigError, match="count_fn counted 60 for the term 'tokens' but"):
        run_ranks(train_on_ranks, 3, job, {0: PLAN})


def other_names(batch: Any) -> dict[str, int]:
    return {"token": count_tokens(batch), "norm": len(batch[1])}


def no_tensor(output: Any, batch: Any) -> Any:
    return 0.5


def mean_alone(output: Any, batch: Any) -> Any:
    return F.cross_entropy(output, batch[1])


def sum_that_is_none(output: Any, batch: Any) -> Any:
    return F.cross_entropy(output, batch[1], reduction="none"), len(output)


def mapping_of_means(output: Any, batch: Any) -> Any:
    return {"a": output.mean()}


def changing_names(output: Any, batch: Any) -> Any:
    return {f"n{int(batch[1][0])}": (output.sum(), len(output))}


def detached(output: Any, batch: Any) -> Any:
    return F.cross_entropy(output.detach(), batch[1], reduction="none")


def count_both(batch: Any) -> dict[str, int]:
    return {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("loss_fn", "options", "message"),
    [
        (no_tensor, {}, "loss_fn returned float; return an unreduced tensor"),
        (mean_alone, {}, "returned a scalar, so its weight is unknown; .*count_fn"),
        (mean_alone, {"count_fn": count_both}, r"several counts, \['a', 'b'\]; return one"),
        (sum_that_is_none, {}, r"sum of shape \(3,\); expected a scalar.*\.sum\(\)"),
        (mapping_of_means, {}, "loss term 'a' is Tensor; return an unreduced"),
        (changing_names, {}, r"returned the terms \['n.'\] but before it were"),
        (detached, {}, "does not depend on any trainable parameter"),
    ],
)
def test_what_cannot_be_weighted_is_refused(
    loss_fn: Any, options: Any, message: str
) -> None:
    session = gt.Session()
    model = Job(dtype=torch.float32).model()
    session.setup(model, make_sgd(model), loss_fn=loss_fn, micro_batch_size=3, **options)
    loader = session.setup_dataloader(vectors(24, torch.float32), global_batch_size=12)

    with pytest.raises(ConfigError, match=message):
        session.step(next(iter(loader)))
