from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from geartrain.checkpoint.chunks import object_name
from geartrain.checkpoint.collect_garbage import collect_garbage
from geartrain.checkpoint.local_tier import LocalTier
from geartrain.checkpoint.pieces import assemble_manifest
from geartrain.errors import CheckpointError
from stored_versions import describe, facts_of, make_content, pieces_of, read_content, save

SIZES = {"model/w": 1_200_000, "optimizer/m": 300_000}


def test_only_what_no_version_needs_is_removed(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    first = make_content(SIZES)
    second = first | make_content({"optimizer/m": 300_000}, seed=1)
    old, new = save(tier, first, step=1), save(tier, second, step=2)
    assert tier.collect_garbage(min_age_s=0).names == ()

    tier.remove(old.name)
    collected = tier.collect_garbage(min_age_s=0)

    gone = old.manifest.chunks.keys() - new.manifest.chunks.keys()
    assert collected.names == tuple(map(object_name, gone))
    assert collected.num_bytes == 1_200_000
    assert read_content(tier.reader(new), new) == second


def test_a_dry_run_removes_nothing(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    content = make_content(SIZES)
    tier.write_part(describe(content), pieces_of(content))

    collected = collect_garbage(tier.store, now_s=time.time(), min_age_s=0, dry_run=True)

    assert len(collected.names) == 3
    assert all(tier.store.has(name) for name in collected.names)


def test_young_chunks_wait_for_their_manifest(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    content = make_content(SIZES)
    part = tier.write_part(describe(content), pieces_of(content))

    assert collect_garbage(tier.store, now_s=time.time()).names == ()

    version = tier.publish(assemble_manifest(facts_of(content), [part]))
    assert read_content(tier.reader(version), version) == content


def test_a_chunk_that_a_writer_finds_is_young_again(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    content = make_content(SIZES)
    tier.write_part(describe(content), pieces_of(content))
    written_at_s = max(found.modified_at_s for found in tier.store.list_objects("objects/"))
    for found in tier.store.list_objects("objects/"):
        os.utime(tmp_path / found.name, (1.0, 1.0))

    LocalTier(tmp_path).write_part(describe(content), pieces_of(content))

    collected = collect_garbage(tier.store, now_s=written_at_s + 10, min_age_s=100)
    assert collected.names == ()


def test_nothing_is_removed_where_a_manifest_cannot_be_read(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    first, _ = save(tier, make_content(SIZES)), save(tier, make_content(SIZES, 1), step=2)
    (tmp_path / first.name).write_text("{}")

    with pytest.raises(CheckpointError, match=r"nothing is removed .* repair it"):
        tier.collect_garbage(min_age_s=0)

    assert all(tier.store.has(object_name(chunk_id)) for chunk_id in first.manifest.chunks)


def test_the_latest_version_is_not_removed(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)
    version = save(tier, make_content(SIZES))

    with pytest.raises(CheckpointError, match="is the latest version"):
        tier.remove(version.name)
    with pytest.raises(CheckpointError, match="is no version"):
        tier.remove("objects/aa")


def test_a_collector_waits_for_writers_and_gives_up_in_time(tmp_path: Path) -> None:
    tier = LocalTier(tmp_path)

    with (
        tier.store.locked(exclusive=False, deadline_s=1),
        pytest.raises(CheckpointError, match=r"held by a writer for 0\.05 s"),
    ):
        tier.collect_garbage(min_age_s=0, deadline_s=0.05)
    with (
        tier.store.locked(exclusive=True, deadline_s=1),
        pytest.raises(CheckpointError, match="held by a collector"),
        tier.store.locked(exclusive=False, deadline_s=0.05),
    ):
        pass


def test_collecting_beside_writers_never_costs_a_version_a_chunk(tmp_path: Path) -> None:
    contents = [make_content(SIZES, seed=seed) for seed in range(4)]
    is_over = threading.Event()

    def write(index: int) -> None:
        tier = LocalTier(tmp_path)
        for step in range(8):
            # Contents that come again are found there, or have just been collected.
            save(tier, contents[(index + step) % 4], step=100 * index + step)
            for name in tier.versions()[:-2]:
                remove_unless_latest(tier, name)

    def collect() -> None:
        while not is_over.is_set():
            LocalTier(tmp_path).collect_garbage(min_age_s=0)

    with ThreadPoolExecutor() as pool:
        collecting = pool.submit(collect)
        try:
            for writing in [pool.submit(write, index) for index in range(3)]:
                writing.result(60)
        finally:
            is_over.set()
        collecting.result(60)

    tier = LocalTier(tmp_path)
    for name in tier.versions():
        version = tier.read(name)
        assert read_content(tier.reader(version), version) in contents


def remove_unless_latest(tier: LocalTier, name: str) -> None:
    if tier.store.read_pointer() != name:
        tier.store.delete(name)
