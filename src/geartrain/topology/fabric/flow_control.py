"""PFC, ECN, pause and ring sizes: some in sysfs, the rest from tools that only read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from geartrain.devices.interconnect.facts import AbsentFact
from geartrain.devices.interconnect.tools import AskTool, ToolAnswer
from geartrain.topology.fabric.facts import FlowControl
from geartrain.topology.fabric.small_files import read_int, read_text

NUM_PRIORITIES = 8
"""Of IEEE 802.1Q."""
_PFC_ROW = re.compile(r"^\s*enabled\s+((?:[01]\s+){7}[01])", re.MULTILINE)
_TRUST = re.compile(r"^Priority trust state:\s*(\w+)", re.MULTILINE)


def read_flow_control(
    interface: Path, ask: AskTool | None
) -> tuple[FlowControl, list[AbsentFact]]:
    """Read how a port keeps from losing frames.

    Args:
        interface: Its directory, ``/sys/class/net/NAME``.
        ask: Runs a tool; None where there is nothing to ask about.
    """
    name = interface.name
    trust = read_text(interface / "qos/trust")
    notification = _priorities(interface / "ecn/roce_np/enable")
    reaction = _priorities(interface / "ecn/roce_rp/enable")
    absent: list[AbsentFact] = []
    pfc: tuple[bool, ...] | None = None
    pause: tuple[bool | None, bool | None] = (None, None)
    if ask is not None:
        pfc, told_trust, pfc_absent = _ask_pfc(name, ask)
        trust = trust or told_trust
        pause, pause_absent = _ask_pause(name, ask)
        absent += [*pfc_absent, *pause_absent]
        if notification is None:
            why = f"the driver has no {interface / 'ecn/roce_np/enable'}"
            absent.append(AbsentFact(what=f"ECN of {name}", reason=why))
    flow = FlowControl(
        pfc=pfc,
        ecn_notification=notification,
        ecn_reaction=reaction,
        trust=trust,
        pause_receive=pause[0],
        pause_transmit=pause[1],
    )
    return flow, absent


def read_rings(
    name: str, ask: AskTool
) -> tuple[tuple[int | None, int | None], list[AbsentFact]]:
    """Read the receive ring's size and the largest possible one, in frames."""
    answer = ask(("ethtool", "--json", "-g", name))
    values = _first_object(answer)
    if values is None:
        return (None, None), [_absent(f"ring sizes of {name}", answer)]
    rings = (values.get("rx"), values.get("rx-max"))
    return (_int_or_none(rings[0]), _int_or_none(rings[1])), []


def parse_mlnx_qos(text: str) -> tuple[tuple[bool, ...] | None, str | None]:
    """Read PFC and trust from ``mlnx_qos -i NAME``.

    Returns:
        PFC by priority, and what the priority is taken from; None where not printed.
    """
    row, trust = _PFC_ROW.search(text), _TRUST.search(text)
    pfc = tuple(cell == "1" for cell in row[1].split()) if row else None
    return pfc, trust[1] if trust else None


def _ask_pfc(
    name: str, ask: AskTool
) -> tuple[tuple[bool, ...] | None, str | None, list[AbsentFact]]:
    mellanox = ask(("mlnx_qos", "-i", name))
    if mellanox.text is not None:
        pfc, trust = parse_mlnx_qos(mellanox.text)
        if pfc is not None:
            return pfc, trust, []
    dcb = ask(("dcb", "--json", "pfc", "show", "dev", name))
    values = _first_object(dcb)
    enabled = None if values is None else values.get("prio-pfc", values.get("prio_pfc"))
    pfc = _flags(enabled)
    if pfc is not None:
        return pfc, None, []
    reasons = [answer.reason or "unexpected output" for answer in (mellanox, dcb)]
    return None, None, [AbsentFact(what=f"PFC of {name}", reason="; ".join(reasons))]


def _ask_pause(
    name: str, ask: AskTool
) -> tuple[tuple[bool | None, bool | None], list[AbsentFact]]:
    answer = ask(("ethtool", "--json", "-a", name))
    values = _first_object(answer)
    if values is None:
        return (None, None), [_absent(f"pause of {name}", answer)]
    return (_bool_or_none(values.get("rx")), _bool_or_none(values.get("tx"))), []


def _flags(values: Any) -> tuple[bool, ...] | None:  # Any: JSON of a tool
    if isinstance(values, dict):  # {"0": "on", ...} of some versions of dcb
        values = [values.get(str(priority)) for priority in range(NUM_PRIORITIES)]
    if not isinstance(values, Sequence) or len(values) != NUM_PRIORITIES:
        return None
    return tuple(value in {True, "on"} for value in values)


def _priorities(directory: Path) -> tuple[bool, ...] | None:
    values = [read_int(directory / str(priority)) for priority in range(NUM_PRIORITIES)]
    if all(value is None for value in values):
        return None
    return tuple(value == 1 for value in values)


def _first_object(answer: ToolAnswer) -> dict[str, Any] | None:  # Any: JSON of a tool
    if answer.text is None:
        return None
    try:
        found = json.loads(answer.text)
    except json.JSONDecodeError:
        return None
    if isinstance(found, list) and found:
        found = found[0]
    return found if isinstance(found, dict) else None


def _absent(what: str, answer: ToolAnswer) -> AbsentFact:
    return AbsentFact(what=what, reason=answer.reason or "the tool's output is unexpected")


def _int_or_none(value: Any) -> int | None:  # Any: JSON of a tool
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _bool_or_none(value: Any) -> bool | None:  # Any: JSON of a tool
    return value if isinstance(value, bool) else None
