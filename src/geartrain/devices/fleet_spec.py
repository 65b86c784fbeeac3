"""What ``--fleet`` may say: parsed and checked without torch."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from geartrain.devices.emulation.throttle import check_core_fraction
from geartrain.errors import ConfigError
from geartrain.units import format_bytes, parse_bytes

EMULATED_PREFIX = "emulated:"
MIN_MEMORY_LIMIT_BYTES = 2**20
"""Below 1 MiB not even a toy model's optimizer state fits."""

_DEVICE_ID = re.compile(r"(?P<kind>[a-z][a-z0-9_]*)(:\d+)?$")
_EXAMPLES = "emulated:1.0,0.5/2GiB, a fleet.json, or cuda:0,cuda:1,cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedDevice:
    """One process, its share of a core and its limit on tensor bytes."""

    core_fraction: float
    memory_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """A parsed ``--fleet``."""

    form: Literal["local", "emulated", "file", "list"]
    text: str = ""
    emulated: tuple[EmulatedDevice, ...] = ()
    path: Path | None = None
    device_ids: tuple[str, ...] = ()


def parse_fleet_spec(text: str | None, kinds: Sequence[str]) -> FleetSpec:
    """Read what ``--fleet`` says.

    Args:
        text: The option's value; None stands for all local devices.
        kinds: Device kinds that have an adapter.

    Raises:
        ConfigError: If it says nothing sensible.

    >>> parse_fleet_spec("emulated:1.0,0.5", ["cpu"]).emulated[1].core_fraction
    0.5
    >>> parse_fleet_spec("cuda:0,cpu", ["cpu", "cuda"]).device_ids
    ('cuda:0', 'cpu')
    """
    if text is None:
        return FleetSpec(form="local")
    text = text.strip()
    if not text:
        msg = f"fleet '' is empty; write {_EXAMPLES}, or leave it out for all devices"
        raise ConfigError(msg)
    if text.startswith(EMULATED_PREFIX):
        entries = text.removeprefix(EMULATED_PREFIX).split(",")
        emulated = tuple(_parse_emulated(i, entry) for i, entry in enumerate(entries))
        return FleetSpec(form="emulated", text=text, emulated=emulated)
    if text.endswith(".json") or "/" in text or Path(text).is_file():
        return FleetSpec(form="file", text=text, path=_existing(Path(text)))
    return FleetSpec(form="list", text=text, device_ids=_parse_list(text, kinds))


def check_cores(
    core_fractions: Sequence[float], cores: float, *, oversubscribe: bool
) -> bool:
    """Check that emulated devices get the share that they were promised.

    Returns:
        Whether the fleet is oversubscribed, which results have to say.

    Raises:
        ConfigError: If the fractions add up to more than there is.

    >>> check_cores([0.5, 0.5], 2.0, oversubscribe=False)
    False
    """
    total = sum(core_fractions)
    if total <= cores * (1 + 1e-9):
        return False
    if not oversubscribe:
        msg = (
            f"the core fractions add up to {total:g} but {cores:g} cores are present; "
            "lower them, or start with --oversubscribe and have the results say so"
        )
        raise ConfigError(msg)
    return True


def _parse_emulated(index: int, entry: str) -> EmulatedDevice:
    fraction_text, slash, memory_text = entry.strip().partition("/")
    name = f"emulated:{index}"
    try:
        fraction = float(fraction_text)
    except ValueError as error:
        msg = (
            f"{name}: core fraction {fraction_text!r} is not a number; "
            "write emulated:1.0,0.5/2GiB"
        )
        raise ConfigError(msg) from error
    check_core_fraction(fraction, name)
    if not slash:
        return EmulatedDevice(core_fraction=fraction)
    limit_bytes = parse_bytes(memory_text)
    if limit_bytes < MIN_MEMORY_LIMIT_BYTES:
        msg = (
            f"{name}: memory limit {memory_text!r} is {format_bytes(limit_bytes)}; "
            f"expected at least {format_bytes(MIN_MEMORY_LIMIT_BYTES)}, such as 2GiB"
        )
        raise ConfigError(msg)
    return EmulatedDevice(core_fraction=fraction, memory_limit_bytes=limit_bytes)


def _existing(path: Path) -> Path:
    if path.exists() and not path.is_file():
        msg = f"fleet {str(path)!r} is there but is no file; write {_EXAMPLES}"
        raise ConfigError(msg)
    if not path.exists():
        command = f"geartrain probe -o {shlex.quote(str(path))}"
        msg = f"fleet file {path} does not exist; write one: {command}"
        raise ConfigError(msg)
    return path


def _parse_list(text: str, kinds: Sequence[str]) -> tuple[str, ...]:
    ids = tuple(part.strip() for part in text.split(","))
    for device_id in ids:
        match = _DEVICE_ID.match(device_id)
        if match is None or match["kind"] == "emulated":
            msg = f"{device_id!r} in fleet {text!r} is no device id; write {_EXAMPLES}"
            raise ConfigError(msg)
        if match["kind"] not in kinds:
            listed = ", ".join(sorted(kinds))
            msg = f"fleet {text!r}: unknown device kind {match['kind']!r}; known: {listed}"
            raise ConfigError(msg)
        if ids.count(device_id) > 1:
            msg = f"fleet {text!r} lists {device_id} more than once; name each once"
            raise ConfigError(msg)
    return ids
