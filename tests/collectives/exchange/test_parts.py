"""The exchange's small parts: folding, buffers, routes, bucket sizes, the stage threads."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collectives.exchange.memory_network import racks_of
from geartrain.collectives.exchange.bucket_size import choose_bucket_bytes
from geartrain.collectives.exchange.buffers import BufferPool
from geartrain.collectives.exchange.folding import fold_in_order
from geartrain.collectives.exchange.links import stage_members
from geartrain.collectives.exchange.pipeline import Job, Pipeline
from geartrain.collectives.exchange.routes import place_of, plan_routes
from geartrain.errors import ConfigError
from geartrain.planner.exchange.schedule import CommSchedule


@given(
    parts=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=6),
    data=st.data(),
)
def test_whoever_folds_gets_the_same_bits(parts: list[float], data: st.DataObject) -> None:
    expected = torch.tensor([parts[0]])
    for part in parts[1:]:
        expected += part
    index = data.draw(st.integers(0, len(parts) - 1))
    own = torch.tensor([parts[index]])
    others = [torch.tensor([part]) for i, part in enumerate(parts) if i != index]

    fold_in_order(own, others, index)

    assert torch.equal(own, expected)


def test_buffers_are_used_again_and_bounded() -> None:
    pool = BufferPool(kept_bytes=100)
    first = pool.take(10, torch.float32)
    pool.give(first)
    assert pool.take(10, torch.float32) is first
    assert pool.take(10, torch.float64) is not first

    pool.give(first)
    second = pool.take(20, torch.float32)
    pool.give(second)  # 40 + 80 bytes: the older one goes
    assert pool.free_bytes == 80
    assert pool.take(20, torch.float32) is second


def hierarchy() -> CommSchedule:
    return CommSchedule(
        algorithm="hierarchical",
        num_members=5,
        racks=racks_of([[1, 1, 1], [1, 1]], [[0.0, 0.5, 0.5], [0.5, 0.5]]),
        num_chunks=3,
    )


@given(num_elements=st.integers(0, 200), row=st.sampled_from([1, 4]))
def test_the_hosts_of_a_rack_hold_every_element_once(num_elements: int, row: int) -> None:
    schedule = hierarchy()
    held = [0] * num_elements
    for member in schedule.racks[0].leaders:
        place = place_of(schedule, member)
        for route in plan_routes(schedule, place, num_elements, row):
            start, stop = route.rack_cuts[place.host_index]
            assert sum(p.num_elements for p in route.slow_pieces) == stop - start
            for element in range(start, stop):
                held[element] += 1

    assert held == [1] * num_elements


def test_two_racks_swap_one_message_a_chunk_where_their_hosts_pair_up() -> None:
    schedule = CommSchedule(
        algorithm="hierarchical", num_members=4, racks=racks_of([[1, 1], [1, 1]])
    )

    (route,) = plan_routes(schedule, place_of(schedule, 2), 100, 1)

    assert [(p.start, p.stop) for p in route.slow_pieces] == [(0, 50)]


def test_hosts_that_hold_nothing_have_no_sockets_across() -> None:
    members = dict(stage_members(hierarchy()))

    assert members["across-out"] == (1, 2, 3, 4)


def test_an_unknown_member_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no member 9, only 0\.\.4"):
        place_of(hierarchy(), 9)


def straight(latency_s: float, bytes_per_s: float) -> Callable[[int], float]:
    return lambda num_bytes: latency_s + num_bytes / bytes_per_s


def test_a_bucket_takes_an_eighth_of_backward() -> None:
    size = choose_bucket_bytes(8.0, straight(1e-4, 10e6), 400_000_000)

    assert size == pytest.approx(10e6, rel=0.03)


def test_a_bucket_is_not_so_small_that_latency_rules() -> None:
    predict_s = straight(0.05, 10e6)
    size = choose_bucket_bytes(0.01, predict_s, 400_000_000)

    assert predict_s(size) == pytest.approx(8 * 0.05, rel=0.1)


@given(
    backward_s=st.floats(0, 100),
    latency_s=st.floats(0, 1),
    bytes_per_s=st.floats(1e3, 1e11),
    gradient_bytes=st.integers(1, 2**36),
)
def test_bucket_sizes_are_within_reason(
    backward_s: float, latency_s: float, bytes_per_s: float, gradient_bytes: int
) -> None:
    size = choose_bucket_bytes(backward_s, straight(latency_s, bytes_per_s), gradient_bytes)

    assert min(256 * 2**10, gradient_bytes) <= size <= gradient_bytes


def test_bucket_sizes_need_gradients() -> None:
    with pytest.raises(ConfigError, match="gradient_bytes=0 must be > 0"):
        choose_bucket_bytes(1.0, straight(0, 1), 0)


def test_stages_work_at_once_and_keep_the_order() -> None:
    pipeline = Pipeline(("first", "second"), max_in_flight=3)
    met = threading.Barrier(2, timeout=5)
    done: list[int] = []
    ended = threading.Event()

    def first(index: int) -> None:
        if index > 0:
            met.wait()  # the second stage of the job before

    def second(index: int) -> None:
        done.append(index)
        if index < 5:
            met.wait()
        else:
            ended.set()

    def job(index: int) -> Job:
        return Job(
            steps=[partial(first, index), partial(second, index)],
            fail=lambda stage, error: done.append(-1),
        )

    pipeline.start()
    for index in range(6):
        pipeline.put(job(index))
    assert ended.wait(5)
    pipeline.stop()

    assert pipeline.join(5)
    assert done == [0, 1, 2, 3, 4, 5]


def test_no_more_chunks_are_begun_than_may_be_in_flight() -> None:
    pipeline = Pipeline(("first", "second"), max_in_flight=2)
    go, begun, all_done = threading.Event(), [], threading.Event()
    two_begun = threading.Event()

    def begin(index: int) -> None:
        begun.append(index)
        if len(begun) == 2:
            two_begun.set()

    def end(index: int) -> None:
        assert go.wait(5)
        assert index >= len(begun) - 2
        if index == 4:
            all_done.set()

    pipeline.start()
    errors: list[Exception] = []
    for i in range(5):
        steps = [partial(begin, i), partial(end, i)]
        pipeline.put(Job(steps=steps, fail=lambda _, error: errors.append(error)))
    assert two_begun.wait(5)
    assert begun == [0, 1]
    go.set()
    assert all_done.wait(5)
    pipeline.stop()

    assert pipeline.join(5)
    assert errors == []


def test_after_a_pause_few_chunks_are_begun_and_each_that_ends_allows_one_more() -> None:
    pipeline = Pipeline(("first", "second"), max_in_flight=3, first_in_flight=1)
    counts: queue.SimpleQueue[int] = queue.SimpleQueue()
    turns = threading.Semaphore(0)
    begun, ended = [0], [0]

    def begin() -> None:
        begun[0] += 1
        counts.put(begun[0] - ended[0])

    def end() -> None:
        assert turns.acquire(timeout=5)
        ended[0] += 1

    def in_flight_at_most(num_begun: int) -> int:
        return max(counts.get(timeout=5) for _ in range(num_begun))

    pipeline.start()
    for _ in range(2):  # the second time after a pause
        begun[0] = ended[0] = 0
        for _ in range(8):
            pipeline.put(Job(steps=[begin, end], fail=lambda *_: None))
        assert in_flight_at_most(1) == 1
        turns.release()
        assert in_flight_at_most(2) == 2
        turns.release()
        assert in_flight_at_most(2) == 3
        for _ in range(6):
            turns.release()
        assert in_flight_at_most(3) <= 3
        deadline_at_s = time.monotonic() + 5
        while pipeline.num_in_flight and time.monotonic() < deadline_at_s:
            time.sleep(0.001)
    pipeline.stop()

    assert pipeline.join(5)


@pytest.mark.parametrize("is_alone", [True, False])
def test_short_jobs_stay_in_one_thread_where_nothing_is_in_flight(is_alone: bool) -> None:
    pipeline = Pipeline(("first", "second"), max_in_flight=4)
    go, ended = threading.Event(), threading.Event()
    threads: list[str] = []

    def note() -> None:
        threads.append(threading.current_thread().name)
        go.set()

    def last() -> None:
        note()
        ended.set()

    def begin_before() -> None:
        """Nothing to do."""

    def hold() -> None:
        assert go.wait(5)

    def fail(stage: str, error: Exception) -> None:
        threads.append(f"{stage}: {error}")

    pipeline.start()
    if not is_alone:
        pipeline.put(Job(steps=[begin_before, hold], fail=fail))
    pipeline.put(Job(steps=[note, last], fail=fail, is_short=True))
    assert ended.wait(5)
    pipeline.stop()

    assert pipeline.join(5)
    assert threads == (["first", "first"] if is_alone else ["first", "second"])
