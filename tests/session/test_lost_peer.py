"""A peer that dies: the others say so at once, and nothing was applied."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest
import torch

import geartrain as gt
from geartrain.errors import CommunicationError
from local_ranks import run_ranks
from small_models import ConvNet, images, mean_cross_entropy, plan_of
from training_jobs import BATCH, Job, flat_parameters, make_adamw, partial_plan

_LOST = r"cpu#1 closed the connection: it died|waiting for cpu#1|lost cpu#1 in the exchange"
"""Whoever notices first tells it: the heartbeats, a message, or a neighbour."""


def killed_at(when: str, is_victim: bool) -> Any:
    """A loss function at whose fifth call a rank dies."""
    num_calls = 0

    def loss_fn(output: Any, batch: Any) -> torch.Tensor:
        nonlocal num_calls
        num_calls += 1
        if is_victim and num_calls == 5 and when == "forward":
            os.kill(os.getpid(), signal.SIGKILL)
        if is_victim and num_calls == 5 and when == "backward":
            output.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        return mean_cross_entropy(output, batch)

    return loss_fn


def lose_a_peer(
    rank: int, world_size: int, when: str, plan: Any, is_batchnorm: bool
) -> dict[str, Any]:
    session = gt.Session(plan=plan)
    job = Job(make_model=ConvNet, make_data=images) if is_batchnorm else Job()
    model = job.model()
    optimizer = make_adamw(model)
    loss_fn = killed_at(when, rank == 1)
    session.setup(model, optimizer, loss_fn=loss_fn, sync_batchnorm=is_batchnorm)
    loader = session.setup_dataloader(job.data(), global_batch_size=BATCH)
    before = flat_parameters(model)
    started_at_s = time.monotonic()
    try:
        for _ in range(100):
            for batch in loader:
                before = flat_parameters(model)
                started_at_s = time.monotonic()
                session.step(batch)
    except CommunicationError as error:
        return {
            "error": str(error),
            "took_s": time.monotonic() - started_at_s,
            "unchanged": torch.equal(before, flat_parameters(model)),
            "parameters": flat_parameters(model),
            "step_index": session.step_index,
        }
    return {}


@pytest.mark.parametrize("when", ["forward", "backward"])
@pytest.mark.parametrize(
    "plan", [plan_of([5, 3, 4]), partial_plan({0: 8, 1: 4}, 3)], ids=["all", "left_out"]
)
def test_survivors_name_the_lost_peer_and_apply_nothing(when: str, plan: Any) -> None:
    results = run_ranks(lose_a_peer, 3, when, plan, False, may_die=[1])

    assert not results[1]
    for result in (results[0], results[2]):
        assert re.search(_LOST, result["error"])
        assert "The step was not applied" in result["error"]
        assert result["took_s"] < 20  # and not the 300 s of the deadline
        assert result["unchanged"]
        assert result["step_index"] == results[0]["step_index"] > 0


def test_a_peer_lost_within_batchnorm_is_told() -> None:
    plan = plan_of([5, 3, 4], uniform_count=1)

    results = run_ranks(lose_a_peer, 3, "backward", plan, True, may_die=[1])

    for result in (results[0], results[2]):
        assert "see the other ranks' logs" in result["error"] or "cpu#1" in result["error"]
        assert result["unchanged"]


def die_at_setup(rank: int, world_size: int) -> str:
    session = gt.Session()
    model = Job().model()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    # Without the check of the model's layout, which would wait for rank 1's answer.
    session._place.groups.collective()
    from geartrain.parallel.state_sync import broadcast_model

    try:
        broadcast_model(session._place.groups, model)
    except CommunicationError as error:
        return str(error)
    return ""


def test_a_peer_lost_at_setup_is_told() -> None:
    results = run_ranks(die_at_setup, 2, may_die=[1])

    assert results[0].startswith("sending the training state failed")


def die_before_answering(rank: int, world_size: int) -> str:
    session = gt.Session()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    session._place.groups.rendezvous.timeout_s = 1.0
    try:
        session.all_reduce_metric(1.0, 1)
    except CommunicationError as error:
        return str(error)
    return ""


def test_a_peer_that_does_not_answer_is_named() -> None:
    results = run_ranks(die_before_answering, 2, may_die=[1])

    assert "waited 1 s for the metrics of cpu#1 (rank 1)" in results[0]
