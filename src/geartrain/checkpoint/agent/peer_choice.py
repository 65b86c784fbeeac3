"""Which nodes keep a copy of this node's state: pure, the same answer everywhere."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from geartrain.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFacts:
    """What is known of a node that could keep a copy."""

    node_id: str
    host_id: str
    """Processes with the same one die together."""
    rack_id: str = ""
    """Hosts with the same one may lose power or network together; empty: not known."""
    free_bytes: int
    """Memory that its agent would still give to guests."""

    def __post_init__(self) -> None:
        if not self.node_id or not self.host_id:
            msg = (
                f"peer {self.node_id!r} on host {self.host_id!r}: expected names that are "
                "not empty; give the node's and the host's id"
            )
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerChoice:
    """Who keeps the copies, and how far apart they are."""

    node_ids: tuple[str, ...]
    """Best first; fewer than asked for where no more can."""
    num_racks: int
    """Racks that a copy lies in, the node's own not counted."""
    warning: str = ""
    """What is missing, and why; empty where all is as asked."""


def choose_peers(
    own: PeerFacts,
    others: Sequence[PeerFacts],
    *,
    num_copies: int,
    needed_bytes: int,
    present: Collection[str] = (),
) -> PeerChoice:
    """Choose nodes in other failure domains, the farther apart the better.

    A copy never lies on the node's own host. Racks come first: one that has no copy yet
    and is not the node's own beats one that has. Among equals those that hold a copy
    already stay, since moving costs a transfer; then a hash of both names decides, which
    spreads guests evenly without anybody's word.

    Args:
        own: The node whose state it is.
        others: All nodes; the own one and its host's are passed over.
        num_copies: Copies wanted.
        needed_bytes: Memory that each must have free. Those in ``present`` have it.
        present: Nodes that hold a copy now.

    Returns:
        The choice; it depends on the facts only, not on their order.

    Raises:
        ConfigError: If the number of copies is negative.

    Source: rendezvous hashing (Thaler and Ravishankar, 1996) for the spread.

    >>> a, b, c = (PeerFacts(node_id=n, host_id=n, rack_id=r, free_bytes=9)
    ...            for n, r in (("a", "r1"), ("b", "r1"), ("c", "r2")))
    >>> choose_peers(a, [a, b, c], num_copies=1, needed_bytes=5).node_ids
    ('c',)
    """
    if num_copies < 0:
        msg = (
            f"num_copies={num_copies} must be >= 0; 0 keeps the state on its own node only"
        )
        raise ConfigError(msg)
    distinct = {peer.node_id: peer for peer in others if peer.host_id != own.host_id}
    candidates = [
        peer
        for peer in distinct.values()
        if peer.free_bytes >= needed_bytes or peer.node_id in present
    ]
    chosen: list[PeerFacts] = []
    while candidates and len(chosen) < num_copies:
        best = min(candidates, key=lambda peer: _rank(peer, own, chosen, present))
        chosen.append(best)
        # Two copies on one host are lost together, and cost twice.
        candidates = [peer for peer in candidates if peer.host_id != best.host_id]
    return PeerChoice(
        node_ids=tuple(peer.node_id for peer in chosen),
        num_racks=len({peer.rack_id for peer in chosen} - {own.rack_id, ""}),
        warning=_warn(own, distinct, chosen, num_copies, needed_bytes),
    )


def _rank(
    peer: PeerFacts,
    own: PeerFacts,
    chosen: Sequence[PeerFacts],
    present: Collection[str],
) -> tuple[int, bool, bytes, str]:
    racks = [own.rack_id, *(other.rack_id for other in chosen)]
    # An unknown rack may be any: worse than a strange one, better than a shared one.
    crowding = 1 if not peer.rack_id else 2 * racks.count(peer.rack_id)
    lot = hashlib.sha256(f"{own.node_id}\n{peer.node_id}".encode()).digest()
    return crowding, peer.node_id not in present, lot, peer.node_id


def _warn(
    own: PeerFacts,
    distinct: dict[str, PeerFacts],
    chosen: Sequence[PeerFacts],
    num_copies: int,
    needed_bytes: int,
) -> str:
    if len(chosen) == num_copies:
        return ""
    hosts = {peer.host_id for peer in distinct.values()}
    return (
        f"{own.node_id}: {len(chosen)} of {num_copies} copies can be kept: "
        f"{len(hosts)} other hosts, of which enough have no {needed_bytes} bytes free; "
        "add hosts, raise the agents' memory limit, or ask for fewer copies"
    )
