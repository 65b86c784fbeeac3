"""A trainer's connection to its node's agent, which may die and come back."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from geartrain.checkpoint.agent.link import AgentLink, Reservation
from geartrain.errors import CheckpointError, CommunicationError

if TYPE_CHECKING:
    from geartrain.checkpoint.agent.listing import AgentListing, ListedAgent
    from geartrain.checkpoint.agent.messages import PeerAddress
    from geartrain.parallel.save_spec import PeerMemorySpec

_LOOK_EVERY_S = 1.0
_RETRY_S = 5.0
_HANGS_AFTER_S = 10.0
_FEWEST_SLOTS, _MOST_SLOTS, _SLOTS_BYTES = 4, 16, 16 << 20
"""Steps that the agent may be behind: it lets the trainer have the cores."""
_LOG_PER_SHARD = 4
"""Room for the log, in shards: it asks for a snapshot when half of that is used."""
_SMALLEST_LOG_BYTES = 1 << 20


@dataclass(slots=True)
class AgentConnection:
    """What one trainer has with its agent; nothing here waits for it.

    Args:
        spec: Which agent.
        member_id: Whose state it keeps.
        base: Step and lineage of the snapshot that this trainer was restored from.
        tell: Told what goes wrong, once each time.
    """

    spec: PeerMemorySpec
    member_id: str
    base: tuple[int, str]
    tell: Callable[[str], None]
    link: AgentLink | None = None
    listing: AgentListing | None = None
    """All agents of the run, as they were last known."""
    _incarnation: str = field(default_factory=lambda: secrets.token_hex(8))
    _agent: ListedAgent | None = None
    _stamp: tuple[int, int] = (0, 0)
    _look_at_s: float = 0.0
    _retry_at_s: float = 0.0
    _asked_at_s: float | None = None

    @property
    def incarnation(self) -> str:
        """Names this process to the agents."""
        return self._incarnation

    def has_agent(self) -> bool:
        """Look whether there is one that has not failed just now."""
        now_s = time.monotonic()
        if now_s >= self._look_at_s:
            self._look_at_s = now_s + _LOOK_EVERY_S
            with self.guarded():
                self._read_listing()
        return self._agent is not None and now_s >= self._retry_at_s

    @property
    def num_copies(self) -> int:
        """Kept on other hosts, as far as there are any."""
        num_hosts = self.listing.num_hosts if self.listing is not None else 1
        return min(self.spec.settings.num_copies, max(num_hosts - 1, 0))

    def other_agents(self) -> tuple[PeerAddress, ...]:
        """Those of other nodes."""
        agents = self.listing.agents if self.listing is not None else ()
        own = self.spec.node_id
        return tuple(agent.as_peer for agent in agents if agent.node_id != own)

    def offer(self, shard_bytes: int, slot_bytes: int) -> bool:
        """Ask for a buffer; says whether there is one in hand.

        Args:
            shard_bytes: It is to hold.
            slot_bytes: Of one step's part of the log; 0 without one.
        """
        with self.guarded():
            link = self._with_room(shard_bytes, slot_bytes)
            if not link.has_buffer:
                link.ask()
                link.poll()
            self._check_alive(link)
        return self.link is not None and self.link.has_buffer

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Leave the agent alone for a while where it fails; training goes on."""
        try:
            yield
        except (CheckpointError, CommunicationError, OSError) as error:
            self.drop(str(error))

    def drop(self, problem: str) -> None:
        """Go on without it, and try again later."""
        self.close()
        self._asked_at_s = None
        self._retry_at_s = time.monotonic() + _RETRY_S
        self.tell(f"the state is not kept in memory for now: {problem}")

    def close(self) -> None:
        """Leave; the agent keeps what was sealed."""
        if self.link is not None:
            self.link.close()
            self.link = None

    def _with_room(self, shard_bytes: int, slot_bytes: int) -> AgentLink:
        link = self.link
        if link is not None:
            has = link.reservation
            if has.snapshot_bytes >= shard_bytes and has.slot_bytes >= slot_bytes:
                return link
            self.close()
        assert self._agent is not None, "asked only where there is one"
        reservation = Reservation(
            member_id=self.member_id,
            incarnation=self._incarnation,
            snapshot_bytes=shard_bytes,
            slot_bytes=slot_bytes,
            num_slots=_num_slots(slot_bytes),
            log_limit_bytes=_log_limit_bytes(shard_bytes, slot_bytes),
            base=self.base,
        )
        try:
            self.link = AgentLink(self._agent.local_address, reservation)
        except CheckpointError:
            if not slot_bytes:
                raise
            without = replace(reservation, slot_bytes=0, num_slots=0, log_limit_bytes=0)
            self.link = AgentLink(self._agent.local_address, without)
        self._asked_at_s = None
        self._tell_peers(self.spec.access.read_listing())
        return self.link

    def _check_alive(self, link: AgentLink) -> None:
        if link.has_buffer:
            self._asked_at_s = None
            return
        now_s = time.monotonic()
        self._asked_at_s = self._asked_at_s or now_s
        if now_s > self._asked_at_s + _HANGS_AFTER_S:
            msg = (
                f"the agent of {self.spec.node_id} gave no buffer for "
                f"{_HANGS_AFTER_S:g} s; see whether it hangs"
            )
            raise CommunicationError(msg)

    def _read_listing(self) -> None:
        stamp = _stamp(self.spec.access.listing_path)
        if stamp is None or stamp == self._stamp:
            return
        listing = self.spec.access.read_listing()
        self._stamp = stamp
        agent = listing.of_node(self.spec.node_id)
        if agent != self._agent:
            self._agent = agent  # another process: nothing of the old one is left
            self.close()
        elif self.link is not None:
            self._tell_peers(listing)

    def _tell_peers(self, listing: AgentListing) -> None:
        assert self.link is not None
        self.listing = listing
        peers = [agent.as_peer for agent in listing.agents]
        self.link.set_peers(peers, self.num_copies)


def _num_slots(slot_bytes: int) -> int:
    if not slot_bytes:
        return 0
    return min(max(_SLOTS_BYTES // slot_bytes, _FEWEST_SLOTS), _MOST_SLOTS)


def _log_limit_bytes(shard_bytes: int, slot_bytes: int) -> int:
    if not slot_bytes:
        return 0
    fewest_bytes = _FEWEST_SLOTS * slot_bytes
    return max(_LOG_PER_SHARD * shard_bytes, fewest_bytes, _SMALLEST_LOG_BYTES)


def _stamp(path: str) -> tuple[int, int] | None:
    """Tells one version of a file from another; None where there is none."""
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino
