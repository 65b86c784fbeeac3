"""Metrics over uneven shares, and what a session says of itself."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import geartrain as gt
from geartrain.errors import ConfigError
from local_ranks import run_ranks
from small_models import ConvNet, images, mean_cross_entropy, plan_of, vectors
from training_jobs import BATCH, Job, make_sgd, run_steps


def metrics_of(output: torch.Tensor, batch: Any) -> dict[str, Any]:
    right = (output.argmax(-1) == batch[1]).sum()
    return {
        "accuracy": (right, len(output)),
        "loss": (mean_cross_entropy(output, batch).sum(), len(output)),
        "input": (batch[0].double().sum(), batch[0].numel()),
    }


def evaluate_uneven(rank: int, world_size: int, shares: list[int]) -> dict[str, Any]:
    session = gt.Session(plan=plan_of(shares, [2] * len(shares)))
    model = Job().model()
    frozen_part = next(iter(model.children()))
    session.setup(model, make_sgd(model), loss_fn=mean_cross_entropy)
    train = session.setup_dataloader(
        vectors(30, torch.float64), global_batch_size=sum(shares)
    )
    test = session.setup_dataloader(
        vectors(29, torch.float64), global_batch_size=10, shuffle=False, drop_last=True
    )
    frozen_part.eval()
    before = session.evaluate(test, metrics_of)  # no plan yet
    metrics = []
    for batch in train:
        session.step(batch)
        metrics.append(session.evaluate(test, metrics_of))
    assert model.training
    assert not frozen_part.training
    with torch.no_grad():
        output = model(vectors(29, torch.float64).inputs)
    batch = vectors(29, torch.float64).inputs, vectors(29, torch.float64).targets
    expected = metrics_of(output, batch)
    session.close()
    return {
        "before": before,
        "metrics": metrics,
        "expected": {name: float(s) / c for name, (s, c) in expected.items()},
        "num_steps": len(train),
    }


@pytest.mark.parametrize("shares", [[9, 0, 3], [12, 0, 0], [1, 10, 1]])
def test_evaluation_counts_each_sample_once(shares: list[int]) -> None:
    results = run_ranks(evaluate_uneven, 3, shares)

    for result in results:
        assert result["before"] == results[0]["before"]
        assert result["metrics"] == results[0]["metrics"]
        # Evaluating moved nothing.
        assert len(result["metrics"]) == result["num_steps"] == 3
        assert result["metrics"][-1] == pytest.approx(result["expected"], rel=1e-12)


def reduce_values(rank: int, world_size: int) -> tuple[float, float]:
    session = gt.Session()
    mean = session.all_reduce_metric([4.0, 0.0, 2.0][rank], [1, 0, 2][rank])
    not_a_number = session.all_reduce_metric([1.0, math.nan, 1.0][rank], 1)
    session.close()
    return mean, not_a_number


def test_a_reduced_metric_is_weighted_by_counts() -> None:
    for mean, not_a_number in run_ranks(reduce_values, 3):
        assert mean == 2.0
        assert math.isnan(not_a_number)


def reduce_nothing(rank: int, world_size: int) -> float:
    return gt.Session().all_reduce_metric(0.0, 0)


def test_a_metric_over_nothing_says_so() -> None:
    with pytest.raises(ConfigError, match="count 0 over all devices"):
        run_ranks(reduce_nothing, 2)


def evaluate_batchnorm(rank: int, world_size: int) -> tuple[float, torch.Tensor]:
    """Running statistics differ between the ranks until evaluation takes rank 0's."""
    session = gt.Session(plan=plan_of([9, 3]))
    torch.manual_seed(1)
    model = ConvNet().double()
    session.setup(model, make_sgd(model), loss_fn=mean_cross_entropy)
    loader = session.setup_dataloader(images(24, torch.float64), global_batch_size=BATCH)
    run_steps(session, loader, 3)
    loss = session.evaluate(loader, metrics_of)["loss"]
    with torch.no_grad():
        output = model.eval()(images(24, torch.float64).inputs)
    batch = None, images(24, torch.float64).targets
    return loss, mean_cross_entropy(output, batch).mean()


@pytest.mark.filterwarnings("ignore:the model has BatchNorm")
def test_all_ranks_evaluate_with_the_same_running_statistics() -> None:
    results = run_ranks(evaluate_batchnorm, 2)

    for loss, by_one in results:
        assert loss == pytest.approx(float(by_one), rel=1e-12)


def describe(rank: int, world_size: int) -> dict[str, Any]:
    session = gt.Session()
    return {
        "rank": session.rank,
        "world_size": session.world_size,
        "is_main": session.is_main,
        "device": str(session.device),
        "device_id": session.device_id,
        "step_index": session.step_index,
        "epoch": session.epoch,
        "plan": session.current_plan,
    }


def test_a_session_knows_its_place() -> None:
    results = run_ranks(describe, 2)

    assert [r["rank"] for r in results] == [0, 1]
    assert [r["is_main"] for r in results] == [True, False]
    assert [r["device_id"] for r in results] == ["cpu#0", "cpu#1"]
    assert {r["world_size"] for r in results} == {2}
    assert results[0]["step_index"] == results[0]["epoch"] == 0
    assert results[0]["plan"] is None


def printed(rank: int, world_size: int) -> str:
    import contextlib
    import io

    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        gt.Session().print("loss", 0.5)
    return text.getvalue()


def test_only_the_main_rank_prints() -> None:
    assert run_ranks(printed, 2) == ["loss 0.5\n", ""]


def wrong_metric(output: torch.Tensor, batch: Any) -> Any:
    return {"accuracy": 0.5}


def test_a_metric_without_a_count_is_refused() -> None:
    session = gt.Session()
    model = Job(dtype=torch.float32).model()
    session.setup(model, make_sgd(model))
    loader = session.setup_dataloader(vectors(24, torch.float32), global_batch_size=BATCH)

    with pytest.raises(ConfigError, match=r"pairs \(sum, count\), such as"):
        session.evaluate(loader, wrong_metric)


def test_epochs_are_counted() -> None:
    session = gt.Session()
    model = Job(dtype=torch.float32).model()
    session.setup(model, make_sgd(model), loss_fn=mean_cross_entropy)
    loader = session.setup_dataloader(vectors(24, torch.float32), global_batch_size=BATCH)
    epochs = []
    for _ in range(2):
        for batch in loader:
            session.step(batch)
            epochs.append(session.epoch)

    assert epochs == [0, 0, 1, 1]
    assert session.step_index == 4
