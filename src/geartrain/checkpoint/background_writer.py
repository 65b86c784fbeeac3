"""Write frozen states tier by tier, beside training.

Each tier has a thread of its own, so that a store that hangs delays no other. A tier
writes one state at a time and keeps the newest one that waits; what is held is
bounded by ``max_states``, and whoever lent a buffer is told when it is free again.

A store that fails is tried again, later and later, until the deadline of the save is
over or a newer state waits. The user is told when it fails first and when it works
again, not each time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Generic

from geartrain.checkpoint.save_attempt import (
    SaveAttempt,
    State,
    TierStatus,
    TierTarget,
    WriterLimits,
)
from geartrain.errors import ConfigError
from geartrain.units import format_seconds

logger = logging.getLogger(__name__)

_CLOSE_S = 5.0


@dataclass(slots=True, eq=False)
class _Held(Generic[State]):
    """A state, and the tiers that still need it."""

    state: State
    step: int
    tiers: set[str]


@dataclass(slots=True)
class _TierState(Generic[State]):
    target: TierTarget[State]
    status: TierStatus
    waiting: _Held[State] | None = None
    writing: _Held[State] | None = None
    end_clock_s: float = 0.0
    was_told_late: bool = False
    thread: threading.Thread | None = None


class BackgroundWriter(Generic[State]):
    """Takes frozen states and writes them; see the module."""

    def __init__(
        self,
        targets: Sequence[TierTarget[State]],
        *,
        limits: WriterLimits | None = None,
        on_release: Callable[[State], None] | None = None,
    ) -> None:
        """Start nothing yet; threads start with the first state.

        Args:
            targets: The tiers, each with a name of its own.
            limits: How long and how much.
            on_release: Called, from any thread, once no tier needs a state any more.

        Raises:
            ConfigError: If two tiers have one name.
        """
        if len({target.tier for target in targets}) != len(targets):
            names = ", ".join(target.tier for target in targets)
            msg = f"the tiers {names} must have names of their own; rename one"
            raise ConfigError(msg)
        self._limits = limits or WriterLimits()
        self._on_release = on_release
        self._changed = threading.Condition()
        self._is_closing = False
        self._tiers = {
            target.tier: _TierState[State](
                target=target, status=TierStatus(tier=target.tier, place=target.place)
            )
            for target in targets
        }

    def offer(self, state: State, *, step: int, tiers: Iterable[str]) -> tuple[str, ...]:
        """Hand over a state that nobody changes any more; returns at once.

        Args:
            state: What the tiers' functions take.
            step: Of the state.
            tiers: Which tiers to write it to.

        Returns:
            The tiers that took it. The others still write a state, and ``max_states``
            are held already; the state is released at once where none took it.

        Raises:
            ConfigError: If there is no such tier, or the writer was closed.
        """
        wanted = self._check(tiers)
        released: list[_Held[State]] = []
        with self._changed:
            held = _Held(state=state, step=step, tiers=set(wanted))
            taken = self._enqueue(held, released)
            self._tell_late()
            self._changed.notify_all()
        self._release(released)
        return taken

    def status(self) -> tuple[TierStatus, ...]:
        """Say how each tier is doing, in the order in which they were given."""
        with self._changed:
            self._tell_late()
            return tuple(_show(tier) for tier in self._tiers.values())

    def wait(self, timeout_s: float) -> bool:
        """Wait until all that was taken is written or given up; False if time is over."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout_s)

    def close(self, timeout_s: float = _CLOSE_S) -> bool:
        """Give up what is being written, between two objects; call ``wait`` before.

        Returns:
            False if a store still hangs; its thread ends with the process.
        """
        end_s = time.monotonic() + timeout_s
        released: list[_Held[State]] = []
        with self._changed:
            self._is_closing = True
            for tier in self._tiers.values():
                self._drop_waiting(tier, released)
            self._changed.notify_all()
            threads = [tier.thread for tier in self._tiers.values() if tier.thread]
        self._release(released)
        for thread in threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _check(self, tiers: Iterable[str]) -> tuple[str, ...]:
        wanted = tuple(dict.fromkeys(tiers))
        unknown = [name for name in wanted if name not in self._tiers]
        if unknown:
            msg = f"there is no tier {unknown[0]!r}; there are {', '.join(self._tiers)}"
            raise ConfigError(msg)
        if self._is_closing:
            msg = "this writer was closed; make a new one"
            raise ConfigError(msg)
        return wanted

    def _enqueue(self, held: _Held[State], released: list[_Held[State]]) -> tuple[str, ...]:
        for name in held.tiers:  # the newest one takes the place of one that waits
            self._drop_waiting(self._tiers[name], released)
        if len(self._all_held()) >= self._limits.max_states:
            for tier in self._tiers.values():
                self._drop_waiting(tier, released)
        if not held.tiers or len(self._all_held()) >= self._limits.max_states:
            for name in held.tiers:
                self._count_skipped(self._tiers[name])
            held.tiers.clear()
            released.append(held)
            return ()
        for name in held.tiers:
            tier = self._tiers[name]
            tier.waiting = held
            if tier.thread is None:
                tier.thread = threading.Thread(
                    target=self._run, args=(tier,), name=f"save-{name}", daemon=True
                )
                tier.thread.start()
        return tuple(name for name in self._tiers if name in held.tiers)

    def _all_held(self) -> set[int]:
        held = [
            one
            for tier in self._tiers.values()
            for one in (tier.waiting, tier.writing)
            if one is not None
        ]
        return {id(one) for one in held}

    def _drop_waiting(self, tier: _TierState[State], released: list[_Held[State]]) -> None:
        held, tier.waiting = tier.waiting, None
        if held is None:
            return
        self._count_skipped(tier)
        held.tiers.discard(tier.target.tier)
        if not held.tiers:
            released.append(held)

    def _count_skipped(self, tier: _TierState[State]) -> None:
        tier.status = replace(tier.status, num_skipped=tier.status.num_skipped + 1)

    def _release(self, released: Sequence[_Held[State]]) -> None:
        if self._on_release is None:
            return
        for held in released:
            try:
                self._on_release(held.state)
            except Exception:  # a tier's thread must outlive it
                logger.exception(
                    "what is to follow the release of step %s failed", held.step
                )

    def _is_idle(self) -> bool:
        return not self._all_held()

    def _run(self, tier: _TierState[State]) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or tier.waiting)
                held, tier.waiting = tier.waiting, None
                if held is None:
                    return
                tier.writing = held
                tier.end_clock_s = time.monotonic() + self._limits.deadline_s
                tier.was_told_late = False
                tier.status = replace(
                    tier.status, writing_step=held.step, writing_since_s=time.time()
                )
            try:
                self._write(tier, held)
            finally:
                self._finish(tier, held)

    def _finish(self, tier: _TierState[State], held: _Held[State]) -> None:
        with self._changed:
            held.tiers.discard(tier.target.tier)
            is_free = not held.tiers
        if is_free:  # before anybody is told that nothing is held any more
            self._release([held])
        with self._changed:
            tier.writing = None
            tier.status = replace(tier.status, writing_step=None, writing_since_s=None)
            self._changed.notify_all()

    def _write(self, tier: _TierState[State], held: _Held[State]) -> None:
        """Try until it works, the deadline is over, a newer state waits, or the end."""
        attempt = SaveAttempt(tier.end_clock_s, self._end_reason)
        pause_s = self._limits.first_pause_s
        begun_s = time.monotonic()
        while True:
            try:
                tier.target.write(held.state, attempt)
            except BaseException as error:  # noqa: BLE001 - torch's own is no Exception
                self._note_failure(tier, held, error)
            else:
                self._note_success(tier, held, time.monotonic() - begun_s)
                return
            with self._changed:
                left_s = tier.end_clock_s - time.monotonic()
                self._changed.wait_for(
                    lambda: self._is_closing or tier.waiting, min(pause_s, max(left_s, 0.0))
                )
                is_over = time.monotonic() >= tier.end_clock_s
                if self._is_closing or tier.waiting or is_over:
                    self._count_skipped(tier)
                    return
            pause_s = min(2 * pause_s, self._limits.longest_pause_s)

    def _end_reason(self) -> str | None:
        return "training ends" if self._is_closing else None

    def _note_failure(
        self, tier: _TierState[State], held: _Held[State], error: BaseException
    ) -> None:
        described = str(error) or type(error).__name__
        with self._changed:
            was_failing = tier.status.is_failing
            tier.status = replace(
                tier.status,
                is_failing=True,
                last_error=described,
                failed_at_s=time.time(),
                num_failed_tries=tier.status.num_failed_tries + 1,
            )
            is_closing = self._is_closing
        if not was_failing and not is_closing:
            logger.warning(
                "step %s could not be saved to %s (%s): %s; training goes on, and it is "
                "tried again",
                held.step,
                tier.target.place,
                tier.target.tier,
                described,
            )

    def _note_success(
        self, tier: _TierState[State], held: _Held[State], save_s: float
    ) -> None:
        with self._changed:
            was_failing = tier.status.is_failing or tier.was_told_late
            tier.status = replace(
                tier.status,
                is_failing=False,
                saved_step=held.step,
                saved_at_s=time.time(),
                save_s=save_s,
                num_saved=tier.status.num_saved + 1,
            )
        if was_failing:
            logger.warning(
                "step %s was saved to %s (%s): the store works again",
                held.step,
                tier.target.place,
                tier.target.tier,
            )

    def _tell_late(self) -> None:
        """Tell of a store that hangs: its own thread cannot. The lock is held."""
        for tier in self._tiers.values():
            if tier.writing is None or tier.was_told_late:
                continue
            late_s = time.monotonic() - tier.end_clock_s
            if late_s <= 0:
                continue
            tier.was_told_late = True
            logger.warning(
                "saving step %s to %s (%s) has not ended %s after its deadline: the store "
                "does not answer; training goes on without saves to it until it does",
                tier.writing.step,
                tier.target.place,
                tier.target.tier,
                format_seconds(late_s),
            )


def _show(tier: _TierState[State]) -> TierStatus:
    waiting = None if tier.waiting is None else tier.waiting.step
    return replace(tier.status, waiting_step=waiting)
