"""What the launcher decides, from facts alone."""

import signal

from hypothesis import given
from hypothesis import strategies as st

from geartrain.launch.situation import (
    CAUSE_GRACE_S,
    Situation,
    WorkerState,
    excluded_workers,
    leader,
)
from geartrain.launch.supervision import EXIT_GRACE_S, LOSS_GRACE_S, decide
from geartrain.parallel.worker_spec import STOPPED_EXIT_CODE, WorkerFailure, WorkerLoss

NOW_S = 100.0


def worker(
    rank: int,
    exit_code: int | None = None,
    *,
    ended_at_s: float = NOW_S,
    failure: WorkerFailure | None = None,
    out_of_memory_kills: int = 0,
    loss: WorkerLoss | None = None,
) -> WorkerState:
    return WorkerState(
        rank=rank,
        device_id=f"cpu:{rank}",
        exit_code=exit_code,
        ended_at_s=None if exit_code is None else ended_at_s,
        failure=failure,
        out_of_memory_kills=out_of_memory_kills,
        loss=loss,
    )


def failure(
    rank: int, *, at_s: float = NOW_S, secondary: bool = False, error: str = "ValueError: x"
) -> WorkerFailure:
    return WorkerFailure(
        rank=rank,
        device_id=f"cpu:{rank}",
        at_s=at_s,
        error=error,
        traceback="Traceback\n",
        secondary=secondary,
    )


def situation(
    *workers: WorkerState, now_s: float = NOW_S, stopping_since_s: float | None = None
) -> Situation:
    return Situation(workers=workers, now_s=now_s, stop_requested_at_s=stopping_since_s)


def test_running_workers_are_watched() -> None:
    assert decide(situation(worker(0), worker(1))).action == "watch"


def test_worker_that_finished_early_does_not_end_the_run() -> None:
    assert decide(situation(worker(0, 0), worker(1))).action == "watch"


def test_run_is_finished_when_all_have_ended_with_zero() -> None:
    verdict = decide(situation(worker(0, 0), worker(1, 0)))

    assert (verdict.action, verdict.outcome, verdict.exit_code) == ("end", "finished", 0)


def test_failure_ends_the_run_while_the_others_and_itself_still_run() -> None:
    verdict = decide(situation(worker(0), worker(1, failure=failure(1))))

    assert (verdict.action, verdict.outcome, verdict.exit_code) == ("end", "failed", 1)
    assert verdict.cause is not None
    assert verdict.cause.rank == 1


def test_config_error_ends_with_its_own_exit_code() -> None:
    told = failure(0, error="ConfigError: batch too small")

    assert decide(situation(worker(0, 1, failure=told))).exit_code == 2


def test_earliest_primary_failure_is_the_cause_though_a_lost_peer_came_before() -> None:
    verdict = decide(
        situation(
            worker(0, 1, failure=failure(0, at_s=1.0, secondary=True)),
            worker(1, 1, failure=failure(1, at_s=3.0)),
            worker(2, 1, failure=failure(2, at_s=2.0)),
        )
    )

    assert verdict.cause is not None
    assert verdict.cause.rank == 2
    assert {w.rank for w in verdict.others} == {0, 1}


def test_lost_peers_wait_for_the_cause_to_show() -> None:
    lost = worker(0, 1, failure=failure(0, secondary=True))

    verdict = decide(situation(lost, worker(1), now_s=NOW_S + CAUSE_GRACE_S / 2))

    assert verdict.action == "watch"


def test_peer_that_gives_no_reason_is_named_after_the_grace() -> None:
    lost = worker(0, 1, failure=failure(0, secondary=True))

    verdict = decide(situation(lost, worker(1), now_s=NOW_S + CAUSE_GRACE_S + 0.1))

    assert verdict.action == "end"
    assert "rank 1 (cpu:1) did not answer" in verdict.reason


def test_peer_that_ended_too_early_is_named() -> None:
    lost = worker(0, 1, failure=failure(0, secondary=True))

    verdict = decide(situation(lost, worker(1, 0)))

    assert "rank 1 (cpu:1) had already ended with exit code 0" in verdict.reason


def test_worker_killed_by_a_signal_is_the_cause_before_those_that_lost_it() -> None:
    verdict = decide(
        situation(
            worker(0, 1, failure=failure(0, at_s=1.0, secondary=True)),
            worker(1, -signal.SIGKILL, ended_at_s=2.0),
        )
    )

    assert verdict.reason == "was killed by SIGKILL"
    assert verdict.exit_code == 1


def test_kill_for_memory_is_reported_as_out_of_memory() -> None:
    verdict = decide(situation(worker(0, -signal.SIGKILL, out_of_memory_kills=1)))

    assert "out of memory of that device" in verdict.reason


def test_exit_code_of_the_script_itself_is_kept() -> None:
    assert decide(situation(worker(0, 7), worker(1, 7))).exit_code == 7


def test_others_get_time_to_end_after_one_has_left_by_itself() -> None:
    left, running = worker(0, 7), worker(1)

    early = decide(situation(left, running, now_s=NOW_S + EXIT_GRACE_S / 2))
    late = decide(situation(left, running, now_s=NOW_S + EXIT_GRACE_S + 0.1))

    assert (early.action, late.action) == ("watch", "end")


def test_stopped_workers_end_the_run_as_interrupted() -> None:
    stopped = [worker(rank, STOPPED_EXIT_CODE) for rank in range(2)]

    verdict = decide(situation(*stopped, stopping_since_s=NOW_S))

    assert (verdict.outcome, verdict.exit_code) == ("stopped", 130)


def test_worker_that_does_not_stop_in_time_is_named() -> None:
    stopped, hanging = worker(0, STOPPED_EXIT_CODE), worker(1)

    verdict = decide(situation(stopped, hanging, stopping_since_s=NOW_S - 61))

    assert verdict.outcome == "stopped"
    assert "rank 1 (cpu:1), which did not stop within 60 s" in verdict.reason


def test_stop_before_a_session_is_no_failure_even_where_others_lose_that_peer() -> None:
    verdict = decide(
        situation(
            worker(0, 1, failure=failure(0, secondary=True)),
            worker(1, -signal.SIGUSR1),
            stopping_since_s=NOW_S,
        )
    )

    assert verdict.outcome == "stopped"
    assert "before rank 1 (cpu:1) had a session" in verdict.reason


def test_second_request_kills_at_once() -> None:
    workers = (worker(0), worker(1))

    verdict = decide(Situation(workers=workers, now_s=NOW_S, kill_requested=True))

    assert (verdict.action, verdict.outcome) == ("end", "stopped")


exit_codes = st.sampled_from([None, 0, 1, 3, STOPPED_EXIT_CODE, -9, -10, -11])
failures = st.sampled_from([None, "primary", "secondary"])


@given(st.lists(st.tuples(exit_codes, failures), min_size=1, max_size=6), st.booleans())
def test_run_always_ends_once_all_workers_have(
    facts: list[tuple[int | None, str | None]], stopping: bool
) -> None:
    workers = [
        worker(
            rank,
            0 if code is None else code,
            failure=failure(rank, secondary=kind == "secondary") if kind else None,
        )
        for rank, (code, kind) in enumerate(facts)
    ]

    verdict = decide(situation(*workers, stopping_since_s=NOW_S if stopping else None))

    assert verdict.action == "end"
    assert (verdict.outcome == "finished") == (verdict.exit_code == 0)


def loss(rank: int, *, at_s: float = NOW_S) -> WorkerLoss:
    return WorkerLoss(
        rank=rank, device_id=f"cpu:{rank}", at_s=at_s, step=7, reason="cpu:1 was silent"
    )


def while_going_on(
    *workers: WorkerState, now_s: float = NOW_S, min_devices: int = 1
) -> Situation:
    return Situation(workers=workers, now_s=now_s, goes_on=True, min_devices=min_devices)


def test_killed_worker_does_not_end_a_run_that_goes_on() -> None:
    killed = worker(1, -signal.SIGKILL)

    assert decide(while_going_on(worker(0), killed, worker(2))).action == "watch"
    assert decide(situation(worker(0), killed, worker(2))).action == "end"


def test_loss_of_rank_0_does_not_end_a_run_that_goes_on() -> None:
    killed = worker(0, -signal.SIGKILL, loss=loss(0))

    assert decide(while_going_on(killed, worker(1))).action == "watch"
    assert decide(while_going_on(killed, worker(1, 0))).outcome == "finished"


def test_loss_of_all_workers_ends_the_run() -> None:
    verdict = decide(while_going_on(*(worker(r, -signal.SIGKILL) for r in range(2))))

    assert (verdict.action, verdict.outcome) == ("end", "failed")


def test_lowest_worker_that_is_left_leads() -> None:
    workers = [worker(0, -signal.SIGKILL, loss=loss(0)), worker(1), worker(2)]

    assert leader(while_going_on(*workers)).rank == 1
    assert leader(situation(worker(0), worker(1))).rank == 0


def test_run_is_finished_when_all_but_the_lost_have_ended_with_zero() -> None:
    workers = (worker(0, 0), worker(1, -signal.SIGKILL, loss=loss(1)), worker(2, 0))

    verdict = decide(while_going_on(*workers))

    assert (verdict.action, verdict.outcome, verdict.exit_code) == ("end", "finished", 0)


def test_script_error_ends_a_run_that_goes_on() -> None:
    verdict = decide(while_going_on(worker(0), worker(1, 1, failure=failure(1))))

    assert (verdict.action, verdict.outcome) == ("end", "failed")


def test_frozen_worker_that_was_excluded_is_to_be_killed_and_not_waited_for() -> None:
    frozen = worker(1, loss=loss(1))
    situation = while_going_on(worker(0, 0), frozen, worker(2, 0))

    assert excluded_workers(situation) == (frozen,)
    assert decide(situation).outcome == "finished"


def test_failure_of_a_worker_that_was_excluded_does_not_count() -> None:
    woken = worker(1, 1, failure=failure(1, secondary=True), loss=loss(1))

    assert decide(while_going_on(worker(0), woken)).action == "watch"


def test_killed_worker_ends_the_run_where_nobody_says_to_go_on() -> None:
    killed = worker(1, -signal.SIGKILL, ended_at_s=NOW_S)
    later_s = NOW_S + LOSS_GRACE_S

    assert decide(while_going_on(worker(0), killed, now_s=later_s - 0.1)).action == "watch"
    verdict = decide(while_going_on(worker(0), killed, now_s=later_s + 0.1))
    assert verdict.action == "end"
    assert verdict.reason == (
        "was killed by SIGKILL, and the others did not go on without it"
    )


def test_survivors_that_cant_go_on_are_not_the_cause() -> None:
    said = failure(0, secondary=True, error="CommunicationError: load the last save")
    workers = (worker(0, 1, failure=said), worker(1, -signal.SIGKILL))

    verdict = decide(while_going_on(*workers))

    assert verdict.cause is not None
    assert verdict.cause.rank == 1
    assert verdict.reason == "was killed by SIGKILL; load the last save"


def test_too_few_devices_end_the_run() -> None:
    workers = (worker(0), worker(1, loss=loss(1)), worker(2))

    verdict = decide(while_going_on(*workers, min_devices=3))

    assert (verdict.action, verdict.outcome) == ("end", "failed")
    assert verdict.reason.endswith("2 devices are left, at least 3 must")


def test_stop_is_not_held_up_by_a_lost_worker() -> None:
    workers = (worker(0, STOPPED_EXIT_CODE), worker(1, loss=loss(1)))
    stopping = Situation(
        workers=workers, now_s=NOW_S, goes_on=True, stop_requested_at_s=NOW_S - 1
    )

    assert decide(stopping).outcome == "stopped"
