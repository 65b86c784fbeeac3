"""The exchange among the processes of a torch.distributed group, without a trainer."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from geartrain.collectives.codecs.registry import make_codec
from geartrain.collectives.exchange_hub import ExchangeHub, HubPlace
from geartrain.collectives.job_network import JobNetwork, find_network
from geartrain.collectives.lost_peers import lost_peers
from geartrain.collectives.rendezvous import Rendezvous
from geartrain.devices.profile import DeviceProfile
from geartrain.devices.registry import load_adapters
from geartrain.errors import ConfigError
from geartrain.planner.exchange import AUTO
from geartrain.topology.profile import Topology

if TYPE_CHECKING:
    from geartrain.collectives.exchange.scheduled_collective import ScheduledCollective

DEFAULT_TIMEOUT_S = 300.0
_KINDS_OF = {"cuda": ("cuda", "rocm")}
"""Adapters by torch's device type, where the names differ: ROCm calls itself cuda."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeChoices:
    """What all processes must have chosen alike."""

    compression: str | None = None
    """None: exact. ``auto``, or a codec's name."""
    weighted: bool = False

    def __post_init__(self) -> None:
        if self.compression not in (None, AUTO):
            make_codec(self.compression)  # an unknown name is refused before any work


@dataclass(slots=True, weakref_slot=True, eq=False)
class ProcessExchange:
    """This process's exchanges with the others of a group; made by ``join_exchange``.

    Args:
        hub: Opens exchanges among some of them.
        rendezvous: All of them.
    """

    hub: ExchangeHub
    rendezvous: Rendezvous
    _is_closed: bool = False

    @property
    def network(self) -> JobNetwork:
        """Where the processes are, and the links between their hosts."""
        return self.hub.network

    @property
    def is_closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._is_closed

    def open(
        self, members: Sequence[int] | None = None, purpose: str = "gradients"
    ) -> ScheduledCollective:
        """Make the exchange of these members (all by default); they all call it.

        Args:
            members: Places in the group, at least two.
            purpose: Exchanges of one purpose keep their order among themselves only.
        """
        everyone = range(self.rendezvous.world_size)
        return self.hub.open(tuple(members or everyone), purpose)

    def close(self) -> None:
        """End all exchanges; the others go on until they close too. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self.hub.close()


def join_exchange(
    device: torch.device,
    choices: ExchangeChoices,
    *,
    group: dist.ProcessGroup | None = None,
    topology: Topology | str | Path | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> ProcessExchange:
    """Find out where the processes of a group are, and get ready to exchange.

    All of them must call it together. Only the group's store is used, so its backend may
    be any. It ends by itself when the process exits.

    Args:
        device: Where this process's gradients are.
        choices: The same on all.
        group: A torch.distributed group; None: the default one, with all processes.
        topology: The links between hosts, or the path of a ``fleet.json`` with them, as
            rank 0 knows them; None measures them where there are several hosts.
        timeout_s: Outer limit of every wait for a peer.

    Raises:
        ConfigError: If there is no process group, or the processes chose differently.
        CommunicationError: If one of them does not come in time.
    """
    if not dist.is_initialized():
        msg = (
            "torch.distributed has no process group yet; call "
            "torch.distributed.init_process_group() first"
        )
        raise ConfigError(msg)
    group = group or dist.group.WORLD
    assert group is not None
    ranks = tuple(dist.get_process_group_ranks(group))
    place = ranks.index(dist.get_rank())
    store = _own_store(ranks, place)
    names = tuple(f"rank {rank}" for rank in ranks)
    rendezvous = Rendezvous(
        PrefixStore("meeting", store), place, len(ranks), timeout_s, names
    )
    _check_alike(rendezvous, choices)
    network = find_network(
        rendezvous,
        profile_of(device),
        peers=_store_hosts(store),
        fleet_path=str(topology) if isinstance(topology, str | Path) else "",
        given=topology if isinstance(topology, Topology) else None,
    )
    hub = ExchangeHub(
        place=HubPlace(
            rank=place,
            device_ids=names,
            store=store,
            rendezvous=rendezvous,
            timeout_s=timeout_s,
            device=device,
        ),
        network=network,
        compression=choices.compression,
    )
    exchange = ProcessExchange(hub, rendezvous)
    weakref.finalize(exchange, hub.close)  # when it is dropped, or else at exit
    return exchange


def profile_of(device: torch.device) -> DeviceProfile:
    """What the adapters say about a torch device, without measuring it.

    A device that none of them knows can be staged through host memory all the same.
    """
    index = device.index or 0
    adapters = load_adapters()
    for kind in _KINDS_OF.get(device.type, (device.type,)):
        adapter = adapters.get(kind)
        if adapter is not None and adapter.is_available():
            profiles = adapter.list_devices()
            return profiles[min(index, len(profiles) - 1)]
    return DeviceProfile(
        device_id=f"{device.type}:{index}",
        node_id="",
        vendor="",
        kind=device.type,
        name=device.type,
        memory_bytes=1,
    )


def _own_store(ranks: tuple[int, ...], place: int) -> Store:
    """A part of the default store for this exchange alone; made in one order by all."""
    from torch.distributed.distributed_c10d import _get_default_store  # noqa: PLC0415

    store = _get_default_store()
    name = "-".join(map(str, ranks))
    with lost_peers("the store of the process group"):
        number = int(store.add(f"geartrain/exchanges/{name}/{place}", 1))
    return PrefixStore(f"geartrain/exchange/{name}/{number}", store)


def _store_hosts(store: Store) -> tuple[str, ...]:
    """Where the store is, if it says so: the way to it is the way to the others."""
    for _ in itertools.repeat(None, 16):  # prefixes, one in another
        if not isinstance(store, PrefixStore):
            break
        store = store.underlying_store
    return (store.host,) if isinstance(store, TCPStore) else ()


def _check_alike(rendezvous: Rendezvous, choices: ExchangeChoices) -> None:
    for name, other in zip(
        rendezvous.member_ids,
        rendezvous.gather("choices", choices, ExchangeChoices),
        strict=True,
    ):
        if other != choices:
            own = rendezvous.member_ids[rendezvous.rank]
            msg = (
                f"{own} chose {choices} but {name} chose {other}; pass the same "
                "compression on all ranks, and weights on all or none"
            )
            raise ConfigError(msg)
