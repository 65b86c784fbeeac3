from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from blake3 import blake3

from geartrain.checkpoint.chunks import ChunkFacts, ChunkSpan, describe_chunk, name_chunk
from geartrain.checkpoint.manifest import (
    LogSegment,
    Piece,
    StateManifest,
    TensorFacts,
    decode_manifest,
    encode_manifest,
    step_of_name,
)
from geartrain.errors import CheckpointError

DATA = bytes(range(24))
CHUNK_ID = name_chunk(DATA)


def span(start_byte: int, stop_byte: int) -> ChunkSpan:
    return ChunkSpan(chunk_id=CHUNK_ID, start_byte=start_byte, stop_byte=stop_byte)


def manifest(**changes: Any) -> StateManifest:  # Any: fields of many types
    plain = StateManifest(
        step=3,
        lineage="ab",
        created_at_s=1.5,
        kind="full",
        tensors={
            "model/w": TensorFacts(dtype="bfloat16", shape=(2, 3)),
            "model/empty": TensorFacts(dtype="float32", shape=(0, 3)),
            "optimizer/step": TensorFacts(dtype="int64", shape=()),
        },
        pieces=(
            Piece(name="model/w", start=0, stop=2, spans=(span(0, 4),)),
            Piece(name="model/w", start=2, stop=6, spans=(span(4, 6), span(6, 12))),
            Piece(name="optimizer/step", start=0, stop=1, spans=(span(12, 20),)),
        ),
        chunks={CHUNK_ID: describe_chunk(DATA)},
        structure={"model": {"big": 2**127, "text": "\ud800ü"}},
        extras={"position": [1, 0.1, None, True]},
        log_segments=(
            LogSegment(
                first_step=4, last_step=9, lineage="cd", codec="raw", spans=(span(0, 24),)
            ),
        ),
        plan_fingerprint="f",
        config={"lr": 5e-324},
    )
    return replace(plain, **changes)


def test_a_manifest_reads_back_equal() -> None:
    name, data = encode_manifest(manifest())

    assert decode_manifest(data, name) == manifest()
    assert decode_manifest(data) == manifest()
    assert step_of_name(name) == 3
    assert encode_manifest(decode_manifest(data)) == (name, data)


def test_a_manifest_is_plain_json() -> None:
    document = json.loads(encode_manifest(manifest())[1])

    assert document["format"] == "geartrain-state"
    assert document["manifest"]["tensors"]["model/w"]["shape"] == [2, 3]


def test_every_flip_of_a_bit_and_every_cut_is_found() -> None:
    name, data = encode_manifest(manifest())

    for index in range(len(data)):
        for bit in range(8):
            flipped = bytearray(data)
            flipped[index] ^= 1 << bit
            with pytest.raises(CheckpointError):
                decode_manifest(bytes(flipped), name)
        with pytest.raises(CheckpointError):
            decode_manifest(data[:index], name)
    with pytest.raises(CheckpointError):
        decode_manifest(data + b"\n", name)


def sealed(body: bytes, version: int = 1) -> bytes:
    digest = blake3(body).hexdigest()
    return (
        (
            f'{{"format":"geartrain-state","schema_version":{version},"blake3":"{digest}",'
            '"manifest":'
        ).encode()
        + body
        + b"}\n"
    )


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda d: d.update(color="red"), "does not know"),
        (lambda d: d.pop("lineage"), "missing required field `lineage`"),
        (lambda d: d.update(step="3"), "Expected `int`"),
        (lambda d: d.update(step=-3), "step >= 0"),
        (lambda d: d.update(kind="half"), "Invalid enum value 'half'"),
        (lambda d: d["tensors"]["model/w"].update(dtype="object"), "'object'"),
        (lambda d: d["pieces"].pop(), r"nobody holds optimizer/step\[0:1\]"),
        (lambda d: d["chunks"].clear(), "is unknown"),
        (lambda d: d["pieces"][0].update(stop=3), "overlap"),
    ],
)
def test_a_manifest_that_is_sealed_but_wrong_is_refused(change: Any, problem: str) -> None:
    _, data = encode_manifest(manifest())
    document = json.loads(data)["manifest"]
    change(document)
    body = json.dumps(document, separators=(",", ":")).encode()

    with pytest.raises(CheckpointError, match=problem):
        decode_manifest(sealed(body))


def test_another_version_is_named() -> None:
    with pytest.raises(CheckpointError, match="schema_version=2, expected 1"):
        decode_manifest(sealed(b"{}", version=2))


def test_a_manifest_under_the_name_of_another_is_refused() -> None:
    _, data = encode_manifest(manifest())
    name, _ = encode_manifest(manifest(step=4))

    with pytest.raises(CheckpointError, match="not the manifest of that name"):
        decode_manifest(data, name)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"step": -1}, "step=-1"),
        ({"created_at_s": float("nan")}, "created_at_s=nan"),
        ({"extras": {"x": float("inf")}}, r"extras\['x'\] is inf"),
        ({"extras": {"x": (1, 2)}}, r"extras\['x'\] is \(1, 2\)"),
        ({"config": {"x": [{1: 2}]}}, r"config\['x'\]\[0\] is \{1: 2\}"),
        ({"chunks": {}}, "is unknown"),
        ({"chunks": {CHUNK_ID: ChunkFacts(num_bytes=19, crc32=1)}}, "19 bytes long"),
        (
            {"chunks": {CHUNK_ID: describe_chunk(DATA), "0" * 64: describe_chunk(b"x")}},
            "belongs to nothing",
        ),
        (
            {"pieces": (Piece(name="model/w", start=0, stop=6, spans=(span(0, 4),)),)},
            "nobody holds optimizer/step",
        ),
    ],
)
def test_a_bad_manifest_cannot_exist(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError, match=problem):
        manifest(**changes)


def test_a_piece_with_bytes_for_another_range_is_refused() -> None:
    first, *others = manifest().pieces
    short = replace(first, spans=(span(0, 3),))

    with pytest.raises(CheckpointError, match=r"model/w\[0:2\] has 3 bytes .* expected 4"):
        manifest(pieces=(short, *others))


def test_extras_nested_beyond_reason_are_refused() -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]

    with pytest.raises(CheckpointError, match="nested too deeply"):
        encode_manifest(manifest(extras={"x": nested}))


def test_versions_are_written_without_torch() -> None:
    code = (
        "import sys; import geartrain.checkpoint.local_tier, geartrain.checkpoint.verify;"
        "sys.exit('torch' in sys.modules)"
    )

    ended = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)

    assert ended.returncode == 0
