"""NVLink, as NVML tells it through ``pynvml`` (PyPI: nvidia-ml-py), where installed."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from geartrain.devices.interconnect.facts import AbsentFact, DeviceLink, InterconnectFacts

_BYTES_PER_S = {1: 20e9, 2: 25e9, 3: 25e9, 4: 25e9, 5: 50e9}
"""One link, one direction, by NVLink version. Source: NVIDIA's data sheets of P100 (4
links, 160 GB/s both ways), V100 (6, 300), A100 (12, 600), H100 (18, 900), B200 (18, 1800).
"""
_MAX_LINKS = 18
"""Of a GPU so far; NVML says so where it knows a newer one."""

Nvml = Any  # Any: the pynvml module, or a fake with its names
Handle = Any  # Any: NVML's opaque pointer


def read_nvlink(nvml: Nvml | None = None) -> InterconnectFacts:
    """Read the state of all NVLinks.

    Args:
        nvml: The ``pynvml`` module; None imports it.

    Returns:
        A record a pair of devices (or device and switch); absence with its reason.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            return _absent("pynvml is not installed (pip install nvidia-ml-py)")
    try:
        nvml.nvmlInit()
    except Exception as error:  # noqa: BLE001 - NVML's errors have no common public base
        return _absent(f"NVML does not start: {error}")
    try:
        links = [
            link
            for index in range(nvml.nvmlDeviceGetCount())
            for link in _read_device(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
        ]
    except Exception as error:  # noqa: BLE001 - as above
        return _absent(f"NVML: {error}")
    finally:
        nvml.nvmlShutdown()
    if not links:
        return _absent("NVML finds no NVLink on these GPUs")
    return InterconnectFacts(links=tuple(links))


def _absent(reason: str) -> InterconnectFacts:
    return InterconnectFacts(absent=(AbsentFact(what="NVLink", reason=reason),))


def _read_device(nvml: Nvml, handle: Handle) -> Iterator[DeviceLink]:
    source = _pci_address(nvml.nvmlDeviceGetPciInfo(handle).busId)
    states: dict[str, list[bool]] = {}
    versions: dict[str, int] = {}
    for link in range(getattr(nvml, "NVML_NVLINK_MAX_LINKS", _MAX_LINKS)):
        active = _ask(nvml, nvml.nvmlDeviceGetNvLinkState, handle, link)
        if active is None:
            continue  # the GPU has no link of this number
        target = _remote(nvml, handle, link) if active else "unknown"
        states.setdefault(target, []).append(bool(active))
        version = _ask(nvml, nvml.nvmlDeviceGetNvLinkVersion, handle, link)
        if version is not None:
            versions[target] = int(version)
    for target, actives in states.items():
        version = versions.get(target)
        rate = _BYTES_PER_S.get(version) if version is not None else None
        yield DeviceLink(
            source=source,
            target=target,
            kind="nvlink",
            num_links=len(actives),
            num_active=sum(actives),
            version=None if version is None else str(version),
            bytes_per_s=rate * sum(actives) if rate and any(actives) else None,
            read_from="NVML, rate from the version's data sheet",
        )


def _remote(nvml: Nvml, handle: Handle, link: int) -> str:
    kind = _ask(nvml, nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link)
    if kind is not None and kind == getattr(nvml, "NVML_NVLINK_DEVICE_TYPE_SWITCH", 2):
        return "switch"
    info = _ask(nvml, nvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)
    return "unknown" if info is None else _pci_address(info.busId)


def _ask(nvml: Nvml, question: Any, *arguments: Any) -> Any | None:  # Any: NVML's values
    """Ask NVML; None where the hardware has no answer."""
    try:
        return question(*arguments)
    except nvml.NVMLError:
        return None


def _pci_address(bus_id: bytes | str) -> str:
    """Shorten NVML's eight digits of domain to sysfs's four.

    >>> _pci_address(b"00000000:17:00.0")
    '0000:17:00.0'
    """
    text = bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id)
    domain, _, rest = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{rest}"
