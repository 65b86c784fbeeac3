"""No exchange hangs: whoever waits is told, soon, and for whom it waited."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from collectives.exchange.memory_network import World, one_size, racks_of
from geartrain.collectives.exchange.scheduled_collective import (
    ExchangeSettings,
    ScheduledCollective,
)
from geartrain.errors import CommunicationError, ConfigError
from geartrain.planner.exchange.schedule import CommSchedule, ScheduleBook

_NEXT_STEP = ". The step was not applied; look at the logs of the workers named"


def book(num_chunks: int = 4) -> ScheduleBook:
    return one_size(
        CommSchedule(
            algorithm="hierarchical",
            num_members=4,
            racks=racks_of([[1, 1], [1, 1]]),
            num_chunks=num_chunks,
        )
    )


def never(*_: object) -> bool:
    return True


def test_aborting_in_the_middle_wakes_all_who_wait() -> None:
    with World(book()) as world:
        world.network.held_back = lambda stage, *_: stage.startswith("across-out")
        member = world.members[0]
        pending = [member.all_reduce(torch.ones(64)) for _ in range(5)]
        for other in world.members[1:]:
            other.all_reduce(torch.ones(64))
        world.network.await_posted("across-out")
        errors: list[str] = []

        def wait(index: int) -> None:
            with pytest.raises(CommunicationError) as caught:
                pending[index].wait()
            errors.append(str(caught.value))

        waiters = [threading.Thread(target=wait, args=(i,)) for i in range(5)]
        for waiter in waiters:
            waiter.start()
        member.abort("w2 is gone")
        for waiter in waiters:
            waiter.join(5)

        assert errors == [f"gradient exchange stopped: w2 is gone{_NEXT_STEP}"] * 5
        assert world.groups[0].aborted
        with pytest.raises(CommunicationError, match="w2 is gone"):
            member.all_reduce(torch.ones(1))


def await_waiting(world: World) -> None:
    """Until a stage of every member waits for a peer, and so can name it."""
    deadline_at_s = time.monotonic() + 10
    while not all(member._waiting() for member in world.members):
        assert time.monotonic() < deadline_at_s, "no stage began to wait"
        threading.Event().wait(0.001)


def test_a_lost_peer_is_told_once_by_every_member() -> None:
    told: list[str] = []

    def settings(me: int) -> ExchangeSettings:
        return ExchangeSettings(on_error=lambda error: told.append(f"{me}: {error}"))

    with World(book(), settings=settings) as world:
        world.network.held_back = lambda stage, *_: stage.startswith("across-out")
        pending = [[m.all_reduce(torch.ones(64)) for _ in range(3)] for m in world.members]
        await_waiting(world)
        world.network.abort("connection closed by peer")

        for exchanges in pending:
            for exchange in exchanges:
                with pytest.raises(CommunicationError, match="connection closed by peer"):
                    exchange.wait()

    assert sorted(text[0] for text in told) == ["0", "1", "2", "3"]
    for text in told:  # of whichever stage came upon it first
        assert "(256 bytes, hierarchical), chunk" in text
        assert "connection closed by peer" in text
        assert "The step was not applied" in text


def test_a_wait_gives_up_when_nothing_moves() -> None:
    with World(book(), settings=lambda _: ExchangeSettings(timeout_s=0.2)) as world:
        world.network.held_back = lambda stage, *_: stage.startswith("across-out")
        pending = [member.all_reduce(torch.ones(64)) for member in world.members]
        with pytest.raises(CommunicationError, match=r"nothing moved for 0\.2 s") as caught:
            pending[0].wait()

    assert "partial sums across racks waits for w" in str(caught.value)


def test_a_failure_that_is_not_the_networks_is_told_too() -> None:
    with World(book()) as world:
        exchange_type = type(world.groups[0].open(torch.ones(1), [(0, 1)]))

        class Broken(exchange_type):  # type: ignore[misc, valid-type]  # found at run time
            def reduce(self, chunk_index: int) -> None:
                msg = "out of memory"
                raise MemoryError(msg)

        group = world.groups[0]
        group.open = lambda tensor, chunks, weight=1.0: Broken(  # type: ignore[method-assign]
            group, tensor, tuple(chunks), weight, 1
        )
        with pytest.raises(CommunicationError, match=r"host sum: MemoryError.*out of mem"):
            world.members[0].all_reduce(torch.ones(8)).wait()


def test_a_tensor_that_the_host_group_refuses_disturbs_nothing() -> None:
    def run(me: int, member: ScheduledCollective) -> torch.Tensor:
        with pytest.raises(ConfigError, match="cannot sum"):
            member.all_reduce(torch.ones(3, dtype=torch.int32))
        tensor = torch.ones(3)
        member.all_reduce(tensor).wait()
        return tensor

    with World(book()) as world:
        for result in world.each(run):
            assert result.tolist() == [4.0] * 3


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(1).expand(5), torch.ones(3, 1).expand(3, 2), torch.eye(3).to_sparse()],
    ids=["repeated", "repeated columns", "sparse"],
)
def test_a_tensor_that_no_sum_can_be_stored_in_is_refused_at_once(
    tensor: torch.Tensor,
) -> None:
    with World(book()) as world, pytest.raises(ConfigError, match="pass a dense one"):
        world.members[0].all_reduce(tensor)


def test_a_sum_that_cannot_be_stored_fails_whoever_waits_for_it() -> None:
    with World(book()) as world:
        scattered = torch.ones(4, 2)[:, 0]
        pending = world.members[0].all_reduce(scattered)
        scattered.resize_(9)
        for other in world.members[1:]:
            other.all_reduce(torch.ones(4))

        with pytest.raises(CommunicationError, match="the sum was not stored"):
            pending.wait()


def test_callbacks_hear_of_the_end_once_before_or_after_it() -> None:
    with World(book()) as world:
        heard: list[CommunicationError | None] = []
        pending = [member.all_reduce(torch.ones(8)) for member in world.members]
        pending[0].when_done(heard.append)
        for exchange in pending:
            exchange.wait()
        pending[0].when_done(heard.append)
        world.network.held_back = never
        late = world.members[0].all_reduce(torch.ones(8))
        late.when_done(heard.append)
        world.members[0].abort("over")
        world.members[0].abort("again")

    assert heard[:2] == [None, None]
    assert [str(error) for error in heard[2:]] == [
        f"gradient exchange stopped: over{_NEXT_STEP}"
    ]


def test_messages_that_come_late_land_in_buffers_that_nobody_uses_again() -> None:
    with World(book(num_chunks=1)) as world:
        world.network.held_back = lambda stage, *_: stage.startswith("across-out")
        for member in world.members:
            member.all_reduce(torch.ones(64))
        world.network.await_posted("across-out")
        pool = world.members[0]._machinery.pool
        world.members[0].abort("over")
        before = pool.free_bytes
        world.network.let_go()
        world.network.abort("sockets were cut")

        assert world.members[0].close()
        assert before <= 64 * 4  # only what was done with before; nothing in flight


def test_stage_threads_leave_torch_threads_of_others_alone() -> None:
    before = torch.get_num_threads()
    inside: list[int] = []
    with World(book()) as world:
        pending = [member.all_reduce(torch.ones(8)) for member in world.members]
        pending[0].when_done(lambda _: inside.append(torch.get_num_threads()))
        for exchange in pending:
            exchange.wait()

    assert torch.get_num_threads() == before
    assert inside in ([1], [before])  # from a stage thread, or at once
