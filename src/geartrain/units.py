"""Turn what people type ("2 GiB", "10 Gbit/s") into base units, and back."""

from __future__ import annotations

import re

from geartrain.errors import ConfigError

_BINARY = {"": 1, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_DECIMAL = {"k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_PREFIXES = _BINARY | _DECIMAL
_QUANTITY = re.compile(r"\s*(?P<number>\d+(\.\d*)?|\.\d+)\s*(?P<unit>[A-Za-z/]*)\s*$")


def parse_bytes(text: str) -> int:
    """Read an amount of memory.

    Args:
        text: A number with an optional unit, such as ``"2GiB"`` or ``"512 MB"``;
            without a unit, bytes.

    Returns:
        Bytes, rounded to the nearest integer.

    Raises:
        ConfigError: If the text is not an amount of memory.

    >>> parse_bytes("2GiB"), parse_bytes("1.5 kB"), parse_bytes("10")
    (2147483648, 1500, 10)
    """
    number, unit = _split_quantity(text, "an amount of memory such as 2GiB or 512MB")
    if unit and not unit.endswith("B"):
        msg = f"{text!r} has the unit {unit!r}; write an amount of memory such as 2GiB"
        raise ConfigError(msg)
    return round(number * _scale(text, unit.removesuffix("B")))


def parse_bytes_per_s(text: str) -> float:
    """Read a data rate.

    Args:
        text: A number with a unit, such as ``"10Gbit/s"`` or ``"1.2 GB/s"``; bits may
            go without ``/s``, as links are named: ``"50Mbit"``.

    Returns:
        Bytes per second.

    Raises:
        ConfigError: If the text is not a data rate.

    >>> parse_bytes_per_s("8 Mbit/s"), parse_bytes_per_s("1 GiB/s")
    (1000000.0, 1073741824.0)
    >>> parse_bytes_per_s("50Mbit")
    6250000.0
    """
    number, unit = _split_quantity(text, "a data rate such as 10Gbit/s or 1GB/s")
    amount, slash, second = unit.partition("/")
    if slash + second in {"", "/s"} and amount.endswith("bit"):
        return number * _scale(text, amount.removesuffix("bit")) / 8
    if slash and second == "s" and amount.endswith("B"):
        return number * _scale(text, amount.removesuffix("B"))
    msg = f"{text!r} is not a data rate; write one such as 10Gbit/s or 1GB/s"
    raise ConfigError(msg)


def format_bytes(num_bytes: float) -> str:
    """Write bytes for people.

    >>> format_bytes(3 * 2**30), format_bytes(1536), format_bytes(10)
    ('3.0 GiB', '1.5 KiB', '10 B')
    """
    for prefix in ("Ti", "Gi", "Mi", "Ki"):
        if num_bytes >= _BINARY[prefix]:
            return f"{num_bytes / _BINARY[prefix]:.1f} {prefix}B"
    return f"{num_bytes:.0f} B"


def format_rate(per_s: float, unit: str) -> str:
    """Write a rate for people, with a decimal prefix.

    >>> format_rate(2.5e12, "FLOP/s"), format_rate(12.0, "B/s")
    ('2.50 TFLOP/s', '12.0 B/s')
    """
    for prefix in ("P", "T", "G", "M", "k"):
        if per_s >= _DECIMAL[prefix]:
            return f"{per_s / _DECIMAL[prefix]:.2f} {prefix}{unit}"
    return f"{per_s:.1f} {unit}"


def format_bit_rate(bytes_per_s: float) -> str:
    """Write the rate of a link for people: in bits, to three digits.

    >>> format_bit_rate(62.5e6), format_bit_rate(5.9412e6), format_bit_rate(124.96e6)
    ('500 Mbit/s', '47.5 Mbit/s', '1000 Mbit/s')
    """
    number, unit = format_rate(bytes_per_s * 8, "bit/s").split()
    return f"{float(f'{float(number):.3g}'):g} {unit}"


def format_bits_per_s(bytes_per_s: float) -> str:
    """Write the rate of a link as :func:`parse_bytes_per_s` reads it, to six digits.

    >>> format_bits_per_s(6_250_000), format_bits_per_s(1_500_000_000)
    ('50Mbit', '12Gbit')
    >>> format_bits_per_s(1234.5)
    '9.876kbit'
    """
    bits = bytes_per_s * 8
    for prefix in ("T", "G", "M", "k"):
        if bits >= _DECIMAL[prefix]:
            return f"{bits / _DECIMAL[prefix]:.6g}{prefix}bit"
    return f"{bits:.6g}bit"


def format_seconds(seconds: float) -> str:
    """Write a duration for people.

    >>> format_seconds(0.0125), format_seconds(3.2), format_seconds(125)
    ('12.5 ms', '3.20 s', '2 min 05 s')
    """
    if seconds < 1:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:  # noqa: PLR2004 - seconds in a minute
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s"


def _split_quantity(text: str, expected: str) -> tuple[float, str]:
    match = _QUANTITY.match(text)
    if match is None:
        msg = f"{text!r} is not {expected}"
        raise ConfigError(msg)
    return float(match["number"]), match["unit"]


def _scale(text: str, prefix: str) -> int:
    if prefix not in _PREFIXES:
        known = ", ".join(p for p in _PREFIXES if p)
        msg = f"{text!r} has the unknown prefix {prefix!r}; known are {known}"
        raise ConfigError(msg)
    return _PREFIXES[prefix]
