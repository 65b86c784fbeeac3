from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from geartrain.data.batch_split import batch_size_of
from geartrain.data.loader import EpochOver, LoaderConfig, ShareLoader
from geartrain.data.sample_rng import sample_generator
from geartrain.data.sampler import ShareView
from geartrain.errors import ConfigError

CPU = torch.device("cpu")


class Noisy:
    """Sample i is (i, a random number of its own)."""

    def __init__(self, num_samples: int = 22) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, torch.rand((), generator=sample_generator())


class Shares:
    """Shares that a test changes between steps."""

    def __init__(self, *shares: int, tail: int = 0) -> None:
        self.shares, self.tail = shares, tail

    def view(self, rank: int = 0) -> ShareView:
        return ShareView(shares=self.shares, tail_samples=self.tail, rank=rank)


def make_loader(
    dataset: Any = None,  # Any: whatever a test takes for a dataset
    shares: Shares | None = None,
    rank: int = 0,
    **config: Any,  # Any: fields of LoaderConfig
) -> ShareLoader:
    shares = shares or Shares(8)
    return ShareLoader(
        Noisy() if dataset is None else dataset,
        config=LoaderConfig(**{"global_batch_size": 8, "seed": 5, **config}),
        assignment=lambda: shares.view(rank),
        device=CPU,
    )


def ids(batch: Any) -> list[int]:  # Any: a collated batch
    return [int(i) for i in batch[0]]


def threads() -> list[str]:
    return [
        t.name for t in threading.enumerate() if t.name.startswith("geartrain-prefetch")
    ]


def test_one_loop_is_one_epoch_and_the_next_loop_the_next() -> None:
    loader = make_loader()

    first = [i for batch in loader for i in ids(batch)]
    second = [i for batch in loader for i in ids(batch)]

    assert sorted(first) == sorted(second) == list(range(22))
    assert first != second
    assert loader.epoch == 2
    assert len(loader) == 3


def test_ranks_share_each_batch_even_when_shares_change() -> None:
    shares = Shares(5, 0, 1, tail=2)
    loaders = [make_loader(shares=shares, rank=rank) for rank in range(3)]
    seen: Counter[int] = Counter()

    for step, batches in enumerate(zip(*loaders, strict=True)):
        for batch in batches:
            seen.update(ids(batch))
        current = loaders[1].current
        seen.update(ids(loaders[1].fetch(current.tail_start, current.tail_stop)))
        shares.shares, shares.tail = [((2, 3, 3), 0), ((0, 7, 0), 1)][step % 2]

    assert seen == Counter(range(22))


def test_random_transforms_depend_on_neither_shares_nor_prefetching() -> None:
    alone = {
        i: v for b in make_loader() for i, v in zip(ids(b), b[1].tolist(), strict=True)
    }
    shares = Shares(3, 4, tail=1)
    shared: dict[int, float] = {}
    for rank in range(2):
        loader = make_loader(shares=shares, rank=rank, prefetch=rank == 0)
        for batch in loader:
            parts = [
                batch,
                loader.fetch(loader.current.tail_start, loader.current.tail_stop),
            ]
            for part in parts:
                shared.update(zip(ids(part), part[1].tolist(), strict=True))

    assert shared == alone
    assert len(set(alone.values())) == 22


def test_random_transforms_differ_between_epochs() -> None:
    loader = make_loader(shuffle=False)

    first, second = [torch.cat([b[1] for b in loader]) for _ in range(2)]

    assert not torch.equal(first, second)


def test_an_empty_share_yields_no_rows_of_the_same_structure() -> None:
    loader = make_loader(shares=Shares(0, 8))

    batches = list(loader)

    assert len(batches) == 3
    assert [batch_size_of(batch) for batch in batches] == [0, 0, 0]
    assert batches[0][1].dtype == torch.float32


def test_the_last_batch_is_scaled_to_the_shares() -> None:
    loader = make_loader(shares=Shares(6, 2))

    sizes = [len(batch[0]) for batch in loader]

    assert sizes == [6, 6, 5]  # 6 samples are left: 4.5 and 1.5, the first rank rounds up


def test_current_tells_where_the_rows_come_from() -> None:
    loader = make_loader(shares=Shares(3, 4, tail=1), rank=1)

    batch = next(iter(loader))

    current = loader.current
    assert (current.start, current.stop, current.tail_start, current.tail_stop) == (
        3,
        7,
        7,
        8,
    )
    assert list(current.sample_indices[3:7]) == ids(batch)
    assert current.global_count == 8


def test_a_resumed_epoch_continues_with_the_next_batch() -> None:
    whole = [ids(batch) for batch in make_loader()]
    first = make_loader()
    iterator = iter(first)
    next(iterator)
    second = make_loader()

    second.load_state_dict(first.state_dict())

    assert [ids(batch) for batch in second] == whole[1:]


def test_a_position_taken_at_the_end_resumes_with_the_next_epoch() -> None:
    first = make_loader()
    states = [first.state_dict() for _ in first]
    second = make_loader()

    second.load_state_dict(states[-1])

    assert second.epoch == 1
    assert [ids(b) for b in second] == [ids(b) for b in first]


def test_a_loop_after_a_break_is_the_next_epoch() -> None:
    loader = make_loader()
    next(iter(loader))

    batches = list(loader)

    assert len(batches) == 3
    assert loader.current.epoch == 1


def test_a_position_of_another_order_is_refused() -> None:
    state = make_loader().state_dict()

    with pytest.raises(ConfigError, match=r"seed=5 but this loader has seed=6"):
        make_loader(seed=6).load_state_dict(state)


def test_an_overtaken_loop_says_so() -> None:
    loader = make_loader()
    outer = iter(loader)
    next(outer)
    next(iter(loader))

    with pytest.raises(ConfigError, match="overtaken"):
        next(outer)


def test_evaluating_leaves_the_position_alone() -> None:
    loader = make_loader(drop_last=True, shares=Shares(5, tail=3))
    iterator = iter(loader)
    next(iterator)
    before = (loader.state_dict(), loader.current)

    seen = [i for batch in loader.evaluation_pass() for i in ids(batch)]

    assert sorted(seen) == list(range(22))
    assert (loader.state_dict(), loader.current) == before
    assert len(list(iterator)) == 1


def test_a_profile_batch_repeats_samples_and_moves_nothing() -> None:
    loader = make_loader()
    before = loader.state_dict()

    batch = loader.fetch_profile_batch(50)

    assert batch_size_of(batch) == 50
    assert ids(batch)[:22] == ids(batch)[22:44]
    assert loader.state_dict() == before


class Failing(Noisy):
    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        if index == 9:
            msg = "sample 9 is torn"
            raise OSError(msg)
        return super().__getitem__(index)


@pytest.mark.parametrize("prefetch", [True, False])
def test_what_the_dataset_raises_reaches_the_loop(prefetch: bool) -> None:
    loader = make_loader(Failing(), shuffle=False, prefetch=prefetch)
    iterator = iter(loader)
    next(iterator)

    with pytest.raises(OSError, match="sample 9 is torn") as caught:
        next(iterator)

    assert "fetched sample 9 of epoch 0" in caught.value.__notes__[0]
    assert any(entry.name == "__getitem__" for entry in caught.traceback)
    assert loader.state_dict()["step_in_epoch"] == 1
    assert threads() == []


def test_no_thread_is_left_after_a_break_or_an_epoch() -> None:
    loader = make_loader()
    for _ in loader:
        assert len(threads()) == 1
        break
    assert threads() == []

    list(loader)

    assert threads() == []


class Gated(Noisy):
    """Lets the thread that reads ahead begin, then holds it until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.reading_ahead = threading.Event()
        self.release = threading.Event()
        self.reads: list[int] = []

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        if threading.current_thread() is not threading.main_thread():
            self.reading_ahead.set()
            assert self.release.wait(30)
        self.reads.append(index)
        return super().__getitem__(index)


def test_the_next_step_is_read_while_this_one_runs() -> None:
    dataset = Gated()
    iterator = iter(make_loader(dataset, shuffle=False))

    next(iterator)

    assert dataset.reading_ahead.wait(30)
    dataset.release.set()
    assert ids(next(iterator)) == list(range(8, 16))


def test_changed_shares_discard_what_was_read_ahead() -> None:
    dataset, shares = Gated(), Shares(4, 4)
    iterator = iter(make_loader(dataset, shares, shuffle=False))
    next(iterator)
    assert dataset.reading_ahead.wait(30)

    shares.shares = (6, 2)
    dataset.release.set()

    assert ids(next(iterator)) == [8, 9, 10, 11, 12, 13]


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


def test_an_iterable_dataset_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Stream lacks .*map-style"):
        make_loader(Stream())


def test_a_list_is_a_dataset() -> None:
    loader = make_loader([torch.ones(2)] * 16)

    assert [tuple(b.shape) for b in loader] == [(8, 2), (8, 2)]


def test_positions_outside_the_batch_are_refused() -> None:
    loader = make_loader()
    next(iter(loader))

    with pytest.raises(ConfigError, match=r"positions 4\.\.9"):
        loader.fetch(4, 9)


def test_outside_a_fetch_torch_s_own_generator_is_used() -> None:
    assert sample_generator() is torch.default_generator


def test_the_interpreter_ends_in_the_middle_of_a_loop() -> None:
    script = """
import torch
from geartrain.data.loader import EpochOver, LoaderConfig, ShareLoader
from geartrain.data.sampler import ShareView
loader = ShareLoader(
    list(range(100)),
    config=LoaderConfig(global_batch_size=4),
    assignment=lambda: ShareView(shares=(4,), rank=0),
    device=torch.device("cpu"),
)
iterator = iter(loader)  # a global: nothing closes it before the interpreter ends
print(len(next(iterator)))
"""
    ended = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "4\n", "")


def test_position_moves_while_a_loop_waits_for_its_shares() -> None:
    ahead = make_loader(shuffle=False)
    batches = iter(ahead)
    next(batches)
    state = ahead.state_dict()
    loaders: list[ShareLoader] = []

    def assignment() -> ShareView:
        if loaders[0].position == (0, 0):
            loaders[0].move_to(state)
        return Shares(8).view()

    loader = ShareLoader(
        Noisy(),
        config=ahead.config,
        assignment=assignment,
        device=CPU,
    )
    loaders.append(loader)

    indices = [batch[0].tolist() for batch in loader]

    assert indices == [batch[0].tolist() for batch in batches]
    assert loader.epoch == 1


def test_loop_ends_where_the_position_is_in_another_epoch() -> None:
    loaders: list[ShareLoader] = []

    def assignment() -> ShareView:
        if loaders[0].position == (0, 1):
            loaders[0].move_to({**loaders[0].state_dict(), "epoch": 3, "step_in_epoch": 1})
            raise EpochOver
        return Shares(8).view()

    loader = ShareLoader(
        Noisy(),
        config=LoaderConfig(global_batch_size=8, seed=5),
        assignment=assignment,
        device=CPU,
    )
    loaders.append(loader)

    assert len(list(loader)) == 1
    assert loader.position == (3, 1)
    assert len(list(loader)) == len(loader) - 1
    assert loader.position == (4, 0)


def test_position_before_the_current_batch_is_known() -> None:
    loader = make_loader()
    before = loader.state_dict()
    next(iter(loader))

    assert loader.state_before() == before
    assert loader.state_dict() != before
