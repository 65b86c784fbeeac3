"""The stage groups that a schedule's messages take, and waiting for them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from geartrain.collectives.exchange.routes import Place
from geartrain.errors import CommunicationError, ConfigError
from geartrain.planner.exchange.schedule import CommSchedule

if TYPE_CHECKING:
    from geartrain.collectives.exchange.protocol import Handle, StageGroup, Transport

RACK_IN, ACROSS_OUT, ACROSS_BACK, RACK_OUT, RING = (
    "rack-in",
    "across-out",
    "across-back",
    "rack-out",
    "ring",
)
_SHARE_UPLINKS = (ACROSS_OUT, ACROSS_BACK)


@dataclass(frozen=True, slots=True)
class Message:
    """One message under way."""

    handle: Handle
    tensor: torch.Tensor
    member: int


class Link:
    """One stage's group, with errors that say whom it waited for.

    Args:
        name: What the stage does, for errors.
        group: None where this member is alone in it.
        member_ids: What to call the members, in order of position.
        waiting: Shared with the other stages: what each one waits for just now.
    """

    def __init__(
        self,
        name: str,
        group: StageGroup | None,
        member_ids: Sequence[str],
        waiting: dict[str, str],
    ) -> None:
        self.name = name
        self._group = group
        self._member_ids = member_ids
        self._waiting = waiting

    def send(self, tensor: torch.Tensor, member: int) -> Message:
        """Start sending; keep the tensor as it is until waited for."""
        return Message(self._there().send(tensor, member), tensor, member)

    def receive(self, tensor: torch.Tensor, member: int) -> Message:
        """Start receiving."""
        return Message(self._there().receive(tensor, member), tensor, member)

    def all_reduce(self, tensor: torch.Tensor) -> Handle:
        """Start Gloo's ring."""
        return self._there().all_reduce(tensor)

    def wait(self, messages: Iterable[Message]) -> None:
        """Wait for all of them, in order.

        Raises:
            CommunicationError: If a peer was lost or the deadline passed.
        """
        for message in messages:
            self.wait_for(message.handle, self._member_ids[message.member])

    def wait_for(self, handle: Handle, whom: str) -> None:
        """Wait for one, saying for whom if it fails."""
        self._waiting[self.name] = whom
        try:
            handle.wait()
        except (CommunicationError, RuntimeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            msg = f"{self.name}, waiting for {whom}: {reason}"
            raise CommunicationError(msg) from error
        # Two threads may wait in one stage, one for what it sent.
        self._waiting.pop(self.name, None)

    def _there(self) -> StageGroup:
        if self._group is None:
            msg = f"{self.name}: this member exchanges with nobody there"
            raise ConfigError(msg)
        return self._group


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The five stages of one schedule, as one member sees them."""

    rack_in: Link
    across_out: Link
    across_back: Link
    rack_out: Link
    ring: Link


def stage_members(schedule: CommSchedule) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every stage of a schedule and who takes part in it, the same on all members."""
    if schedule.algorithm == "ring":
        yield RING, schedule.ring_order or schedule.leaders
        return
    if schedule.algorithm == "local":
        return
    for rack in schedule.racks:
        yield RACK_IN, rack.leaders
        yield RACK_OUT, rack.leaders
    across = _who_exchanges_across(schedule)
    yield ACROSS_OUT, across
    yield ACROSS_BACK, across


@dataclass(slots=True)
class LinkTable:
    """Makes the stages of schedules and finds them again.

    Args:
        transport: Of this epoch.
        member_ids: What to call the members in an error, in order of position.
    """

    transport: Transport
    member_ids: tuple[str, ...]
    waiting: dict[str, str] = field(default_factory=dict)
    _groups: dict[tuple[str, tuple[int, ...]], StageGroup] = field(default_factory=dict)

    def connect(self, schedules: Iterable[CommSchedule]) -> None:
        """Make all stages of these schedules that this member takes part in.

        Everywhere in the same order, so that members never wait crosswise.

        Raises:
            CommunicationError: If a stage could not be made in time.
        """
        stages = {stage for schedule in schedules for stage in stage_members(schedule)}
        for name, members in sorted(stages):
            if self.transport.me in members and len(members) > 1:
                key = (name, members)
                if key not in self._groups:
                    self._groups[key] = self.transport.stage(
                        _full_name(*key), members, shares_links=name in _SHARE_UPLINKS
                    )

    def links(self, schedule: CommSchedule, place: Place) -> Links:
        """The stages of one schedule."""
        leaders = schedule.racks[place.rack_index].leaders
        across = _who_exchanges_across(schedule)
        return Links(
            rack_in=self._link("adding up in the rack", RACK_IN, leaders),
            across_out=self._link("partial sums across racks", ACROSS_OUT, across),
            across_back=self._link("totals across racks", ACROSS_BACK, across),
            rack_out=self._link("handing out in the rack", RACK_OUT, leaders),
            ring=self._link("ring", RING, schedule.ring_order or schedule.leaders),
        )

    def _link(self, what: str, name: str, members: tuple[int, ...]) -> Link:
        group = self._groups.get((name, members))
        return Link(what, group, self.member_ids, self.waiting)


def _who_exchanges_across(schedule: CommSchedule) -> tuple[int, ...]:
    """Leaders that may hold something of their rack's sum."""
    if len(schedule.racks) == 1:
        return ()
    if schedule.algorithm == "leader":
        return tuple(rack.leaders[0] for rack in schedule.racks)
    return tuple(
        leader
        for rack in schedule.racks
        for leader, share in zip(rack.leaders, rack.host_shares, strict=True)
        if share > 0
    )


def _full_name(name: str, members: tuple[int, ...]) -> str:
    """Unique among an epoch's stages; short also for many members."""
    digest = hashlib.sha256(repr(members).encode()).hexdigest()[:12]
    return f"{name}-{digest}"
