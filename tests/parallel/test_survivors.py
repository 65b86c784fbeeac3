"""Ranks are lost in the middle of a training: the others redo the step and go on."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import geartrain as gt
from geartrain.errors import CommunicationError, TrainingStopped
from geartrain.parallel.handover import Lineage, PlacesDifferError, plan_handover
from geartrain.parallel.plan_director import PlanDirector
from geartrain.parallel.regroup_training import check_members
from geartrain.parallel.step_engine import StepEngine
from geartrain.parallel.survivors_buffers import BufferKeeper
from geartrain.planner import Plan
from geartrain.telemetry import RecoveryReport, RunLogReader, encode_document
from local_ranks import run_ranks
from small_models import Mlp, mean_cross_entropy
from training_jobs import (
    BATCH,
    Job,
    Result,
    global_batches,
    largest_difference,
    partial_plan,
    relative_error,
    run_steps,
    train_by_session,
    train_plainly,
)
from worker_sessions import worker_session

JOB = Job(num_steps=12)


def strike(number: int) -> None:
    os.kill(os.getpid(), number)


def doomed(victims: dict[int, tuple[int, float, int]], session: gt.Session) -> Any:
    """A loss function in which victims are hit in a step, some seconds into it."""
    armed = session.rank in victims

    def loss_fn(output: Any, batch: Any) -> torch.Tensor:
        nonlocal armed
        if armed and session.step_index == victims[session.rank][0]:
            armed = False
            _, delay_s, number = victims[session.rank]
            threading.Timer(delay_s, strike, (number,)).start()
        return mean_cross_entropy(output, batch)

    return loss_fn


def train(
    rank: int, world_size: int, folder: Path, victims: Any, spec: dict[str, Any]
) -> tuple[Result, float]:
    session = worker_session(
        rank, world_size, folder, deterministic=True, **{"on_loss": "finish"} | spec
    )
    job = Job(num_steps=12, loss_fn=doomed(victims, session))
    started_at_s = time.monotonic()
    result = train_by_session(job, session)
    return result, time.monotonic() - started_at_s


def check(results: Sequence[Any], survivors: list[int]) -> None:
    assert [rank for rank, result in enumerate(results) if result] == survivors
    expected = train_plainly(JOB)
    for rank in survivors:
        result, _ = results[rank]
        assert largest_difference(result.losses, expected.losses) < 1e-6
        assert relative_error(result.parameters, expected.parameters) < 1e-6
        assert result.lr == expected.lr


@pytest.mark.parametrize("seed", range(4))
def test_training_goes_on_without_a_killed_rank_as_on_one_device(
    tmp_path: Path, seed: int
) -> None:
    delay_s = random.Random(seed).uniform(0, 0.02)
    victim = seed % 2

    results = run_ranks(
        train, 3, tmp_path, {victim: (7, delay_s, signal.SIGKILL)}, {}, may_die=[victim]
    )

    check(results, [1 - victim, 2])


def fail_at_the_end(rank: int, step: int, *, victim: int, behind: int) -> None:
    """Let a rank die right after a step's exchange, and another one not notice its end."""
    original = StepEngine._exchange
    num_calls = 0

    def exchange(self: StepEngine, *args: Any, **options: Any) -> Any:
        nonlocal num_calls
        trailer = original(self, *args, **options)
        num_calls += 1
        if num_calls == step and rank == victim:
            strike(signal.SIGKILL)
        if num_calls == step and rank == behind:
            msg = "the end of the exchange was lost"
            raise CommunicationError(msg)
        return trailer

    StepEngine._exchange = exchange  # type: ignore[method-assign]  # a process of its own


def train_with_one_behind(
    rank: int, world_size: int, folder: Path, behind: int, step: int, job: Job
) -> tuple[Result, float]:
    session = worker_session(
        rank, world_size, folder, deterministic=True, on_loss="continue"
    )
    fail_at_the_end(rank, step, victim=1, behind=behind)
    return train_by_session(job, session), 0.0


@pytest.mark.parametrize("step", [6, 12], ids=["middle", "last"])
@pytest.mark.parametrize("behind", [0, 2])
def test_step_that_only_some_applied_is_handed_on(
    tmp_path: Path, behind: int, step: int
) -> None:
    results = run_ranks(train_with_one_behind, 3, tmp_path, behind, step, JOB, may_die=[1])

    check(results, [0, 2])


def train_by_plan(
    rank: int, world_size: int, folder: Path, plan: Plan, victims: Any, spec: dict[str, Any]
) -> tuple[Result, float]:
    path = folder / "plan.json"
    if rank == 0:
        text = encode_document(plan).decode()
        path.write_text(text.replace("cpu#", "emulated:"))
    session = worker_session(
        rank, world_size, folder, plan_path=str(path), on_loss="continue", **spec
    )
    job = Job(num_steps=12, loss_fn=doomed(victims, session))
    return train_by_session(job, session), 0.0


def test_device_that_was_left_out_gets_the_state_and_a_share(tmp_path: Path) -> None:
    victims = {1: (7, 0.0, signal.SIGKILL)}
    plan = partial_plan({0: 8, 1: 4}, 3)

    results = run_ranks(train_by_plan, 3, tmp_path, plan, victims, {}, may_die=[1])

    check(results, [0, 2])


def test_next_lead_that_was_left_out_gets_the_state_of_who_holds_it(tmp_path: Path) -> None:
    victims = {0: (7, 0.0, signal.SIGKILL)}
    plan = partial_plan({0: 8, 2: 4}, 3)

    results = run_ranks(train_by_plan, 3, tmp_path, plan, victims, {}, may_die=[0])

    check(results, [1, 2])


def train_with_tail(
    rank: int, world_size: int, folder: Path, victims: Any
) -> tuple[Result, float]:
    session = worker_session(
        rank, world_size, folder, on_loss="continue", tail_fraction=0.5
    )
    job = Job(
        num_steps=12, loss_fn=doomed(victims, session), options={"micro_batch_size": 1}
    )
    return train_by_session(job, session), 0.0


@pytest.mark.parametrize("victim", [0, 1])
def test_shared_tail_is_shared_among_those_left(tmp_path: Path, victim: int) -> None:
    victims = {victim: (6, 0.0, signal.SIGKILL)}

    results = run_ranks(train_with_tail, 3, tmp_path, victims, may_die=[victim])

    check(results, [rank for rank in range(3) if rank != victim])


def train_until_stopped(
    rank: int, world_size: int, folder: Path, victims: Any
) -> tuple[int, str]:
    session = worker_session(
        rank, world_size, folder, deterministic=True, on_loss="continue"
    )
    kill = doomed(victims, session)

    def loss_fn(output: Any, batch: Any) -> torch.Tensor:
        if rank == 2 and session.step_index == 9:
            strike(signal.SIGUSR1)
        loss: torch.Tensor = kill(output, batch)
        return loss

    try:
        train_by_session(Job(num_steps=12, loss_fn=loss_fn), session)
    except TrainingStopped as stopped:
        return session.step_index, str(stopped)
    return session.step_index, ""


def test_stop_that_is_asked_for_after_a_loss_saves(tmp_path: Path) -> None:
    victims = {1: (4, 0.0, signal.SIGKILL)}

    results = run_ranks(train_until_stopped, 3, tmp_path, victims, may_die=[1])

    assert [results[0][0], results[2][0]] == [10, 10]
    assert f"saved to {tmp_path / 'checkpoint'}" in results[0][1]
    assert (tmp_path / "checkpoint").is_dir()


class Statistics(torch.nn.Module):
    """Much in buffers, so that a message of them is half way when its sender dies."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Mlp()
        self.register_buffer("large", torch.zeros(20_000_000))

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.layer(inputs)


def evaluate_while_the_lead_dies(
    rank: int, world_size: int, folder: Path, delay_s: float
) -> tuple[float, float]:
    session = worker_session(rank, world_size, folder, deterministic=True, on_loss="finish")
    job = Job(make_model=Statistics, num_steps=2)
    model = job.model()
    session.setup(model, job.make_optimizer(model), loss_fn=mean_cross_entropy)
    loader = session.setup_dataloader(job.data(), global_batch_size=BATCH)
    run_steps(session, loader, 2)
    if rank == 0:
        threading.Timer(delay_s, strike, (signal.SIGKILL,)).start()

    def sums(output: Any, batch: Any) -> dict[str, Any]:
        return {"loss": (mean_cross_entropy(output, batch).sum(), len(batch[0]))}

    started_at_s = time.monotonic()
    losses = [session.evaluate(loader, sums)["loss"] for _ in range(4)]
    took_s = time.monotonic() - started_at_s
    session.close()
    return losses[-1], took_s


@pytest.mark.parametrize("delay_s", [0.0, 0.1])
def test_nobody_waits_for_buffers_of_a_lead_that_died_over_them(
    tmp_path: Path, delay_s: float
) -> None:
    results = run_ranks(evaluate_while_the_lead_dies, 4, tmp_path, delay_s, may_die=[0])

    assert len({result[0] for result in results[1:]}) == 1
    assert max(result[1] for result in results[1:]) < 30  # not 300 s


def lineage(rank: int, num_steps: int, **options: Any) -> Lineage:
    fields = {"holds_state": True, "num_together": 0} | options
    return Lineage(rank=rank, num_steps=num_steps, **fields)


def test_state_is_given_to_all_that_are_behind() -> None:
    rows = [lineage(0, 4), lineage(1, 5), lineage(2, 4, holds_state=False), lineage(4, 5)]

    handover = plan_handover(rows)

    assert (handover.source, handover.to, handover.num_steps) == (1, (0, 2), 5)
    assert handover.holders == (0, 1, 4)


@pytest.mark.parametrize(
    "rows",
    [
        [lineage(0, 4), lineage(2, 5, holds_state=False)],
        [lineage(0, 4), lineage(2, 6)],
    ],
    ids=["without state", "two steps"],
)
def test_ranks_at_different_places_do_not_go_on(rows: list[Lineage]) -> None:
    with pytest.raises(PlacesDifferError, match="at different places"):
        plan_handover(rows)


def test_buffers_are_as_before_the_step() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    model.register_buffer("mask", torch.ones(2))
    keeper = BufferKeeper(model)
    model(torch.randn(5, 3))
    keeper.keep()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    model(torch.randn(5, 3))
    model.mask.zero_()  # type: ignore[operator]  # a buffer
    keeper.restore()

    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    model(torch.randn(5, 3))
    keeper.restore()  # nothing was begun since
    after = dict(model.named_buffers())["1.running_mean"]
    assert not torch.equal(after, before["1.running_mean"])


def train_plainly_without(job: Job, step: int, gone: range) -> list[float]:
    """Losses of one device that leaves samples out of one batch."""
    model = job.model()
    optimizer = job.make_optimizer(model)
    losses = []
    for index, batch in enumerate(islice(global_batches(job), job.num_steps)):
        kept = [i for i in range(len(batch[0])) if index != step or i not in gone]
        part = [tensor[kept] for tensor in batch]
        optimizer.zero_grad()
        loss = mean_cross_entropy(model(part[0]), part).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("victim", [0, 1])
def test_shrunk_step_is_that_of_the_samples_left(tmp_path: Path, victim: int) -> None:
    victims = {victim: (6, 0.0, signal.SIGKILL)}

    results = run_ranks(
        train, 3, tmp_path, victims, {"on_loss": "shrink"}, may_die=[victim]
    )

    gone = range(4 * victim, 4 * victim + 4)
    expected = train_plainly_without(JOB, 6, gone)
    for rank in {0, 1, 2} - {victim}:
        assert largest_difference(results[rank][0].losses, expected) < 1e-6
    reader = RunLogReader(tmp_path)
    records, events = reader.new_steps(), reader.new_events()
    reader.close()
    shrunk = [event for event in events if event.kind == "shrunk"]
    assert [event.values["effective_batch_size"] for event in shrunk] == [8.0]
    made = [sum(r.num_samples for r in records if r.step == step) for step in (3, 6, 9)]
    assert made == [12, 8, 12]


def train_hit_twice(
    rank: int, world_size: int, folder: Path, waits: int | None
) -> list[float]:
    """Rank 1 dies in step 6, and rank 2 when it makes that step again.

    Args:
        rank: Of this process.
        world_size: Of the test.
        folder: Of the run.
        waits: A rank that takes up its new part of the batch only once rank 2 is dead.
    """
    session = worker_session(rank, world_size, folder, deterministic=True, on_loss="shrink")

    def loss_fn(output: Any, batch: Any) -> torch.Tensor:
        plan = session.current_plan
        num_left = len(plan.replicas) if plan is not None else 0
        if session.step_index == 6 and (rank, num_left) in {(1, 4), (2, 3)}:
            strike(signal.SIGKILL)
        return mean_cross_entropy(output, batch)

    if rank == waits:
        assign_after_a_loss(session)
    return train_by_session(Job(num_steps=12, loss_fn=loss_fn), session).losses


def assign_after_a_loss(session: gt.Session) -> None:
    """Have the shares of step 6 taken again only once another rank is lost over it."""
    original = PlanDirector.assign
    calls = []

    def assign(self: PlanDirector, *args: Any) -> Any:
        trainer = session._trained()
        if trainer.is_step_open and trainer.step_index == 6:
            calls.append(1)
            if len(calls) == 1:
                assert trainer.regrouper is not None
                deadline_s = time.monotonic() + 30
                while trainer.regrouper.membership.interruption() is None:
                    assert time.monotonic() < deadline_s
                    os.sched_yield()
                check_members(trainer)
        return original(self, *args)

    replaced: Any = PlanDirector  # in a process of its own
    replaced.assign = assign


def effective_batch_sizes(folder: Path) -> list[float]:
    reader = RunLogReader(folder)
    events = reader.new_events()
    reader.close()
    return [
        event.values["effective_batch_size"] for event in events if event.kind == "shrunk"
    ]


def test_a_step_shrinks_again_where_another_rank_is_lost_over_it(tmp_path: Path) -> None:
    results = run_ranks(train_hit_twice, 4, tmp_path, None, may_die=[1, 2])

    # Three samples each; then nine are left, three each, and rank 2 had 6, 7 and 8.
    expected = train_plainly_without(JOB, 6, range(3, 9))
    for rank in (0, 3):
        assert largest_difference(results[rank], expected) < 1e-6
    assert effective_batch_sizes(tmp_path) == [9.0, 6.0]


@pytest.mark.parametrize("waits", [0, 3])
def test_ranks_with_other_parts_of_a_step_make_it_whole_again(
    tmp_path: Path, waits: int
) -> None:
    results = run_ranks(train_hit_twice, 4, tmp_path, waits, may_die=[1, 2])

    expected = train_plainly(JOB)
    for rank in (0, 3):
        assert largest_difference(results[rank], expected.losses) < 1e-6


def test_recovery_is_reported(tmp_path: Path) -> None:
    run_ranks(train, 3, tmp_path, {1: (7, 0.0, signal.SIGKILL)}, {}, may_die=[1])

    reader = RunLogReader(tmp_path)
    reports = [RecoveryReport.of_event(event) for event in reader.new_events()]
    reader.close()
    (report,) = [report for report in reports if report is not None]
    assert report.detect_s == 0.0
    assert report.replan_s > 0.0
    assert report.restore_s > 0.0
    assert 0 <= report.lost_samples <= BATCH
