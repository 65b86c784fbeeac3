"""Tier 3: the same objects through fsspec."""

from __future__ import annotations

import importlib
import json
import logging
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from geartrain.checkpoint.chunk_store import FileStore
from geartrain.checkpoint.chunks import MANIFESTS, OBJECTS, POINTER
from geartrain.checkpoint.durable_tier import DurableStore, open_store
from geartrain.checkpoint.manifest import encode_manifest
from geartrain.checkpoint.pieces import StateReader
from geartrain.checkpoint.state_tensors import load_components
from geartrain.checkpoint.verify import verify_store
from geartrain.checkpoint.versions import (
    find_latest,
    list_versions,
    publish_version,
    read_version,
)
from geartrain.errors import CheckpointError, ConfigError
from saved_versions import save_version, stored_manifest, trained_components

fsspec: Any = importlib.import_module("fsspec")  # Any: it is not annotated


@pytest.fixture
def store() -> Iterator[DurableStore]:
    made = DurableStore(f"memory://{uuid.uuid4().hex}/run")
    yield made
    made._files.store.clear()


def read_back(store: DurableStore) -> dict[str, Any]:
    latest = find_latest((store,))
    assert latest is not None
    return load_components(StateReader((store,), latest.manifest), latest.manifest)


def assert_equal(left: Any, right: Any) -> None:
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for key, value in left.items():
            assert_equal(value, right[key])
    elif isinstance(left, list | tuple):
        for one, other in zip(left, right, strict=True):
            assert_equal(one, other)
    else:
        assert left == right


def test_a_version_reads_back_equal(store: DurableStore) -> None:
    components = trained_components()

    name = save_version(store, components)

    assert list_versions(store) == (name,)
    assert_equal(read_back(store), components)
    assert verify_store(store).is_sound


def test_an_object_that_is_there_is_left_alone(store: DurableStore) -> None:
    assert store.put_if_absent("objects/ab/x", b"first")

    assert not store.put_if_absent("objects/ab/x", b"other")

    assert store.get("objects/ab/x") == b"first"


def test_what_a_cut_off_put_left_is_written_anew(store: DurableStore) -> None:
    store.put_if_absent("objects/ab/x", b"fir")

    assert store.put_if_absent("objects/ab/x", b"first")

    assert store.get("objects/ab/x") == b"first"


def test_objects_are_listed_with_sizes_and_ages(store: DurableStore) -> None:
    store.put_if_absent("objects/ab/x", b"12345")
    store.put_if_absent("manifests/y", b"1")

    (found,) = store.list_objects(OBJECTS)

    assert (found.name, found.num_bytes) == ("objects/ab/x", 5)
    assert found.modified_at_s > 1.7e9
    assert list(DurableStore("memory://nothing/here").list_objects(OBJECTS)) == []


def test_the_pointer_follows_the_youngest_version_whoever_writes_last(
    store: DurableStore,
) -> None:
    younger = save_version(store, trained_components(1), step=2)
    older = save_version(store, trained_components(2), step=1)

    assert older != younger
    assert store.read_pointer() == younger


def test_a_run_that_went_back_moves_the_pointer_back(store: DurableStore) -> None:
    high = save_version(store, trained_components(1), step=5)
    data = json.loads(store.get(high))
    assert data["manifest"]["created_at_s"] == 5.0
    manifest = stored_manifest(store, trained_components(2), step=3)
    object.__setattr__(manifest, "created_at_s", 9.0)
    low = publish_version(store, manifest)

    assert store.read_pointer() == low


@pytest.mark.parametrize("damage", [b"", b"\xff\x00", b"manifests/gone.json\n", None])
def test_a_reader_with_a_damaged_pointer_takes_the_newest_whole_version(
    store: DurableStore, damage: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    save_version(store, trained_components(1), step=1)
    newest = save_version(store, trained_components(2), step=2)
    path = store._locate(POINTER)
    store._files.rm_file(path)
    if damage is not None:
        store._files.pipe_file(path, damage)

    latest = find_latest((store,))

    assert latest is not None
    assert latest.name == newest
    assert "can't be followed" in caplog.text
    again = save_version(store, trained_components(3), step=3)
    assert store.read_pointer() == again


def test_a_pointer_to_a_damaged_version_may_be_replaced(store: DurableStore) -> None:
    damaged = save_version(store, trained_components(1), step=9)
    path = store._locate(damaged)
    store._files.pipe_file(path, store.get(damaged)[:-9])

    older = save_version(store, trained_components(2), step=2)

    assert store.read_pointer() == older


def test_a_version_that_cannot_be_read_back_is_not_pointed_at(store: DurableStore) -> None:
    with pytest.raises(CheckpointError, match="it is not there"):
        store.publish_pointer(f"{MANIFESTS}000000000001-0123456789abcdef.json")

    assert store.read_pointer() is None


def test_two_writers_at_once_leave_a_whole_store(store: DurableStore) -> None:
    errors: list[Exception] = []

    def write(first: int) -> None:
        try:
            for step in range(first, 20, 2):
                save_version(store, trained_components(step), step=step)
        except Exception as error:  # noqa: BLE001 - shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=write, args=(first,)) for first in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert not errors
    assert verify_store(store).is_sound
    assert len(list_versions(store)) == 19


class Failing:
    """A file system of which some calls fail, as a full or vanished store's do."""

    def __init__(self, files: Any, error: Exception) -> None:
        self._files = files
        self._error = error
        self.num_allowed = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._files, name)
        if name not in {"pipe_file", "cat_file", "info", "ls", "find"}:
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            self.num_allowed -= 1
            if self.num_allowed < 0:
                raise self._error
            return found(*arguments, **options)

        return call


@pytest.mark.parametrize(
    "error",
    [
        OSError(28, "No space left on device"),
        PermissionError(13, "read-only"),
        TimeoutError("no answer"),
        RuntimeError("a store's own"),
    ],
)
def test_a_store_that_fails_at_any_call_keeps_the_version_before(
    store: DurableStore, error: Exception
) -> None:
    before = save_version(store, trained_components(1), step=1)
    works, messages = store._files, list[str]()
    for num_allowed in range(60):
        failing = Failing(works, error)
        failing.num_allowed = num_allowed
        store._files = failing
        try:
            latest = save_version(store, trained_components(2), step=2)
        except CheckpointError as raised:
            store._files = works
            messages.append(str(raised))
            pointed = store.read_pointer()
            assert pointed is not None
            read_version((store,), pointed)
        else:
            break
    store._files = works
    assert len(messages) > 5
    assert all(str(error) in message for message in messages)
    assert latest != before
    assert store.read_pointer() == latest
    assert verify_store(store).is_sound


def test_a_store_that_does_not_answer_is_not_taken_for_an_empty_one(
    store: DurableStore,
) -> None:
    save_version(store, trained_components(1))
    store._files = Failing(store._files, TimeoutError("no answer"))

    with pytest.raises(CheckpointError, match="no answer"):
        store.has("objects/ab/x")
    with pytest.raises(CheckpointError, match="no answer"):
        list(store.list_objects(OBJECTS))
    with pytest.raises(CheckpointError, match="no answer"):
        find_latest((store,))


def test_a_store_without_whole_puts_gets_objects_by_a_move(tmp_path: Path) -> None:
    # dir:: wraps the local file system under a name of which nothing is known.
    store = DurableStore(f"dir::file://{tmp_path}/run")
    assert not store._ability.puts_whole

    name = save_version(store, trained_components())

    assert store.read_pointer() == name
    assert verify_store(store).is_sound
    assert verify_store(FileStore(tmp_path / "run")).is_sound
    assert not list(tmp_path.rglob("*.draft"))


@pytest.mark.parametrize("name", ["", "/etc/passwd", "objects/../../x"])
def test_a_name_that_leads_out_of_the_store_is_refused(
    store: DurableStore, name: str
) -> None:
    with pytest.raises(CheckpointError, match="is no name of an object"):
        store.get(name)


def test_a_plain_path_and_a_file_url_are_directories(tmp_path: Path) -> None:
    for url in (str(tmp_path / "a"), f"file://{tmp_path}/a"):
        store = open_store(url)
        assert isinstance(store, FileStore)
        assert store.label == str(tmp_path / "a")
    assert isinstance(open_store("memory://x"), DurableStore)


def test_a_url_of_no_known_kind_is_refused_and_secrets_are_not_shown() -> None:
    with pytest.raises(ConfigError, match="nosuch://host/run can't be opened"):
        open_store("nosuch://user:secret@host/run?token=hidden")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        msg = "Install s3fs to access S3"
        raise ImportError(msg)

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)

    with pytest.raises(ConfigError, match=r"s3://bucket/run needs another package.*s3fs"):
        open_store("s3://bucket/run")


def test_a_race_for_the_pointer_is_decided_by_age(
    store: DurableStore, caplog: pytest.LogCaptureFixture
) -> None:
    """A store with conditional puts, whose pointer another writer moves in between."""
    caplog.set_level(logging.WARNING)
    young = stored_manifest(store, trained_components(1), step=5)
    old = save_version(store, trained_components(2), step=1)
    works = store._files

    class Conditional:
        def __getattr__(self, name: str) -> Any:
            return getattr(works, name)

        def info(self, path: str) -> Any:
            found = works.info(path)
            return found | {"ETag": works.cat_file(path).hex()}

        def pipe_file(self, path: str, data: bytes, **options: Any) -> None:
            tag = options.pop("IfMatch", None)
            if tag is not None and not interrupted:
                interrupted.append(path)
                works.pipe_file(path, f"{young_name}\n".encode())
            if tag is not None and works.cat_file(path).hex() != tag:
                error = OSError(22, "At least one of the pre-conditions did not hold")
                cause: Any = Exception()
                cause.response = {"Error": {"Code": "PreconditionFailed"}}
                raise error from cause
            works.pipe_file(path, data, **options)

    interrupted: list[str] = []
    young_name, data = encode_manifest(young)
    store.put_if_absent(young_name, data)
    store._files = Conditional()
    store._ability = type(store._ability)(
        puts_whole=True, has_create=True, has_match=True, is_flat=False
    )

    middle = save_version(store, trained_components(3), step=3)

    assert interrupted
    assert store.read_pointer() == young_name
    assert middle in caplog.text
    assert old != middle
