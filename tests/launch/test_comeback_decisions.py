"""What the launcher decides where workers may leave and come back, from facts alone."""

from __future__ import annotations

import signal
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from geartrain.launch.situation import (
    CAUSE_GRACE_S,
    LEAVE_GRACE_S,
    Situation,
    WorkerState,
    excluded_workers,
    has_left,
    leader,
    loss_reason,
    lost_workers,
)
from geartrain.launch.supervision import LOSS_GRACE_S, decide
from geartrain.parallel.worker_spec import (
    LEFT_EXIT_CODE,
    STOPPED_EXIT_CODE,
    WorkerFailure,
    WorkerLoss,
)

NOW_S = 100.0


def worker(rank: int, exit_code: int | None = None) -> WorkerState:
    return WorkerState(
        rank=rank,
        device_id=f"cpu:{rank}",
        exit_code=exit_code,
        ended_at_s=None if exit_code is None else NOW_S,
    )


def killed(rank: int, *, returns: bool = False) -> WorkerState:
    return replace(worker(rank, -signal.SIGKILL), is_away=True, returns=returns)


def joining(rank: int, exit_code: int | None = None) -> WorkerState:
    return replace(worker(rank, exit_code), has_entered=False)


def told(state: WorkerState, *, is_failure: bool = True) -> WorkerState:
    loss = WorkerLoss(
        rank=state.rank,
        device_id=state.device_id,
        at_s=NOW_S,
        step=7,
        reason="it was silent" if is_failure else "asked to",
        is_failure=is_failure,
    )
    return replace(state, loss=loss)


def failed(state: WorkerState, *, secondary: bool) -> WorkerState:
    failure = WorkerFailure(
        rank=state.rank,
        device_id=state.device_id,
        at_s=NOW_S,
        error="CommunicationError: the others are gone",
        traceback="",
        secondary=secondary,
    )
    return replace(state, exit_code=1, ended_at_s=NOW_S, failure=failure)


def situation(
    *workers: WorkerState, now_s: float = NOW_S, min_devices: int = 1
) -> Situation:
    return Situation(
        workers=workers,
        now_s=now_s,
        goes_on=True,
        min_devices=min_devices,
        has_coordinator=True,
    )


def test_too_few_devices_are_waited_for_while_one_of_them_comes_back() -> None:
    back = killed(1, returns=True)

    assert decide(situation(worker(0), back, min_devices=2)).action == "watch"
    verdict = decide(situation(worker(0), killed(1), min_devices=2))
    assert verdict.outcome == "failed"
    assert verdict.reason == ("was killed by SIGKILL; 1 devices are left, at least 2 must")


def test_state_that_nobody_holds_is_restored_as_long_as_devices_come_back() -> None:
    lost = [killed(rank, returns=True) for rank in range(2)]

    assert decide(situation(*lost)).action == "restore"
    assert decide(situation(lost[0], joining(1))).action == "restore"
    assert decide(situation(*lost)).reason == (
        "was killed by SIGKILL; it held the state as the last one, and the run can't go on "
        "from a save"
    )
    assert decide(situation(lost[0], worker(1))).action == "watch"
    ended = decide(situation(*(killed(rank) for rank in range(2))))
    assert (ended.action, ended.outcome) == ("end", "failed")
    stopping = replace(situation(*lost), stop_requested_at_s=NOW_S)
    assert decide(stopping).action != "restore"


def test_run_that_is_finished_waits_for_nobody_who_was_to_come_back() -> None:
    for late in (killed(1, returns=True), joining(1)):
        verdict = decide(situation(worker(0, 0), late))

        assert (verdict.action, verdict.outcome) == ("end", "finished")


def test_run_that_was_stopped_waits_for_nobody_who_has_not_entered() -> None:
    stopped = replace(
        situation(worker(0, STOPPED_EXIT_CODE), joining(1, -signal.SIGUSR1)),
        stop_requested_at_s=NOW_S - 1,
    )

    assert (decide(stopped).outcome, decide(stopped).reason) == ("stopped", "stopped")


def test_worker_that_comes_back_is_waited_for_once_it_takes_part() -> None:
    entered = replace(joining(1), has_entered=True)

    assert decide(situation(worker(0, 0), entered)).action == "watch"


def test_joiner_that_is_killed_or_loses_its_giver_ends_no_run() -> None:
    for lost in (
        joining(1, -signal.SIGKILL),
        failed(joining(1), secondary=True),
    ):
        facts = replace(situation(worker(0), lost), goes_on=False)

        assert decide(facts).action == "watch"
        assert lost_workers(facts) == (lost,)


def test_script_error_of_a_joiner_ends_the_run_as_any_other_does() -> None:
    verdict = decide(situation(worker(0), failed(joining(1), secondary=False)))

    assert (verdict.action, verdict.outcome) == ("end", "failed")


def test_member_that_only_lost_the_others_is_lost_itself_after_the_grace() -> None:
    lonely = failed(worker(1), secondary=True)
    later_s = NOW_S + CAUSE_GRACE_S

    assert lost_workers(situation(worker(0), lonely)) == ()
    assert lost_workers(situation(worker(0), lonely, now_s=later_s)) == (lonely,)
    assert decide(situation(worker(0), lonely, now_s=later_s)).action == "watch"


def test_run_ends_where_all_have_lost_each_other() -> None:
    verdict = decide(situation(*(failed(worker(r), secondary=True) for r in range(2))))

    assert (verdict.action, verdict.outcome) == ("end", "failed")
    assert "the others are gone" in verdict.reason


def test_who_left_in_order_is_no_failure_and_not_waited_for() -> None:
    left = worker(1, LEFT_EXIT_CODE)
    facts = situation(worker(0), left)

    assert decide(facts).action == "watch"
    assert has_left(left)
    assert has_left(told(worker(1), is_failure=False))
    assert not has_left(told(worker(1)))
    assert decide(situation(worker(0, 0), left)).outcome == "finished"


def test_run_that_all_devices_have_left_is_stopped() -> None:
    verdict = decide(situation(*(worker(r, LEFT_EXIT_CODE) for r in range(2))))

    assert (verdict.outcome, verdict.reason) == ("stopped", "all devices have left")


def test_first_failure_is_the_cause_though_another_device_left_before() -> None:
    left, lost = worker(0, LEFT_EXIT_CODE), replace(killed(1), ended_at_s=NOW_S + 5)

    verdict = decide(situation(left, lost, worker(2), min_devices=2))

    assert verdict.cause == lost


def test_who_leaves_gets_time_to_end_and_who_is_excluded_does_not() -> None:
    leaves, hangs = told(worker(1), is_failure=False), told(worker(2))
    later_s = NOW_S + LEAVE_GRACE_S + 0.1

    assert excluded_workers(situation(worker(0), leaves, hangs)) == (hangs,)
    late = situation(worker(0), leaves, hangs, now_s=later_s)
    assert excluded_workers(late) == (leaves, hangs)


def test_coordinator_and_not_the_launcher_gives_up_on_those_that_are_left() -> None:
    later_s = NOW_S + LOSS_GRACE_S + 0.1

    assert decide(situation(worker(0), killed(1), now_s=later_s)).action == "watch"


def test_coordinator_that_can_not_be_kept_ends_the_run() -> None:
    facts = replace(situation(worker(0), worker(1)), broken="the coordinator died")

    verdict = decide(facts)

    assert (verdict.outcome, verdict.exit_code) == ("failed", 1)
    assert (verdict.reason, verdict.cause) == ("the coordinator died", None)


def test_lowest_member_leads_and_no_joiner_does() -> None:
    assert leader(situation(joining(0), worker(1), worker(2))).rank == 1
    assert leader(situation(worker(0), worker(1))).rank == 0
    assert leader(situation(worker(0), worker(1)), so_far=1).rank == 1
    assert leader(situation(worker(0), killed(1)), so_far=1).rank == 0
    assert leader(situation(killed(0, returns=True), joining(1))).rank == 0


def test_way_in_which_a_worker_was_lost_is_said() -> None:
    assert loss_reason(worker(1, -signal.SIGSEGV)) == "was killed by SIGSEGV"
    assert loss_reason(told(worker(1))) == "it was silent"
    assert loss_reason(worker(1, LEFT_EXIT_CODE)) == "it left in order"
    assert "are gone" in loss_reason(failed(worker(1), secondary=True))
    memory = replace(worker(1, -signal.SIGKILL), out_of_memory_kills=1)
    assert "out of memory" in loss_reason(memory)


codes = st.sampled_from([0, 1, STOPPED_EXIT_CODE, LEFT_EXIT_CODE, -9, -10])
facts_of_a_worker = st.tuples(
    codes, st.sampled_from([None, "primary", "secondary"]), st.booleans(), st.booleans()
)


@given(st.lists(facts_of_a_worker, min_size=1, max_size=5), st.booleans())
def test_run_ends_once_all_have_ended_and_nobody_comes_back(
    facts: list[tuple[int, str | None, bool, bool]], stopping: bool
) -> None:
    workers = []
    for rank, (code, kind, has_entered, is_away) in enumerate(facts):
        state = worker(rank, code)
        if kind is not None:
            state = failed(state, secondary=kind == "secondary")
        workers.append(replace(state, has_entered=has_entered, is_away=is_away))
    ended = replace(situation(*workers), stop_requested_at_s=NOW_S if stopping else None)

    verdict = decide(ended)

    assert verdict.action == "end"
    assert (verdict.outcome == "finished") == (verdict.exit_code == 0)
