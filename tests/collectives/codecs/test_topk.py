import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from geartrain.collectives.codecs.topk import TopKCodec, largest_places
from geartrain.errors import CommunicationError, ConfigError


def through(codec: TopKCodec, values: torch.Tensor) -> torch.Tensor:
    code = torch.zeros(codec.encoded_bytes(values.numel()), dtype=torch.uint8)
    codec.encode(values, code)
    decoded = torch.empty_like(values)
    codec.decode(code, decoded)
    return decoded


@settings(max_examples=80, deadline=None)
@given(
    seed=st.integers(0, 1000),
    num_elements=st.integers(1, 40_000),
    fraction=st.floats(0.001, 1.0),
    num_levels=st.sampled_from([1, 2, 5, 1000, 10**7]),
)
def test_the_largest_are_found_and_of_equal_ones_the_first(
    seed: int, num_elements: int, fraction: float, num_levels: int
) -> None:
    rng = np.random.default_rng(seed)
    magnitudes = rng.integers(0, num_levels, num_elements).astype(np.float32)
    count = max(1, int(fraction * num_elements))
    best_first = np.argsort(-magnitudes, kind="stable")
    assert np.array_equal(largest_places(magnitudes, count), np.sort(best_first[:count]))


def test_a_sample_that_misleads_costs_time_but_not_the_right_choice() -> None:
    magnitudes = np.linspace(0.5, 1.0, 61 * 1000).astype(np.float32)
    magnitudes[::61] = 10.0  # exactly the sample
    places = largest_places(magnitudes, 6100)
    assert len(places) == 6100
    assert set(range(0, 61_000, 61)) <= set(places.tolist())


@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.05, 0.1, 0.5])
@pytest.mark.parametrize("num_elements", [1, 50, 65_535, 65_536, 65_537, 200_003])
def test_the_largest_arrive_and_nothing_else(fraction: float, num_elements: int) -> None:
    codec = TopKCodec(fraction)
    values = torch.randn(num_elements, generator=torch.Generator().manual_seed(1))
    decoded = through(codec, values)
    count = codec.num_selected(num_elements)
    largest = values.abs().topk(count).indices
    torch.testing.assert_close(decoded[largest], values[largest], rtol=1e-3, atol=1e-3)
    assert int(torch.count_nonzero(decoded)) <= count


def test_ten_percent_move_less_than_a_tenth_of_the_bytes() -> None:
    assert TopKCodec(0.1).encoded_bytes(10**6) <= 0.0815 * 4 * 10**6
    assert TopKCodec(0.01).encoded_bytes(10**6) <= 0.0101 * 4 * 10**6


@pytest.mark.parametrize("fraction", [0.1, 0.01])
def test_damaged_places_are_refused(fraction: float) -> None:
    codec = TopKCodec(fraction)
    values = torch.randn(70_000, generator=torch.Generator().manual_seed(2))
    code = torch.zeros(codec.encoded_bytes(70_000), dtype=torch.uint8)
    codec.encode(values, code)
    code[8 + 2 * codec.num_selected(70_000) :].fill_(0xFF)
    with pytest.raises(CommunicationError, match="damaged"):
        codec.decode(code, torch.empty(70_000))


@pytest.mark.parametrize("fraction", [0.0, -0.1, 0.6, float("nan")])
def test_fractions_that_make_no_sense_are_refused(fraction: float) -> None:
    with pytest.raises(ConfigError, match="fraction"):
        TopKCodec(fraction)
