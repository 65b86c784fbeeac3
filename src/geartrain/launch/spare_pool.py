"""Processes kept warm for the workers of a run that are started again or added later."""

from __future__ import annotations

import dataclasses
import logging
import socket
import time
from collections.abc import Callable, Sequence

from geartrain.launch.settings import LaunchSettings
from geartrain.launch.spares import Output, Spares, WorkerOrder, spares_for, start_cold
from geartrain.launch.started_worker import StartedWorker

logger = logging.getLogger(__name__)

LOG_NAME = "spares.log"

_START_S = 2.0
"""How long a warm process may take, before it is a cold start."""
_WARM_UP_S = 15.0
"""How long starts wait for a warm process, which would end sooner than a cold start."""


class SparePool:
    """Warm processes from the moment on when somebody could need them.

    Nothing is warmed up while the workers start: that would only slow them down, and a
    run that ends before it trains needs no spares.

    Args:
        settings: Of the run.
    """

    def __init__(self, settings: LaunchSettings) -> None:
        self._settings = settings
        self._spares: Spares | None = None
        self._began_at_s = 0.0
        self._has_given_up = False

    def begin(self) -> None:
        """Warm up what a run of such devices needs; again does nothing."""
        is_unwanted = self._has_given_up or not self._settings.warm_spares
        if self._spares is not None or is_unwanted:
            return
        settings = self._settings
        kinds = [device.kind for device in settings.fleet.devices]
        self._began_at_s = time.monotonic()
        wanted = dataclasses.replace(
            spares_for(kinds, settings.preload),
            emulated_hosts=settings.links is not None,
            log_path=settings.run_dir / LOG_NAME,
        )
        try:
            self._spares = Spares(wanted)
        except OSError as error:  # such as a full disk
            logger.warning("no process is kept warm, starts take longer: %s", error)
            self._has_given_up = True

    def poll(self) -> None:
        """Look after them."""
        if self._spares is not None:
            self._spares.poll()

    @property
    def is_warming_up(self) -> bool:
        """Whether it is better to wait for the first warm process than to start cold."""
        if self._spares is None or time.monotonic() > self._began_at_s + _WARM_UP_S:
            return False
        return not self._spares.can_fork and not self._spares.num_waiting

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of the warm processes."""
        return () if self._spares is None else self._spares.process_ids

    def start(
        self,
        order: WorkerOrder,
        channel: socket.socket,
        outputs: tuple[Output, Output],
        *,
        place: Callable[[Sequence[str]], Sequence[str]] = list,
    ) -> StartedWorker:
        """Start a worker as fast as possible; arguments as of ``Spares.start``."""
        if self._spares is None:
            preload = self._settings.preload
            return start_cold(order, preload, channel, outputs, place=place)
        return self._spares.start(order, channel, outputs, place=place, within_s=_START_S)

    def close(self) -> None:
        """End them. Forked workers end with them: end those before."""
        if self._spares is not None:
            self._spares.close()
