from __future__ import annotations

import pytest

from geartrain.data.order import GlobalOrder
from geartrain.errors import ConfigError


def test_an_epoch_is_a_permutation() -> None:
    order = GlobalOrder(num_samples=1000, global_batch_size=10, seed=3)

    assert sorted(order.permutation(2).tolist()) == list(range(1000))


def test_order_depends_on_seed_and_epoch_only() -> None:
    order = GlobalOrder(num_samples=100, global_batch_size=10, seed=3)
    other_batch = GlobalOrder(num_samples=100, global_batch_size=7, seed=3)
    other_seed = GlobalOrder(num_samples=100, global_batch_size=10, seed=4)

    first = order.permutation(0).tolist()

    assert first == other_batch.permutation(0).tolist()
    assert first != order.permutation(1).tolist()
    assert first != other_seed.permutation(0).tolist()


def test_order_is_the_one_that_saved_positions_rely_on() -> None:
    order = GlobalOrder(num_samples=8, global_batch_size=4, seed=7)

    # Frozen: another order for the same seed needs another ORDER_VERSION.
    assert order.permutation(0).tolist() == [4, 1, 6, 3, 2, 7, 5, 0]


def test_without_shuffling_the_order_is_the_dataset_s() -> None:
    order = GlobalOrder(num_samples=5, global_batch_size=2, shuffle=False)

    assert order.permutation(9).tolist() == [0, 1, 2, 3, 4]


def test_last_partial_batch_is_kept_unless_dropped() -> None:
    kept = GlobalOrder(num_samples=10, global_batch_size=4)
    dropped = GlobalOrder(num_samples=10, global_batch_size=4, drop_last=True)

    assert [kept.batch_bounds(t) for t in range(kept.num_steps)] == [
        (0, 4),
        (4, 8),
        (8, 10),
    ]
    assert dropped.num_steps == 2


def test_dataset_smaller_than_the_batch_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match=r"7 samples.*global_batch_size=8.*lower"):
        GlobalOrder(num_samples=7, global_batch_size=8)


def test_batch_size_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"global_batch_size=0 must be >= 1"):
        GlobalOrder(num_samples=7, global_batch_size=0)
