"""Copying versions between tiers, pruning them, and telling how they differ."""

from __future__ import annotations

import math
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from geartrain.checkpoint.chunk_store import FileStore
from geartrain.checkpoint.chunks import OBJECTS, ObjectStore
from geartrain.checkpoint.copy_version import copy_version
from geartrain.checkpoint.difference import (
    StateDifference,
    StoredVersion,
    compare_versions,
)
from geartrain.checkpoint.drift import Drift, find_drift
from geartrain.checkpoint.durable_tier import DurableStore
from geartrain.checkpoint.prune import prune_store
from geartrain.checkpoint.retention import RetentionPolicy
from geartrain.checkpoint.verify import verify_store
from geartrain.checkpoint.versions import list_versions, read_version
from geartrain.errors import CheckpointError
from saved_versions import save_version, trained_components


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    if request.param == "file":
        return FileStore(tmp_path / "store")
    return DurableStore(f"memory://{uuid.uuid4().hex}")


def big_state(seed: int) -> dict[str, object]:
    """Two chunks of which one never changes, and some small tensors."""
    torch.manual_seed(seed)
    frozen = torch.arange(2**20, dtype=torch.float32)
    return {"frozen": {"w": frozen}, "model": {"w": torch.randn(2**18)}}


def test_the_next_tier_is_filled_from_the_one_before_and_what_it_has_is_not_read(
    tmp_path: Path,
) -> None:
    local, durable = FileStore(tmp_path / "local"), DurableStore(f"memory://{uuid.uuid4()}")
    first = save_version(local, big_state(1), step=1)
    second = save_version(local, big_state(2), step=2)

    reports = [copy_version(name, (local,), durable) for name in (first, second)]

    assert [report.num_copied for report in reports] == [2, 1]
    assert reports[1].copied_bytes == 4 * 2**18
    assert durable.read_pointer() == second
    assert verify_store(durable).is_sound
    assert list_versions(durable) == list_versions(local)


def test_a_damaged_chunk_is_never_passed_on(tmp_path: Path) -> None:
    local, durable = FileStore(tmp_path / "local"), DurableStore(f"memory://{uuid.uuid4()}")
    name = save_version(local, big_state(1))
    found = next(iter(local.list_objects(OBJECTS)))
    path = tmp_path / "local" / found.name
    path.write_bytes(path.read_bytes()[:-1] + b"!")

    with pytest.raises(CheckpointError, match="is damaged"):
        copy_version(name, (local,), durable)

    assert durable.read_pointer() is None


def test_a_copy_that_is_ended_leaves_no_version_and_goes_on_later(tmp_path: Path) -> None:
    local, durable = FileStore(tmp_path / "local"), DurableStore(f"memory://{uuid.uuid4()}")
    name = save_version(local, big_state(1))
    asked: list[int] = []

    def check() -> None:
        asked.append(1)
        if len(asked) == 2:
            msg = "its deadline is over"
            raise CheckpointError(msg)

    with pytest.raises(CheckpointError, match="deadline"):
        copy_version(name, (local,), durable, check=check)
    assert list_versions(durable) == ()

    copy_version(name, (local,), durable)
    assert verify_store(durable).is_sound


def test_chunks_that_a_collector_takes_in_between_are_put_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local, durable = FileStore(tmp_path / "local"), DurableStore(f"memory://{uuid.uuid4()}")
    name = save_version(local, big_state(1))
    copy_version(name, (local,), durable)
    listed = durable.list_objects
    calls: list[str] = []

    def list_and_lose(prefix: str) -> Any:
        found = list(listed(prefix))
        calls.append(prefix)
        if len(calls) == 1:
            for one in found:
                durable.delete(one.name)
        return iter(found)

    monkeypatch.setattr(durable, "list_objects", list_and_lose)

    report = copy_version(name, (local,), durable)

    monkeypatch.undo()
    assert report.num_copied == 2
    assert verify_store(durable).is_sound


def test_pruning_keeps_what_the_policy_says_and_all_that_it_needs(
    store: ObjectStore,
) -> None:
    names = [save_version(store, big_state(step), step=step) for step in range(1, 6)]
    policy = RetentionPolicy(keep_last=2)

    planned = prune_store(store, policy, dry_run=True, min_age_s=0)
    assert list_versions(store) == tuple(names)
    done = prune_store(store, policy, min_age_s=0)

    assert list_versions(store) == tuple(names[3:])
    assert (planned.num_objects, planned.num_bytes) == (done.num_objects, done.num_bytes)
    assert done.num_bytes == 3 * 4 * 2**18
    assert done.retention.dropped == tuple(reversed(names[:3]))
    assert verify_store(store).is_sound


def test_young_chunks_stay_until_a_later_prune(store: ObjectStore) -> None:
    for step in (1, 2):
        save_version(store, big_state(step), step=step)

    report = prune_store(store, RetentionPolicy(keep_last=1))

    assert (report.num_objects, report.num_young) == (0, 1)
    assert verify_store(store).num_chunks == 3
    later = prune_store(store, RetentionPolicy(keep_last=1), min_age_s=0)
    assert later.num_objects == 1


def test_nothing_is_pruned_while_a_manifest_cannot_be_read(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    names = [save_version(store, big_state(step), step=step) for step in (1, 2, 3)]
    (tmp_path / names[1]).write_bytes(b"torn")

    with pytest.raises(CheckpointError, match="can't be read"):
        prune_store(store, RetentionPolicy(keep_last=1), min_age_s=0)

    assert list_versions(store) == tuple(names)
    assert len(list(store.list_objects(OBJECTS))) == 4


def test_a_version_with_a_missing_chunk_does_not_push_the_last_whole_one_out(
    tmp_path: Path,
) -> None:
    store = FileStore(tmp_path)
    whole = save_version(store, trained_components(1), step=1)
    broken = save_version(store, trained_components(2), step=2)
    chunk_id = next(iter(read_version((store,), broken).manifest.chunks))
    store.delete(f"objects/{chunk_id[:2]}/{chunk_id}")

    report = prune_store(store, RetentionPolicy(keep_last=1), min_age_s=0)

    assert whole in report.retention.kept
    assert "LATEST" in report.retention.reasons[broken]


def compare(
    tmp_path: Path, left: dict[str, object], right: dict[str, object], **config: Any
) -> StateDifference:
    sides = []
    for index, components in enumerate((left, right)):
        store = FileStore(tmp_path / str(index))
        name = save_version(store, components, config=config.get(f"config_{index}"))
        version = read_version((store,), name)
        sides.append(StoredVersion(stores=(store,), manifest=version.manifest))
    return compare_versions(sides[0], sides[1])


def test_equal_versions_differ_in_nothing(tmp_path: Path) -> None:
    found = compare(tmp_path, trained_components(1), trained_components(1))

    assert found.is_equal
    assert (found.tensors, found.num_equal) == ((), 16)


def test_a_difference_is_told_by_value_and_by_byte(tmp_path: Path) -> None:
    ours = {"w": torch.tensor([1.0, 2.0, 3.0]), "same": torch.ones(2)}
    theirs = {"w": torch.tensor([1.0, 2.5, 3.0]), "same": torch.ones(2)}

    found = compare(tmp_path, {"model": ours}, {"model": theirs})

    (tensor,) = found.tensors
    assert tensor.name == "model/w"
    assert tensor.max_abs_difference == 0.5
    assert (tensor.changed_bytes, tensor.num_bytes) == (1, 12)
    assert found.num_equal == 1


@pytest.mark.parametrize(
    ("one", "other", "largest"),
    [
        (torch.tensor([0.0]), torch.tensor([-0.0]), 0.0),
        (torch.tensor([math.inf, 1]), torch.tensor([math.inf, 2]), 1.0),
        (torch.tensor([1.0]), torch.tensor([math.nan]), math.nan),
        (torch.tensor([math.inf]), torch.tensor([0.0]), math.inf),
        (torch.tensor([True]), torch.tensor([False]), 1.0),
        (torch.tensor([1 + 1j]), torch.tensor([1 - 1j]), 2.0),
        (torch.tensor([1.0]).bfloat16(), torch.tensor([3.0]).bfloat16(), 2.0),
        (torch.tensor([2**60]), torch.tensor([-(2**60)]), 2.0**61),
        (torch.tensor(1), torch.tensor(2), 1.0),
    ],
)
def test_numbers_of_every_kind_are_compared(
    tmp_path: Path, one: torch.Tensor, other: torch.Tensor, largest: float
) -> None:
    found = compare(tmp_path, {"m": {"w": one}}, {"m": {"w": other}})

    value = found.tensors[0].max_abs_difference
    assert value is not None
    assert value == largest or (math.isnan(value) and math.isnan(largest))
    assert found.tensors[0].changed_bytes > 0


def test_a_change_anywhere_in_a_large_tensor_is_found(tmp_path: Path) -> None:
    ours = torch.zeros(2**22 + 10)
    theirs = ours.clone()
    theirs[-1], theirs[5] = 0.25, -0.5

    found = compare(tmp_path, {"m": {"w": ours}}, {"m": {"w": theirs}})

    assert found.tensors[0].max_abs_difference == 0.5


def test_tensors_that_cannot_be_compared_say_why(tmp_path: Path) -> None:
    ours = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2, 3)}
    theirs = {"a": torch.ones(2).half(), "c": torch.ones(3, 2), "d": torch.ones(2)}

    found = compare(tmp_path, {"m": ours}, {"m": theirs})

    assert {one.name: one.what for one in found.tensors} == {
        "m/a": "dtype float32 -> float16",
        "m/b": "only in the first",
        "m/c": "shape [2, 3] -> [3, 2]",
        "m/d": "only in the second",
    }


def test_settings_and_values_that_differ_are_named(tmp_path: Path) -> None:
    ours, theirs = trained_components(1), trained_components(1)
    theirs["optimizer"]["param_groups"][0]["lr"] = 0.02  # type: ignore[index]

    found = compare(
        tmp_path,
        ours,
        theirs,
        config_0={"train": {"lr": 0.01, "old": 1}},
        config_1={"train": {"lr": 0.02, "new": [1]}},
    )

    assert [str(drift) for drift in found.config] == [
        "train.lr: 0.01 -> 0.02",
        "train.old: removed, was 1",
        "train.new: added as [1]",
    ]
    assert [str(drift) for drift in found.values] == [
        "optimizer.param_groups[0].lr: 0.01 -> 0.02"
    ]
    assert not found.is_equal


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.text(max_size=2),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(
    before=st.dictionaries(st.text(max_size=2), JSON),
    after=st.dictionaries(st.text(max_size=2), JSON),
)
def test_settings_drift_exactly_where_they_differ(
    before: dict[str, Any], after: dict[str, Any]
) -> None:
    def typed(value: Any) -> str:
        return repr(value)  # tells True from 1

    assert find_drift(before, before) == ()
    assert bool(find_drift(before, after)) == (typed(sort(before)) != typed(sort(after)))
    swapped = {"added": "removed", "removed": "added", "changed": "changed"}
    assert {(one.name, one.kind) for one in find_drift(before, after)} == {
        (one.name, swapped[one.kind]) for one in find_drift(after, before)
    }


def sort(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: sort(value[key]) for key in sorted(value)}
    return [sort(item) for item in value] if isinstance(value, list) else value


def test_a_setting_of_another_type_has_drifted() -> None:
    assert find_drift({"a": 1}, {"a": True}) == (
        Drift(name="a", kind="changed", before=1, after=True),
    )
