"""What every codec must do with any numbers."""

import math
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.collectives.codecs.protocol import Codec
from geartrain.collectives.codecs.registry import (
    AUTO_CODECS,
    CODEC_NAMES,
    QUALITY,
    make_codec,
)
from geartrain.collectives.codecs.speed import measure_codec
from geartrain.errors import CommunicationError, ConfigError

NAMES = (*CODEC_NAMES, "topk:0.01")
LOSSY = tuple(name for name in NAMES if name != "none")
DENSE = tuple(name for name in LOSSY if not name.startswith("topk"))
SIZES = (0, 1, 2, 7, 8, 9, 255, 256, 257, 1023, 1024, 1025, 5000, 65536, 300001)
ELEMENT_ERROR = {"fp16": 5e-4, "bf16": 4e-3, "fp8": 0.0625, "int8": 4e-3, "int4": 0.068}
"""Largest error of an element / largest magnitude of its row, at most."""


def through(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    code = torch.full((codec.encoded_bytes(values.numel()),), 0xAB, dtype=torch.uint8)
    codec.encode(values, code)
    decoded = torch.full_like(values, 123.0)
    codec.decode(code, decoded)
    return decoded


def random_values(num_elements: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_elements, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("num_elements", SIZES)
def test_error_stays_within_the_format(name: str, num_elements: int) -> None:
    values = random_values(num_elements)
    error = (through(make_codec(name), values) - values).abs()
    peak = values.abs().max() if num_elements else 0.0
    assert bool((error <= ELEMENT_ERROR[name] * peak).all())


@pytest.mark.parametrize("num_elements", SIZES)
def test_the_exact_codec_returns_the_same_bits(num_elements: int) -> None:
    values = random_values(num_elements)
    if num_elements:
        values[0] = math.nan
    assert torch.equal(
        through(make_codec("none"), values).view(torch.int32), values.view(torch.int32)
    )


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1500, 4999])
def test_one_bad_value_makes_all_decoded_values_nan(
    name: str, bad: float, place: int
) -> None:
    values = random_values(5000)
    values[place] = bad
    assert bool(torch.isnan(through(make_codec(name), values)).all())


def test_the_eight_bit_kernel_alone_would_hide_a_nan() -> None:
    rows = random_values(256).view(1, 256)
    rows[0, 3] = math.nan
    ops = torch.ops.quantized
    kernel_only = ops.embedding_bag_byte_unpack(ops.embedding_bag_byte_prepack(rows))
    assert bool(torch.isfinite(kernel_only).all())
    assert bool(torch.isnan(through(make_codec("int8"), rows.view(-1))).all())


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("magnitude", [1e-30, 1e-12, 1e-9, 1e-6, 1.0, 7e4, 1e6, 1e20, 1e37])
def test_precision_does_not_depend_on_the_magnitude(name: str, magnitude: float) -> None:
    values = random_values(3000) * magnitude
    assert bool(torch.isfinite(values).all())
    error = (through(make_codec(name), values) - values).abs()
    assert bool((error <= ELEMENT_ERROR[name] * values.abs().max()).all())


@pytest.mark.parametrize("name", LOSSY)
def test_values_beyond_a_format_never_become_infinite_in_silence(name: str) -> None:
    values = random_values(2000)
    values[5] = 3.4e38
    decoded = through(make_codec(name), values)
    assert bool(torch.isnan(decoded).all())


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("value", [0.0, 1e-44, 0.25, -3.0])
def test_equal_values_stay_what_they_are(name: str, value: float) -> None:
    values = torch.full((3000,), value)
    codec = make_codec(name)
    decoded = through(codec, values)
    if name.startswith("topk"):
        decoded = decoded[: int(3000 * float(name.partition(":")[2] or 0.1))]
    torch.testing.assert_close(
        decoded, torch.full_like(decoded, value), rtol=1e-3, atol=1e-44
    )


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_an_outlier_spoils_its_own_row_only(name: str) -> None:
    codec = make_codec(name)
    values = random_values(8 * codec.row_elements)
    values[3] = 1e5
    error = (through(codec, values) - values)[codec.row_elements :]
    assert float(error.norm() / values[codec.row_elements :].norm()) < 0.15


@pytest.mark.parametrize("name", LOSSY)
def test_the_code_depends_on_nothing_but_the_values(name: str) -> None:
    codec = make_codec(name)
    codes = []
    for num_before, filler in ((70001, 0x00), (3, 0xFF)):
        through(codec, random_values(num_before, seed=9))  # leaves other scratch behind
        values = random_values(4099)
        code = torch.full((codec.encoded_bytes(4099),), filler, dtype=torch.uint8)
        codec.encode(values, code)
        codes.append(code)
    assert torch.equal(codes[0], codes[1])


@pytest.mark.parametrize("name", LOSSY)
def test_a_code_of_bad_values_holds_no_memory_of_the_process(name: str) -> None:
    codec = make_codec(name)
    code = torch.full((codec.encoded_bytes(999),), 0xFF, dtype=torch.uint8)
    codec.encode(torch.full((999,), math.nan), code)
    assert bool((code[8:] == 0).all())


@pytest.mark.parametrize("name", ["bf16", "fp8", "int8", "int4"])
def test_rows_cut_at_the_stated_multiple_code_alike(name: str) -> None:
    codec = make_codec(name)
    cut = 3 * codec.row_elements
    values = random_values(cut + 500)
    whole = through(codec, values)
    torch.testing.assert_close(
        whole[:cut], through(codec, values[:cut]), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("name", NAMES)
def test_codes_may_lie_at_odd_addresses(name: str) -> None:
    codec = make_codec(name)
    values = random_values(3001)
    size = codec.encoded_bytes(3001)
    buffer = torch.zeros(size + 1, dtype=torch.uint8)
    codec.encode(values, buffer[1:])
    decoded = torch.empty_like(values)
    codec.decode(buffer[1:], decoded)
    assert torch.equal(decoded, through(codec, values))


@pytest.mark.parametrize("name", LOSSY)
def test_threads_may_share_a_codec(name: str) -> None:
    codec = make_codec(name)
    inputs = [random_values(70_000 + 1000 * i, seed=i) for i in range(4)]
    expected = [through(make_codec(name), values) for values in inputs]
    wrong: list[int] = []

    def work(index: int) -> None:
        same = all(
            torch.equal(through(codec, inputs[index]), expected[index]) for _ in range(9)
        )
        if not same:
            wrong.append(index)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
    assert not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("byte", [0, 1, 3, 4])
def test_a_damaged_header_is_refused(name: str, byte: int) -> None:
    codec = make_codec(name)
    code = torch.zeros(codec.encoded_bytes(100), dtype=torch.uint8)
    codec.encode(random_values(100), code)
    code[byte] = 0x77
    with pytest.raises(CommunicationError, match="header"):
        codec.decode(code, torch.empty(100))


def test_a_code_of_another_codec_is_refused() -> None:
    fp16, bf16 = make_codec("fp16"), make_codec("bf16")
    code = torch.zeros(fp16.encoded_bytes(100), dtype=torch.uint8)
    fp16.encode(random_values(100), code)
    with pytest.raises(CommunicationError, match="bf16"):
        bf16.decode(code, torch.empty(100))


@pytest.mark.parametrize("name", NAMES)
def test_tensors_of_wrong_type_or_size_are_refused(name: str) -> None:
    codec = make_codec(name)
    code = torch.zeros(codec.encoded_bytes(10), dtype=torch.uint8)
    with pytest.raises(ConfigError, match="expected"):
        codec.encode(torch.zeros(10, dtype=torch.float64), code)
    with pytest.raises(ConfigError, match="expected"):
        codec.decode(code[:-1], torch.zeros(10))


@pytest.mark.parametrize("name", NAMES)
def test_sizes_are_those_that_are_stated(name: str) -> None:
    codec = make_codec(name)
    fraction = codec.encoded_bytes(1 << 20) / (4 << 20)
    if name in QUALITY:
        assert fraction == pytest.approx(QUALITY[name].bytes_fraction, rel=0.01)
    else:
        assert fraction <= 0.0101
    assert all(codec.encoded_bytes(n) % 4 == 0 for n in SIZES)


@pytest.mark.parametrize("name", [n for n in NAMES if n in QUALITY])
def test_relative_errors_are_at_most_those_stated(name: str) -> None:
    values = random_values(1 << 18)
    error = float((through(make_codec(name), values) - values).norm() / values.norm())
    assert error <= QUALITY[name].relative_error
    assert error >= QUALITY[name].relative_error / 2  # the statement is no mere excuse


def test_auto_may_choose_what_costs_at_most_one_percent() -> None:
    assert AUTO_CODECS == ("fp16", "bf16", "fp8", "int8")


@pytest.mark.parametrize(
    "name", ["int3", "", "INT8", "int8:4", "topk:", "topk:x", "topk:0"]
)
def test_unknown_names_are_refused_with_what_is_there(name: str) -> None:
    with pytest.raises(ConfigError, match=r"top-?k"):
        make_codec(name)


@pytest.mark.parametrize("name", NAMES)
def test_speed_is_measured_once_a_process(name: str) -> None:
    profile = measure_codec(name)
    assert profile is measure_codec(name)
    assert profile.name == name
    assert profile.encode_bytes_per_s > 1e6
    assert profile.decode_bytes_per_s > 1e6


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(LOSSY),
    values=st.lists(
        st.floats(width=32, allow_nan=True, allow_infinity=True), min_size=0, max_size=40
    ),
    repeat=st.integers(1, 60),
)
def test_any_floats_decode_to_all_finite_or_all_nan(
    name: str, values: list[float], repeat: int
) -> None:
    original = torch.tensor(values * repeat, dtype=torch.float32)
    decoded = through(make_codec(name), original)
    if bool((original.abs() < 2.0**127).all()):
        assert bool(torch.isfinite(decoded).all())
    else:
        assert bool(torch.isnan(decoded).all())
