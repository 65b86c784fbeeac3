"""All stages of one epoch, each a Gloo group of its own, that end when told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from geartrain.collectives.exchange.exit_guard import end_at_exit, start_guarded
from geartrain.collectives.exchange.gloo_group import (
    GlooGroup,
    TransportSettings,
    build_group,
)
from geartrain.collectives.exchange.gloo_stage import GlooStage, first_line
from geartrain.collectives.exchange.membership import Membership
from geartrain.collectives.exchange.polling_store import PollingStore
from geartrain.errors import CommunicationError, ConfigError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


class Watcher(Protocol):
    """Whoever wants to know how an epoch goes."""

    def failed(self, reason: str, waited_for: tuple[int, ...]) -> None:
        """Hear of the first failure, before the sockets are cut.

        Args:
            reason: In words.
            waited_for: Positions of the members that were waited for.
        """

    def progressed(self) -> None:
        """Hear that a message or collective was done."""


class GlooTransport:
    """Satisfies ``Transport`` with a ``ProcessGroupGloo`` a stage.

    Args:
        store: Shared by all members, by a client on which nobody else waits for long.
            Keys lie under ``epoch/<n>/``.
        membership: Of this epoch.
        settings: Addresses and deadlines.
        watcher: Told the first failure and all progress.
    """

    def __init__(
        self,
        store: Store,
        membership: Membership,
        settings: TransportSettings | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self._store = store
        self._membership = membership
        self._settings = settings or TransportSettings()
        self._watcher = watcher
        self._changed = threading.Condition()
        self._stages: dict[str, GlooStage] = {}
        self._over: str | None = None
        self._ended = threading.Event()
        self._waits: dict[int, tuple[int, ...]] = {}
        end_at_exit(self)

    @property
    def epoch(self) -> int:
        """Number of this membership."""
        return self._membership.epoch

    @property
    def me(self) -> int:
        """This process's position."""
        return self._membership.me

    @property
    def num_members(self) -> int:
        """Processes that take part."""
        return self._membership.num_members

    @property
    def over(self) -> str | None:
        """Why this epoch is over; None while it is not."""
        return self._over

    def stage(
        self, name: str, members: Sequence[int], *, shares_links: bool = False
    ) -> GlooStage:
        """The stage of that name among these members, in this order; made once.

        All its members must ask for it; several threads may ask for several.

        Raises:
            CommunicationError: If it could not be made within the build deadline, or the
                epoch was aborted meanwhile.
            ConfigError: If this process is no member, or the stage has other members.
        """
        wanted = tuple(members)
        if self.me not in wanted or len(set(wanted)) != len(wanted):
            msg = f"stage {name}: members {wanted} must be distinct and hold {self.me}"
            raise ConfigError(msg)
        with self._changed:
            self._check()
            stage = self._stages.get(name)
            if stage is None:
                stage = GlooStage(self, name, wanted, shares_links=shares_links)
                self._stages[name] = stage
                # In a thread of its own, since Gloo can't be told to give up.
                start_guarded(
                    threading.Thread(
                        target=self._build, args=(stage,), name=f"build {name}", daemon=True
                    )
                )
        if stage.members != wanted:
            msg = f"stage {name} has the members {stage.members}, not {wanted}"
            raise ConfigError(msg)
        return self._built(stage)

    def abort(self, reason: str) -> None:
        """End this epoch: cut its sockets, which wakes those that wait on them.

        Who waits for a message that was half way is kept by Gloo until ``timeout_s``. Safe
        from any thread and at any time; the first reason stays.
        """
        with self._changed:
            if self._over is not None:
                return
            self._over = reason
            self._ended.set()
            groups = [group for stage in self._stages.values() if (group := stage.take())]
            self._changed.notify_all()
        for group in groups:
            group.cut()
        for group in groups:
            _drop(group)

    def close(self) -> None:
        """End this epoch since it isn't needed any more."""
        self.abort("it was closed here")

    def end_at_exit(self) -> None:
        """End it since the process ends."""
        self.abort("the process ends")

    def _build(self, stage: GlooStage) -> None:
        index, size = stage.members.index(self.me), len(stage.members)
        try:
            store = PollingStore(
                self._store,
                self.epoch,
                self._ended,
                self._settings.build_timeout_s,
                within=f"{stage.name}/",
            )
            group = build_group(store, index, size, self._settings)
            stage.tune(group)
        except (RuntimeError, ConnectionError, CommunicationError) as error:
            with self._changed:
                # Its traceback would keep the half-made group's sockets open.
                stage.error = error.with_traceback(None)
                self._changed.notify_all()
            return
        with self._changed:
            # Nobody waits for it any more where the epoch ended meanwhile.
            if self._over is None and stage.error is None:
                stage.group = group
                self._changed.notify_all()
                return
        group.cut()
        del group

    def _built(self, stage: GlooStage) -> GlooStage:
        deadline_at_s = time.monotonic() + self._settings.build_timeout_s
        with self._changed:
            self._changed.wait_for(
                lambda: stage.group or stage.error or self._over,
                max(0.0, deadline_at_s - time.monotonic()),
            )
            self._check()
            if stage.group is not None:
                return stage
            stage.error = stage.error or TimeoutError("deadline passed")
        others = tuple(member for member in stage.members if member != self.me)
        limit_s = self._settings.build_timeout_s
        msg = (
            f"epoch {self.epoch}: stage {stage.name} with {self.names(others)} could not "
            f"be made within {limit_s:g} s ({first_line(stage.error)}); do they run, and "
            f"is {self._settings.address} reachable from there?"
        )
        self.fail(msg, others)
        raise CommunicationError(msg) from stage.error

    def fail(self, reason: str, waited_for: tuple[int, ...]) -> None:
        """Report a failure once, then end the epoch."""
        if self._over is None and self._watcher is not None:
            self._watcher.failed(reason, waited_for)
        self.abort(reason)

    def notify(self) -> None:
        """Let those that wait look again."""
        with self._changed:
            self._changed.notify_all()

    def wait_for(self, is_done: Callable[[], bool]) -> bool:
        """Wait until something is done or the epoch is over; False after the deadline."""
        with self._changed:
            self._changed.wait_for(
                lambda: is_done() or self._over is not None, self.timeout_s
            )
            self._check()
            done: bool = is_done()
            return done

    def waited_for(self) -> tuple[int, ...]:
        """Positions of the members for whose messages somebody waits here now."""
        return tuple(sorted({m for waits in self._waits.copy().values() for m in waits}))

    @contextmanager
    def waiting(self, members: tuple[int, ...]) -> Iterator[None]:
        """Note for whom the calling thread waits."""
        thread_id = threading.get_ident()
        self._waits[thread_id] = members
        try:
            yield
        finally:
            del self._waits[thread_id]

    def progressed(self) -> None:
        """Count a message or collective that was done."""
        if self._watcher is not None:
            self._watcher.progressed()

    def check(self) -> None:
        """Raise a CommunicationError if the epoch is over."""
        with self._changed:
            self._check()

    def _check(self) -> None:
        if self._over is not None:
            raise CommunicationError(self.over_message())

    def over_message(self) -> str:
        """What to tell whoever waits in an epoch that ended."""
        return f"epoch {self.epoch} is over: {self._over}; nothing of it may be used"

    def names(self, members: tuple[int, ...]) -> str:
        """What to call some members."""
        return self._membership.names(members)

    @property
    def timeout_s(self) -> float:
        """Outer limit of one message or collective."""
        return self._settings.timeout_s


def _drop(group: GlooGroup) -> None:
    """Let a group go in a thread of its own: its destructor may wait for its threads."""
    start_guarded(threading.Thread(target=group.release, name="drop group", daemon=True))
