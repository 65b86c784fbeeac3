"""Finding adapters by the entry point group ``geartrain.devices``."""

from __future__ import annotations

import logging
from importlib.metadata import EntryPoint, entry_points

from geartrain.devices.adapter import DeviceAdapter
from geartrain.errors import ConfigError

logger = logging.getLogger(__name__)

GROUP = "geartrain.devices"


def adapter_kinds() -> tuple[str, ...]:
    """Kinds that have an adapter, working or not."""
    return tuple(sorted({entry.name for entry in entry_points(group=GROUP)}))


def load_adapter(kind: str) -> DeviceAdapter:
    """Load one adapter.

    Raises:
        ConfigError: If the kind is unknown or its adapter is broken.
    """
    entries = {entry.name: entry for entry in entry_points(group=GROUP)}
    if kind not in entries:
        known = ", ".join(sorted(entries)) or "none; reinstall geartrain"
        msg = f"no adapter for the device kind {kind!r}; known are {known}"
        raise ConfigError(msg)
    adapter = _load(entries[kind])
    if adapter is None:
        msg = f"the adapter {entries[kind].value} of {kind!r} is broken; see the warning"
        raise ConfigError(msg)
    return adapter


def adapter_for(device_id: str) -> DeviceAdapter:
    """Load the adapter of a device.

    Raises:
        ConfigError: If the device's kind is unknown or its adapter is broken.
    """
    return load_adapter(device_id.partition(":")[0])


def load_adapters() -> dict[str, DeviceAdapter]:
    """Load all adapters that can be loaded, by kind.

    A broken one, which may be anybody's, is passed over with a warning.
    """
    loaded = {
        entry.name: _load(entry)
        for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name)
    }
    return {kind: adapter for kind, adapter in loaded.items() if adapter is not None}


def _load(entry: EntryPoint) -> DeviceAdapter | None:
    try:
        adapter = entry.load()()
    except Exception as error:  # noqa: BLE001 - whatever third-party code raises
        logger.warning(
            "device adapter %s (%s) is passed over: %s: %s",
            entry.name,
            entry.value,
            type(error).__name__,
            error,
        )
        return None
    if not isinstance(adapter, DeviceAdapter):
        logger.warning(
            "device adapter %s (%s) is passed over: it lacks methods of DeviceAdapter",
            entry.name,
            entry.value,
        )
        return None
    return adapter
