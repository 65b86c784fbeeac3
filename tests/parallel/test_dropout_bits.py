import torch
from hypothesis import given
from hypothesis import strategies as st

from geartrain.parallel.dropout import random_bits, sample_keys, stream_salt

GAMMA = 0x9E3779B97F4A7C15


def reference_mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    return value ^ (value >> 31)


def reference_bits(sample: int, salt: int, num_elements: int) -> list[int]:
    """The same in Python's unbounded integers: low half first, read as int32."""
    key = reference_mix((sample * GAMMA + salt) % 2**64)
    halves = []
    for counter in range(1, num_elements // 2 + 2):
        output = reference_mix((key + counter * GAMMA) % 2**64)
        halves += [output % 2**32, output >> 32]
    return [half - 2**32 if half >= 2**31 else half for half in halves[:num_elements]]


@given(
    samples=st.lists(st.integers(0, 2**40), min_size=1, max_size=4),
    salt=st.integers(0, 2**64 - 1),
    num_elements=st.integers(1, 9),
)
def test_bits_equal_the_integer_reference(
    samples: list[int], salt: int, num_elements: int
) -> None:
    bits = random_bits(sample_keys(torch.tensor(samples), salt), num_elements)

    assert bits.tolist() == [reference_bits(s, salt, num_elements) for s in samples]


def test_the_generator_is_splitmix64() -> None:
    # The first outputs of the published generator from state 0 (Vigna's splitmix64.c).
    bits = random_bits(torch.tensor([0]), 4)[0].tolist()

    low, high, low_2, high_2 = (value % 2**32 for value in bits)
    assert (high << 32 | low) == 0xE220A8397B1DCDAF
    assert (high_2 << 32 | low_2) == 0x6E789E6AA1B965F4


def test_salts_depend_on_every_field() -> None:
    fields = [
        (1, 2, 3, 4),
        (0, 2, 3, 4),
        (1, 0, 3, 4),
        (1, 2, 0, 4),
        (1, 2, 3, 0),
        (2, 1, 3, 4),
    ]

    assert len({stream_salt(*values) for values in fields}) == len(fields)


def test_bits_are_uniform_and_samples_independent() -> None:
    num_samples, num_elements = 64, 4096
    bits = random_bits(sample_keys(torch.arange(num_samples), 99), num_elements)
    uniform = bits.double() / 2**32 + 0.5

    total = uniform.numel()
    assert abs(float(uniform.mean()) - 0.5) < 5 * (1 / 12 / total) ** 0.5
    counts = torch.histc(uniform, bins=256, min=0, max=1)
    chi_square = float(((counts - total / 256) ** 2 / (total / 256)).sum())
    assert abs(chi_square - 255) < 5 * (2 * 255) ** 0.5
    correlation = torch.corrcoef(uniform) - torch.eye(num_samples)
    assert float(correlation.abs().max()) < 6 / num_elements**0.5
    neighbours = torch.corrcoef(
        torch.stack((uniform[:, :-1].ravel(), uniform[:, 1:].ravel()))
    )
    assert abs(float(neighbours[0, 1])) < 5 / total**0.5
    for bit in range(32):
        ones = float(((bits >> bit) & 1).double().mean())
        assert abs(ones - 0.5) < 5 * 0.5 / total**0.5
