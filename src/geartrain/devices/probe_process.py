"""A process that lists or measures devices: ``python -m geartrain.devices.probe_process``.

Probing has a process of its own so that the caller never imports torch, never holds
an accelerator's context, and survives a driver that crashes; an emulated device
needs one anyway, to be throttled. It reads requests and writes replies, a JSON line
each, and ends when its input does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from dataclasses import dataclass, field
from typing import IO, Literal

import msgspec

from geartrain.devices.adapter import Progress
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
    # What a vendor's library prints must not end up between the replies.
    with os.fdopen(os.dup(1), "wb", buffering=0) as replies:
        os.dup2(2, 1)
        with contextlib.suppress(BrokenPipeError):  # the caller is gone: end
            for line in sys.stdin.buffer:
                _answer_line(line, replies)


def _answer_line(line: bytes, replies: IO[bytes]) -> None:
    def reply(answer: ProbeReply) -> None:
        replies.write(msgspec.json.encode(answer) + b"\n")

    def tell(what: str) -> None:
        reply(ProbeReply(kind="progress", message=what))

    try:
        request = msgspec.json.decode(line, type=ProbeRequest)
        reply(ProbeReply(kind="done", profiles=_answer(request, tell)))
    except GeartrainError as error:
        reply(ProbeReply(kind="failed", message=str(error)))


def _answer(request: ProbeRequest, tell: Progress) -> tuple[DeviceProfile, ...]:
    if request.action == "prepare":
        import torch  # noqa: PLC0415 - listing the cpu alone needs none

        torch.set_num_threads(1)
        return ()
    if request.action == "list":
        return _list_all()
    return tuple(_measure(i, request.emulated, tell) for i in request.device_ids)


def _measure(
    device_id: str, emulated: DeviceProfile | None, tell: Progress
) -> DeviceProfile:
    found = adapter_for(device_id).probe(
        device_id, lambda what: tell(f"{device_id}: {what}")
    )
    if emulated is None:
        return found
    return dataclasses.replace(
        emulated,
        flop_per_s=found.flop_per_s,
        memory_bytes_per_s=found.memory_bytes_per_s,
        measured_at_s=found.measured_at_s,
    )


def _list_all() -> tuple[DeviceProfile, ...]:
    found: list[DeviceProfile] = []
    for adapter in load_adapters().values():
        if adapter.kind != "emulated" and adapter.is_available():
            found += adapter.list_devices()
    # Accelerators first: the CPU is rarely the fastest.
    return tuple(sorted(found, key=lambda device: device.kind == "cpu"))


if __name__ == "__main__":
    main()
