"""Measured profiles kept between runs, each under its fingerprint."""

from __future__ import annotations

import logging
from pathlib import Path

import platformdirs

from geartrain.devices.profile import DeviceProfile
from geartrain.errors import ConfigError
from geartrain.telemetry.documents import read_document, write_document

logger = logging.getLogger(__name__)


class ProbeCache:
    """One file a profile.

    Args:
        directory: Where; None takes the user's cache directory.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory or platformdirs.user_cache_path("geartrain") / "probes"

    def find(self, listed: DeviceProfile) -> DeviceProfile | None:
        """Find the measured profile of a device as it is now listed.

        A file that can't be read counts as absent: the probe will replace it.
        """
        path = self._path(listed)
        if not listed.fingerprint or not path.exists():
            return None
        try:
            found = read_document(path, DeviceProfile)
        except ConfigError as error:
            logger.warning("probing %s again: %s", listed.device_id, error)
            return None
        same = (found.fingerprint, found.device_id) == (
            listed.fingerprint,
            listed.device_id,
        )
        return found if same else None

    def keep(self, measured: DeviceProfile) -> None:
        """Write a measured profile; a full or read-only disk is not an error."""
        if not measured.fingerprint or not measured.flop_per_s:
            return
        try:
            write_document(self._path(measured), measured)
        except ConfigError as error:
            logger.warning("the probe of %s is not cached: %s", measured.device_id, error)

    def _path(self, device: DeviceProfile) -> Path:
        name = f"{device.device_id.replace(':', '-')}-{device.fingerprint}.json"
        return self._directory / name
