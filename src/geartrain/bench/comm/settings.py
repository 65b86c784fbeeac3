"""What ``geartrain bench comm`` is asked for, and the labs it comes to. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace

from geartrain.bench.comm.messages import (
    BEST_RING,
    GIVEN_RING,
    OURS,
    OURS_INT4,
    OURS_INT8,
    STOCK,
)
from geartrain.bench.comm.rank_order import DEFAULT_SEED
from geartrain.devices.emulation.network import NetworkSpec, parse_links
from geartrain.errors import ConfigError
from geartrain.units import format_bits_per_s

FULL_BYTES = 25_000_000
QUICK_BYTES = 4_000_000
SMALL_BYTES = 64 * 1024
NIC = "500Mbit"
UPLINK = "50Mbit"
_FLAT_NIC = "100Mbit"
"""Slower than in racks: eight NICs at 500 Mbit/s would measure the processors."""
_SLOW = 4.0
_SLOW_HOST = 5
_SLOW_RACK = 2
_NUM_HOSTS = 8
_MAX_HOSTS = 32
"""A process each, on one machine."""
_VALUES_A_CUT = 256
_FLOAT32_BYTES = 4

LAB_CASES = (
    "racks2",
    "racks2_int8",
    "racks2_int4",
    "small_64k",
    "racks4",
    "slow_host",
    "slow_uplink",
    "flat",
)
"""Those that a lab of their own or a shared one measures."""
CASES = (*LAB_CASES, "same_host", "overlap", "link_drop")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommOptions:
    """What the user asks for."""

    racks: str | None = None
    """Such as ``3+5``, ``4x2`` or ``3``: only a lab of these racks. None: all cases."""
    uplink: str | None = None
    nic: str | None = None
    seed: int = DEFAULT_SEED
    num_bytes: int | None = None
    """Of the large tensors; None: 25 MB, or 4 MB with ``quick``."""
    only: tuple[str, ...] = ()
    quick: bool = False

    def __post_init__(self) -> None:
        if self.num_bytes is not None and self.num_bytes < SMALL_BYTES:
            msg = f"tensors of {self.num_bytes} bytes are too small; give 64 KiB or more"
            raise ConfigError(msg)

    @property
    def size_bytes(self) -> int:
        """Of the large tensors."""
        return self.num_bytes or (QUICK_BYTES if self.quick else FULL_BYTES)

    @property
    def is_default_lab(self) -> bool:
        """Whether rates and sizes are those that the targets are for."""
        return self.uplink is None and self.nic is None and self.size_bytes == FULL_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class LabSetup:
    """One lab and what is measured in it."""

    name: str
    spec: NetworkSpec
    links: str
    """The same as text."""
    cases: tuple[str, ...]
    """Which of the result's cases come of it."""
    schemes: tuple[str, ...]
    """In every round, in turn."""
    once: tuple[str, ...] = ()
    """In the first round only: what takes longest, to be seen and not to be judged by."""
    num_bytes: int
    rounds: int
    measures_small: bool = False

    def schemes_of(self, round_index: int) -> tuple[str, ...]:
        """What is measured in a round; every other one goes backwards."""
        schemes = self.schemes + (self.once if round_index == 0 else ())
        return schemes if round_index % 2 == 0 else schemes[::-1]


def cases_of(options: CommOptions) -> tuple[str, ...]:
    """The cases that the options ask for, in order.

    Raises:
        ConfigError: If there is no such case.

    >>> cases_of(CommOptions(racks="1+1+1"))
    ('racks3', 'racks3_int8', 'racks3_int4', 'small_64k')
    """
    known: tuple[str, ...] = CASES
    if options.racks is not None:
        known = _racks_cases(len(parse_links(_links(options)).racks))
    unknown = sorted(set(options.only) - set(known))
    if unknown:
        msg = f"no case {', '.join(unknown)}; expected some of {', '.join(known)}"
        raise ConfigError(msg)
    if options.quick and not options.only:
        return known[:1]
    return tuple(case for case in known if not options.only or case in options.only)


def labs_of(options: CommOptions) -> tuple[LabSetup, ...]:
    """The labs that the asked cases need.

    Raises:
        ConfigError: If the racks or rates can't be read, or there are too many hosts.
    """
    wanted = set(cases_of(options))
    if options.racks is not None:
        labs = [_racks_lab(options, _links(options))]
    else:
        nic, uplink = options.nic or NIC, options.uplink or UPLINK
        labs = [
            _racks_lab(options, f"2x4:{nic}:{uplink}"),
            _racks_lab(options, f"4x2:{nic}:{uplink}"),
            _slow_host_lab(options),
            _slow_uplink_lab(options, nic, uplink),
            _flat_lab(options),
        ]
    return tuple(_only(lab, wanted) for lab in labs if wanted & set(lab.cases))


def whole_values(num_bytes: int, num_hosts: int) -> int:
    """The next smaller size that every scheme can cut evenly.

    >>> whole_values(100_000, 8)
    98304
    """
    step = num_hosts * _VALUES_A_CUT * _FLOAT32_BYTES
    return max(step, num_bytes - num_bytes % step)


def _only(lab: LabSetup, wanted: set[str]) -> LabSetup:
    """The lab without the schemes that no wanted case needs."""
    cases = tuple(case for case in lab.cases if case in wanted)
    coded = {OURS_INT8: f"{lab.name}_int8", OURS_INT4: f"{lab.name}_int4"}
    large = [case for case in cases if case != "small_64k"]
    schemes = tuple(s for s in lab.schemes if coded.get(s, lab.name) in {*cases, lab.name})
    if not large:
        return replace(lab, cases=cases, schemes=(), once=(), rounds=0)
    return replace(lab, cases=cases, schemes=schemes)


def _racks_cases(num_racks: int) -> tuple[str, ...]:
    name = f"racks{num_racks}"
    return (name, f"{name}_int8", f"{name}_int4", "small_64k")


def _racks_lab(options: CommOptions, links: str) -> LabSetup:
    spec = parse_links(links)
    name = f"racks{len(spec.racks)}"
    is_whole = name == "racks2" or options.racks is not None
    cases = _racks_cases(len(spec.racks)) if is_whole else (name,)
    once: tuple[str, ...] = ()
    if not options.quick:
        has_equal_racks = len({len(rack) for rack in spec.racks}) == 1
        once = (GIVEN_RING, STOCK) if has_equal_racks else (GIVEN_RING,)
    return LabSetup(
        name=name,
        spec=spec,
        links=links,
        cases=cases,
        schemes=(BEST_RING, OURS, *((OURS_INT8, OURS_INT4) if is_whole else ())),
        once=once,
        num_bytes=whole_values(options.size_bytes, spec.num_hosts),
        rounds=2 if options.quick else 3,
        measures_small=is_whole and (not options.quick or "small_64k" in options.only),
    )


def _slow_host_lab(options: CommOptions) -> LabSetup:
    rates = [options.nic or _FLAT_NIC] * _NUM_HOSTS
    rates[_SLOW_HOST] = _slower(rates[_SLOW_HOST])
    return _one_rack_lab(options, "slow_host", rates, rounds=2)


def _flat_lab(options: CommOptions) -> LabSetup:
    rates = [options.nic or _FLAT_NIC] * _NUM_HOSTS
    return _one_rack_lab(options, "flat", rates, rounds=5)


def _one_rack_lab(
    options: CommOptions, name: str, rates: list[str], *, rounds: int
) -> LabSetup:
    links = ",".join(rates)
    return LabSetup(
        name=name,
        spec=parse_links(links),
        links=links,
        cases=(name,),
        schemes=(BEST_RING, OURS),
        num_bytes=whole_values(options.size_bytes, _NUM_HOSTS),
        rounds=rounds,
    )


def _slow_uplink_lab(options: CommOptions, nic: str, uplink: str) -> LabSetup:
    rates = [uplink] * 4
    rates[_SLOW_RACK] = _slower(uplink)
    links = f"4x2:{nic}:{','.join(rates)}"
    return LabSetup(
        name="slow_uplink",
        spec=parse_links(links),
        links=links,
        cases=("slow_uplink",),
        schemes=(BEST_RING, OURS),
        num_bytes=whole_values(options.size_bytes, _NUM_HOSTS),
        rounds=2,
    )


def _slower(rate: str) -> str:
    host = parse_links(rate, 1).hosts[0]
    return format_bits_per_s(host.slower_bytes_per_s / _SLOW)


def _links(options: CommOptions) -> str:
    """A lab's text from ``--racks``, ``--nic`` and ``--uplink``."""
    racks = options.racks or "2x4"
    if racks.isdigit() and 0 < int(racks) <= _NUM_HOSTS:
        count = int(racks)
        sizes = [_NUM_HOSTS // count + (i < _NUM_HOSTS % count) for i in range(count)]
        racks = "+".join(map(str, sizes)) if count > 1 else "1x8"
    links = f"{racks}:{options.nic or NIC}:{options.uplink or UPLINK}"
    spec = parse_links(links)
    if not 1 < spec.num_hosts <= _MAX_HOSTS:
        msg = (
            f"--racks {options.racks} makes {spec.num_hosts} hosts, each a process on this "
            f"machine; give 2 to {_MAX_HOSTS}"
        )
        raise ConfigError(msg)
    return links
