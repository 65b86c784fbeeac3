"""No step is applied anywhere before all ranks could apply it; histories never mix."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from geartrain.errors import CommunicationError
from geartrain.parallel.commit import ExchangeCommitter, StepName, gradient_code
from geartrain.parallel.handover import (
    Lineage,
    PlacesDifferError,
    describe_transfer,
    plan_handover,
)
from geartrain.parallel.regroup import Regrouper
from geartrain.parallel.step_engine import StepEngine
from local_ranks import run_ranks
from training_jobs import (
    Job,
    Result,
    largest_difference,
    relative_error,
    train_by_session,
    train_plainly,
)
from worker_sessions import worker_session

JOB = Job(num_steps=8)


def test_lineage_tells_histories_apart() -> None:
    one, two = torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0])

    assert StepName().after(one).after(two) != StepName().after(two).after(one)
    assert StepName(step=3).after(one) != StepName(step=4).after(one)
    assert StepName().after(one) == StepName().after(one.clone())


def test_gradient_code_finds_damage_within_a_stride_of_steps() -> None:
    flat = torch.randn(100_000)
    damaged = flat.clone()
    damaged[12_345] += 1.0
    stride = -(-flat.numel() // (1 << 14))

    codes = [
        gradient_code([flat], step) == gradient_code([damaged], step)
        for step in range(stride)
    ]

    assert codes.count(False) == 1


def lineage(rank: int, num_steps: int, name: str, voted: str = "", **more: Any) -> Lineage:
    fields: dict[str, Any] = {"holds_state": True, "num_together": 0} | more
    return Lineage(rank=rank, num_steps=num_steps, name=name, voted=voted, **fields)


def test_who_voted_applies_what_others_have_applied() -> None:
    rows = [lineage(0, 4, "a", "b"), lineage(1, 5, "b"), lineage(2, 4, "a", "b")]

    handover = plan_handover(rows)

    assert (handover.applies, handover.to, handover.num_steps) == ((0, 2), (), 5)


def test_step_that_all_left_have_voted_for_is_applied_though_nobody_has_yet() -> None:
    handover = plan_handover([lineage(0, 4, "a", "b"), lineage(2, 4, "a", "b")])

    assert (handover.applies, handover.to, handover.num_steps) == ((0, 2), (), 5)


def test_states_that_are_sent_are_told_of_by_who_gets_them() -> None:
    rows = [lineage(0, 5, "b"), lineage(1, 4, "a"), lineage(2, 0, "", joins=True)]

    text, values = describe_transfer(plan_handover(rows), rows, ["x", "y", "z"])

    assert text == "the state after 5 steps goes from x to y, z"
    assert values == {"to_survivors": 1.0, "to_joiners": 1.0}


def test_step_that_one_has_not_voted_for_is_done_again() -> None:
    rows = [lineage(0, 4, "a", "b", num_in_vain=3), lineage(2, 4, "a", num_in_vain=5)]

    handover = plan_handover(rows)

    assert (handover.applies, handover.to, handover.num_steps) == ((), (), 4)
    assert handover.num_in_vain == 8


def test_ranks_with_different_histories_never_go_on_together() -> None:
    with pytest.raises(PlacesDifferError, match="by different ways"):
        plan_handover([lineage(0, 4, "a"), lineage(1, 4, "x")])


def test_vote_for_another_history_does_not_count_as_the_step() -> None:
    handover = plan_handover([lineage(0, 4, "a", "x"), lineage(1, 5, "b")])

    assert (handover.applies, handover.to) == ((), (0,))


def note_order(rank: int, folder: Path, victim: dict[str, int]) -> None:
    """Write down when votes are given and steps applied, and kill who is to be killed."""
    vote, apply = ExchangeCommitter.vote, StepEngine.apply_voted
    log = (folder / f"order-{rank}.jsonl").open("a", buffering=1)

    def note(what: str, step: int) -> None:
        log.write(json.dumps([what, step, time.monotonic()]) + "\n")
        if victim == {"rank": rank, what: step}:
            os.kill(os.getpid(), signal.SIGKILL)

    def noted_vote(self: ExchangeCommitter, name: StepName) -> None:
        note("vote", name.step)
        vote(self, name)

    def noted_apply(self: StepEngine) -> Any:
        assert self.voted_name is not None
        note("apply", self.voted_name.step)
        return apply(self)

    ExchangeCommitter.vote = noted_vote  # type: ignore[method-assign]  # own process
    StepEngine.apply_voted = noted_apply  # type: ignore[method-assign]


def train(rank: int, world_size: int, folder: Path, victim: dict[str, int]) -> Result:
    session = worker_session(
        rank, world_size, folder, deterministic=True, on_loss="continue"
    )
    note_order(rank, folder, victim)

    def refuse(*_: object) -> None:
        msg = "a state was sent"
        raise AssertionError(msg)

    Regrouper._hand_over = refuse  # type: ignore[method-assign,assignment]  # own process
    return train_by_session(JOB, session)


def read_order(folder: Path, rank: int) -> list[tuple[str, int, float]]:
    lines = (folder / f"order-{rank}.jsonl").read_text().splitlines()
    return [tuple(json.loads(line)) for line in lines]


def check_as_on_one_device(results: list[Any], survivors: list[int]) -> None:
    assert [rank for rank, result in enumerate(results) if result] == survivors
    expected = train_plainly(JOB)
    for rank in survivors:
        assert largest_difference(results[rank].losses, expected.losses) < 1e-6
        assert relative_error(results[rank].parameters, expected.parameters) < 1e-6


def test_no_step_is_applied_before_all_have_voted(tmp_path: Path) -> None:
    results = run_ranks(train, 3, tmp_path, {})

    check_as_on_one_device(results, [0, 1, 2])
    orders = [read_order(tmp_path, rank) for rank in range(3)]
    for step in range(1, JOB.num_steps + 1):
        voted = [
            at for order in orders for what, s, at in order if (what, s) == ("vote", step)
        ]
        applied = [at for o in orders for what, s, at in o if (what, s) == ("apply", step)]
        assert len(voted) == len(applied) == 3
        assert max(voted) <= min(applied)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("place", ["vote", "apply"])
def test_rank_killed_around_the_commit_costs_no_step_and_no_state(
    tmp_path: Path, victim: int, place: str
) -> None:
    results = run_ranks(train, 3, tmp_path, {"rank": victim, place: 4}, may_die=[victim])

    survivors = [rank for rank in range(3) if rank != victim]
    check_as_on_one_device(results, survivors)
    for rank in survivors:
        applied = [s for what, s, _ in read_order(tmp_path, rank) if what == "apply"]
        assert applied == list(range(1, JOB.num_steps + 1))
    records = [json.loads(x) for x in (tmp_path / "run.jsonl").read_text().splitlines()]
    steps = [r["step"] for r in records if r["device_id"] == f"emulated:{survivors[-1]}"]
    assert steps == list(range(JOB.num_steps))


def train_damaged(rank: int, world_size: int, folder: Path, what: str) -> str:
    session = worker_session(
        rank, world_size, folder, deterministic=True, on_loss="continue"
    )
    original = StepEngine._exchange
    num_calls = 0

    def exchange(self: StepEngine, *args: Any, **options: Any) -> Any:
        nonlocal num_calls
        voted = original(self, *args, **options)
        num_calls += 1
        if rank == 1 and num_calls == 4:
            if what == "gradients":
                assert self.buckets is not None
                self.buckets.flats[0][0] += 1e-3
                object.__setattr__(voted, "code", gradient_code(self.buckets.flats, 3))
            else:
                name = StepName(step=voted.name.step, lineage="00" * 16)
                object.__setattr__(voted, "name", name)
        return voted

    StepEngine._exchange = exchange  # type: ignore[method-assign]  # own process
    try:
        train_by_session(JOB, session)
    except CommunicationError as error:
        return f"{session.step_index} {error}"
    return ""


@pytest.mark.parametrize(
    ("what", "step", "text"),
    [
        ("gradients", 4, "different sums of gradients in the step before"),
        ("lineage", 3, "came to step 4 by different ways"),
    ],
)
def test_diverged_rank_ends_the_run_on_all(
    tmp_path: Path, what: str, step: int, text: str
) -> None:
    for told in run_ranks(train_damaged, 3, tmp_path, what):
        assert told.startswith(f"{step} ")
        assert text in told
