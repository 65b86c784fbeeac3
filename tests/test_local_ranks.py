import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from geartrain.errors import ConfigError
from local_ranks import RankError, run_ranks


class Payload:
    def __init__(self, value: int) -> None:
        self.value = value


def sum_of_ranks(
    rank: int, world_size: int, payload: Payload
) -> tuple[int, float, Payload]:
    total = torch.tensor(float(rank + payload.value))
    dist.all_reduce(total)
    return torch.get_num_threads(), total.item(), payload


def fail_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        msg = "rank 1 fails; expected"
        raise ConfigError(msg)
    dist.barrier()


def die_on_rank_1(rank: int, world_size: int) -> int:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return rank


def hang_on_rank_0(rank: int, world_size: int) -> int:
    if rank == 0:
        threading.Event().wait()
    return os.getpid()


def test_ranks_share_a_group_and_return_in_order() -> None:
    results = run_ranks(sum_of_ranks, 3, Payload(10))

    assert [(threads, total) for threads, total, _ in results] == [(1, 33.0)] * 3
    assert isinstance(results[0][2], Payload)
    assert results[0][2].value == 10


def test_the_first_error_is_raised_with_its_traceback() -> None:
    with pytest.raises(ConfigError, match="rank 1 fails") as caught:
        run_ranks(fail_on_rank_1, 3)

    assert "on rank 1" in caught.value.__notes__[0]
    assert "fail_on_rank_1" in caught.value.__notes__[0]


def test_a_dead_rank_is_reported() -> None:
    with pytest.raises(RankError, match="rank 1 died with exit code -9"):
        run_ranks(die_on_rank_1, 2)


def test_a_rank_that_may_die_gives_none() -> None:
    assert run_ranks(die_on_rank_1, 2, may_die={1}) == [0, None]


def test_a_deadline_says_where_the_rank_hangs() -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[0\](.|\n)*hang_on_rank_0"):
        run_ranks(hang_on_rank_0, 2, timeout_s=5)


def test_local_functions_are_refused() -> None:
    def inner(rank: int, world_size: int) -> None:
        pass

    with pytest.raises(ValueError, match="top level"):
        run_ranks(inner, 1)
