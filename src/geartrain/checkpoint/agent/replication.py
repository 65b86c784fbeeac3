"""Keeps copies of own snapshots and logs at peers: one thread a peer, one that chooses."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from geartrain.checkpoint.agent.caller import AgentCaller
from geartrain.checkpoint.agent.messages import CopyStatus, LogEntry, PeerAddress
from geartrain.checkpoint.agent.peer_choice import PeerFacts, choose_peers
from geartrain.checkpoint.agent.settings import AgentSettings
from geartrain.checkpoint.agent.shelf import Shelf, find_damaged
from geartrain.errors import CheckpointError, CommunicationError

logger = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_SHUN_S = 5.0
"""A peer that failed is not asked for so long; another takes its place."""


@dataclass(slots=True)
class _Progress:
    """How far one member's copy at a peer is."""

    snapshot: tuple[int, str] = (-1, "")
    log_step: int = -1
    refused: tuple[int, str] = (-1, "")
    """The snapshot that the peer would not take."""


@dataclass(slots=True, eq=False)
class _Copier:
    """Copies to one peer until it fails or is stopped."""

    peer: PeerAddress
    shelf: Shelf
    token: str
    on_failure: Callable[[str], None]
    problem: str = ""
    send_s: float = 0.0
    stopped: bool = False
    _progress: dict[str, _Progress] = field(default_factory=dict)

    def start(self) -> None:
        """Begin, in a thread that ends with the process."""
        name = f"geartrain-copy-{self.peer.node_id}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def status(self) -> CopyStatus:
        """How far it is; of several own members the one that is least far."""
        known = self._progress
        all_progress = [known.get(m, _Progress()) for m in self.shelf.own_members()]
        all_progress = all_progress or [_Progress()]
        return CopyStatus(
            node_id=self.peer.node_id,
            snapshot_step=min(p.snapshot[0] for p in all_progress),
            log_step=min(p.log_step for p in all_progress),
            send_s=self.send_s,
            problem=self.problem,
        )

    def _run(self) -> None:
        try:
            caller = AgentCaller.connect(self.peer.address, self.token, self.peer.node_id)
            try:
                self._learn(caller)
                while not self.stopped:
                    if not self._advance(caller):
                        with self.shelf.changed:
                            self.shelf.changed.wait(_LOOK_EVERY_S)
            finally:
                caller.close()
        except CommunicationError as error:
            self.problem = str(error)
            logger.warning("copies to %s stopped: %s", self.peer.node_id, error)
            self.on_failure(self.peer.node_id)

    def _learn(self, caller: AgentCaller) -> None:
        """Ask what the peer has, so that nothing is sent again after a broken link."""
        held = caller.held()
        for facts in held.snapshots:
            progress = self._progress.setdefault(facts.member_id, _Progress())
            progress.snapshot = (facts.step, facts.lineage)
        for entry in held.log:
            self._progress.setdefault(entry.member_id, _Progress()).log_step = entry.step

    def _advance(self, caller: AgentCaller) -> bool:
        """Send what is new; says whether anything was."""
        sent = [self._advance_member(caller, m) for m in self.shelf.own_members()]
        return any(sent)

    def _advance_member(self, caller: AgentCaller, member_id: str) -> bool:
        progress = self._progress.setdefault(member_id, _Progress())
        newest = self.shelf.newest(member_id)
        if newest is None:
            return False
        key = (newest.step, newest.lineage)
        if key not in {progress.snapshot, progress.refused}:
            self._send_snapshot(caller, member_id, key, progress)
            return True
        entry = self._next_entry(member_id, key, progress)
        if entry is None or progress.snapshot != key:
            return False
        try:
            data = self.shelf.log_bytes(member_id, entry.step, entry.lineage)
            caller.offer_log(entry, data)
        except CheckpointError as error:
            self.problem = str(error)
            progress.refused = key  # until the next snapshot, from which it can go on
            progress.snapshot = (-1, "")
            return False
        progress.log_step = entry.step
        self._tell()
        return True

    def _send_snapshot(
        self,
        caller: AgentCaller,
        member_id: str,
        key: tuple[int, str],
        progress: _Progress,
    ) -> None:
        start_s = time.monotonic()
        try:
            with self.shelf.reading(member_id, *key) as kept:
                caller.offer(kept)
                self.problem = ""
        except CheckpointError as error:
            self.problem = str(error)
            progress.refused = key
            if self._is_own_damage(member_id, key):
                return
            # It lies with the peer: let another one be chosen, or this one again later.
            raise CommunicationError(self.problem) from error
        self.send_s = time.monotonic() - start_s
        progress.snapshot, progress.log_step = key, key[0]
        self._tell()

    def _tell(self) -> None:
        """Wake whoever waits for a copy to be whole."""
        with self.shelf.changed:
            self.shelf.changed.notify_all()

    def _is_own_damage(self, member_id: str, key: tuple[int, str]) -> bool:
        try:
            with self.shelf.reading(member_id, *key) as kept:
                damaged = find_damaged(kept)
        except CheckpointError:
            return True  # it has given way to a newer one meanwhile
        if damaged:
            names = ", ".join(str(chunk.range) for chunk in damaged[:5])
            self.problem = f"step {key[0]} changed in this node's memory: {names}"
            logger.error("%s; take another snapshot, and test the memory", self.problem)
        return bool(damaged)

    def _next_entry(
        self, member_id: str, key: tuple[int, str], progress: _Progress
    ) -> LogEntry | None:
        entries = self.shelf.chain(member_id).path(*key)
        return next((e for e in entries if e.step > progress.log_step), None)


class Replication:
    """Chooses peers and keeps them supplied.

    Args:
        settings: This node's.
        shelf: What it holds.
        token: Proves to peers that it may.
    """

    def __init__(self, settings: AgentSettings, shelf: Shelf, token: str) -> None:
        self._settings = settings
        self._shelf = shelf
        self._token = token
        self._lock = threading.Lock()
        self._peers: tuple[PeerAddress, ...] = ()
        self._num_copies = 0
        self._copiers: dict[str, _Copier] = {}
        self._shunned_until_s: dict[str, float] = {}
        self._warning = ""
        self._is_closed = False
        self._woken = threading.Event()
        threading.Thread(target=self._run, name="geartrain-peers", daemon=True).start()

    def set_peers(self, peers: Sequence[PeerAddress], num_copies: int) -> None:
        """Take note of which nodes there are; copies move only where they must."""
        with self._lock:
            self._peers, self._num_copies = tuple(peers), num_copies
        self._woken.set()

    def close(self) -> None:
        """Copy nothing any more."""
        with self._lock:
            self._is_closed = True
            for copier in self._copiers.values():
                copier.stopped = True
        self._woken.set()

    def status(self) -> tuple[tuple[CopyStatus, ...], str]:
        """The copies, and what is missing."""
        with self._lock:
            return tuple(c.status() for c in self._copiers.values()), self._warning

    def _run(self) -> None:
        while not self._is_closed:
            self._woken.wait(_LOOK_EVERY_S)
            self._woken.clear()
            with self._lock:
                is_short = len(self._copiers) < self._num_copies or any(
                    node_id not in {p.node_id for p in self._peers}
                    for node_id in self._copiers
                )
            if is_short and self._shelf.own_members():
                self._choose()

    def _choose(self) -> None:
        now_s = time.monotonic()
        with self._lock:
            num_copies = self._num_copies
            present = set(self._copiers)
            peers = {
                peer.node_id: peer
                for peer in self._peers
                if self._shunned_until_s.get(peer.node_id, 0.0) <= now_s
            }
        facts = [self._ask(peer, peer.node_id in present) for peer in peers.values()]
        choice = choose_peers(
            PeerFacts(
                node_id=self._settings.node_id,
                host_id=self._settings.host_id,
                rack_id=self._settings.rack_id,
                free_bytes=0,
            ),
            [fact for fact in facts if fact is not None],
            num_copies=num_copies,
            needed_bytes=self._shelf.own_bytes(),
            present=present,
        )
        with self._lock:
            if choice.warning and choice.warning != self._warning:
                logger.warning("%s", choice.warning)
            self._warning = choice.warning
            for node_id in set(self._copiers) - set(choice.node_ids):
                self._copiers.pop(node_id).stopped = True
            for node_id in choice.node_ids:
                if node_id not in self._copiers and not self._is_closed:
                    copier = _Copier(
                        peers[node_id], self._shelf, self._token, self._on_failure
                    )
                    self._copiers[node_id] = copier
                    copier.start()

    def _ask(self, peer: PeerAddress, is_present: bool) -> PeerFacts | None:
        """What is known of a peer; None where it does not answer."""
        free_bytes = 0
        if not is_present and peer.host_id != self._settings.host_id:
            try:
                caller = AgentCaller.connect(peer.address, self._token, peer.node_id)
                try:
                    free_bytes = caller.describe().free_bytes
                finally:
                    caller.close()
            except CommunicationError as error:
                logger.warning("%s can't keep a copy: %s", peer.node_id, error)
                self._shun(peer.node_id)
                return None
        return PeerFacts(
            node_id=peer.node_id,
            host_id=peer.host_id,
            rack_id=peer.rack_id,
            free_bytes=free_bytes,
        )

    def _on_failure(self, node_id: str) -> None:
        with self._lock:
            self._copiers.pop(node_id, None)
        self._shun(node_id)
        self._woken.set()

    def _shun(self, node_id: str) -> None:
        with self._lock:
            self._shunned_until_s[node_id] = time.monotonic() + _SHUN_S
