"""The durable tier on S3, against moto's emulator of it, where that is installed."""

from __future__ import annotations

import importlib
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from geartrain.checkpoint.durable_tier import DurableStore
from geartrain.checkpoint.prune import prune_store
from geartrain.checkpoint.retention import RetentionPolicy
from geartrain.checkpoint.verify import verify_store
from geartrain.checkpoint.versions import list_versions
from geartrain.errors import CheckpointError
from saved_versions import save_version, trained_components

pytestmark = pytest.mark.slow  # botocore and an HTTP server take seconds to import


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], DurableStore]]:
    """Opens the same empty bucket again and again, as several writers do."""
    pytest.importorskip("s3fs", reason="pip install s3fs")
    moto: Any = pytest.importorskip("moto.server", reason="pip install moto[s3,server]")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    url = "http://{}:{}".format(*server.get_host_and_port())
    bucket = uuid.uuid4().hex  # the emulator's buckets outlive its server
    boto3: Any = importlib.import_module("boto3")
    boto3.client("s3", endpoint_url=url).create_bucket(Bucket=bucket)
    options = {"endpoint_url": url, "skip_instance_cache": True}
    yield lambda: DurableStore(f"s3://{bucket}/run", options)
    server.stop()


def test_versions_are_saved_listed_pruned_and_whole(
    connect: Callable[[], DurableStore],
) -> None:
    store = connect()
    assert store.read_pointer() is None
    assert list_versions(store) == ()

    names = [save_version(store, trained_components(i), step=i) for i in (1, 2, 3)]
    late = save_version(store, trained_components(0), step=0)

    assert store.read_pointer() == names[-1]
    assert list_versions(store) == (late, *names)
    prune_store(store, RetentionPolicy(keep_last=1), min_age_s=0)
    assert list_versions(store) == (names[-1],)
    assert verify_store(store).is_sound


def test_objects_and_the_pointer_change_only_by_condition(
    connect: Callable[[], DurableStore],
) -> None:
    store = connect()
    assert store.put_if_absent("objects/ab/x", b"1")
    assert not store.put_if_absent("objects/ab/x", b"1")
    with pytest.raises(FileExistsError):
        store._put(store._locate("objects/ab/x"), b"2")
    assert store.get("objects/ab/x") == b"1"

    assert store._replace_pointer(b"first\n", None, is_absent=True)
    assert not store._replace_pointer(b"second\n", None, is_absent=True)
    tag, _ = store._read_tagged_pointer()
    assert store._replace_pointer(b"third\n", tag, is_absent=False)
    assert not store._replace_pointer(b"fourth\n", tag, is_absent=False)
    assert store.read_pointer() == "third"


def test_two_writers_leave_a_whole_store_and_the_youngest_version(
    connect: Callable[[], DurableStore],
) -> None:
    errors: list[Exception] = []

    def write(first: int) -> None:
        store = connect()
        try:
            for step in range(first, 12, 2):
                save_version(store, trained_components(step), step=step)
        except Exception as error:  # noqa: BLE001 - shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=write, args=(first,)) for first in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    store = connect()
    assert not errors
    assert verify_store(store).is_sound
    assert str(store.read_pointer()).startswith("manifests/000000000011-")


@pytest.mark.usefixtures("connect")
def test_a_store_that_is_gone_is_an_error_and_not_an_empty_store() -> None:
    store = DurableStore("s3://bucket/run", {"endpoint_url": "http://127.0.0.1:9"})

    with pytest.raises(CheckpointError, match="connect"):
        list_versions(store)
