"""A process that lists or measures devices: ``python -m geartrain.devices.probe_process``.

Probing has a process of its own so that the caller never imports torch, never holds
an accelerator's context, and survives a driver that crashes; an emulated device
needs one anyway, to be throttled. It reads requests and writes replies, a JSON line
each, and ends when its input does.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from geartrain.devices.adapter import DeviceAdapter
from geartrain.devices.profile import DeviceProfile
from geartrain.devices.registry import adapter_for, load_adapters
from geartrain.errors import GeartrainError


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """What the process is asked for."""

    action: Literal["prepare", "list", "probe"]
    """prepare: import torch, so that a throttle attached next slows only the probe."""
    device_ids: tuple[str, ...] = ()
    emulated: DeviceProfile | None = None
    """The emulated device that this process stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReply:
    """Progress, or the last line of a request's answer."""

    kind: Literal["progress", "done", "failed"]
    message: str = ""
    profiles: tuple[DeviceProfile, ...] = field(default_factory=tuple)


def main() -> None:
    """Answer requests until the input ends."""
    for line in sys.stdin.buffer:
        try:
            request = msgspec.json.decode(line, type=ProbeRequest)
            _reply(ProbeReply(kind="done", profiles=_answer(request)))
        except GeartrainError as error:
            _reply(ProbeReply(kind="failed", message=str(error)))


def _answer(request: ProbeRequest) -> tuple[DeviceProfile, ...]:
    if request.action == "prepare":
        import torch  # noqa: PLC0415 - listing the cpu alone needs none

        torch.set_num_threads(1)
        return ()
    if request.action == "list":
        return _list_all()
    return tuple(_measure(i, request.emulated) for i in request.device_ids)


def _measure(device_id: str, emulated: DeviceProfile | None) -> DeviceProfile:
    def tell(what: str) -> None:
        _reply(ProbeReply(kind="progress", message=f"{device_id}: {what}"))

    return _adapter(device_id, emulated).probe(device_id, tell)


def _list_all() -> tuple[DeviceProfile, ...]:
    found: list[DeviceProfile] = []
    for adapter in load_adapters().values():
        if adapter.kind != "emulated" and adapter.is_available():
            found += adapter.list_devices()
    # Accelerators first: the CPU is rarely the fastest.
    return tuple(sorted(found, key=lambda device: device.kind == "cpu"))


def _adapter(device_id: str, emulated: DeviceProfile | None) -> DeviceAdapter:
    if emulated is None:
        return adapter_for(device_id)
    from geartrain.devices.adapters.emulated import (  # noqa: PLC0415 - this kind only
        EmulatedAdapter,
    )

    return EmulatedAdapter([emulated])


def _reply(reply: ProbeReply) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
