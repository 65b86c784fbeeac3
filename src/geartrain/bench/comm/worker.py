"""One rank of the benchmark: joins a lab as a training job would, and measures.

geartrain is told this host's own address and where the rendezvous store is, nothing
else: it finds out by itself who shares a host or a rack, and how fast the links are.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from geartrain.bench.comm.baselines import Baselines
from geartrain.bench.comm.exactness import KnownSum, checksum
from geartrain.bench.comm.messages import (
    BEST_RING,
    CODEC_OF,
    GIVEN_RING,
    STOCK,
    Member,
    Order,
    Report,
    Timing,
)
from geartrain.collectives.exchange_hub import ExchangeHub, HubPlace
from geartrain.collectives.job_network import JobNetwork, find_network
from geartrain.collectives.rendezvous import Rendezvous
from geartrain.devices.profile import DeviceProfile
from geartrain.telemetry import decode_document, encode_document

if TYPE_CHECKING:
    from geartrain.collectives.exchange.scheduled_collective import ScheduledCollective

TIMEOUT_S = 120.0
_FLOAT32_BYTES = 4
_GIB = 2**30


def serve(member: Member, connection: Connection) -> None:
    """Carry out orders until the benchmark hangs up."""
    torch.set_num_threads(1)
    worker = LabWorker(member)
    try:
        while True:
            order = decode_document(connection.recv_bytes(), Order)
            connection.send_bytes(encode_document(worker.answer(order)))
    finally:
        worker.close()


class LabWorker:
    """Carries the benchmark's orders out on one rank."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.store = dist.TCPStore(  # type: ignore[attr-defined]  # documented, not in __all__
            member.store_address, member.store_port, is_master=False
        )
        self.baselines = Baselines(member, self.store)
        self.rendezvous = self.rendezvous_of("job")
        self.network: JobNetwork | None = None
        self._hubs: list[ExchangeHub] = []
        self._collectives: dict[str, ScheduledCollective] = {}
        self._known: dict[int, KnownSum] = {}
        self._extras: dict[str, Callable[[Order], Report]] = {}

    def answer(self, order: Order) -> Report:
        """Carry an order out; a failure is part of the answer."""
        try:
            return self._verbs(order.verb)(order)
        except Exception:  # noqa: BLE001 - all of it goes to the benchmark
            return Report(error=traceback.format_exc())

    def close(self) -> None:
        """End all exchanges."""
        for hub in self._hubs:
            hub.close()
        self._hubs.clear()

    def rendezvous_of(self, name: str) -> Rendezvous:
        """Facts among all ranks, under a name of their own."""
        world_size = self.member.world_size
        return Rendezvous(
            store=PrefixStore(name, self.store),
            rank=self.member.rank,
            world_size=world_size,
            timeout_s=TIMEOUT_S,
            member_ids=[f"rank{rank}" for rank in range(world_size)],
        )

    def find_network(self) -> JobNetwork:
        """Have geartrain find hosts, racks and rates, once."""
        if self.network is None:
            device = DeviceProfile(
                device_id=f"cpu:{self.member.rank}",
                node_id=self.member.address,
                vendor="cpu",
                kind="cpu",
                name="a worker of the benchmark",
                memory_bytes=_GIB,
            )
            self.network = find_network(
                self.rendezvous, device, address=self.member.address
            )
        return self.network

    def open_exchange(
        self, name: str, compression: str | None, network: JobNetwork | None = None
    ) -> ScheduledCollective:
        """Open geartrain's exchange among all ranks."""
        ranks = range(self.member.world_size)
        hub = ExchangeHub(
            place=HubPlace(
                rank=self.member.rank,
                device_ids=tuple(f"rank{rank}" for rank in ranks),
                store=PrefixStore(f"hub/{name}", self.store),
                rendezvous=self.rendezvous_of(f"rendezvous/{name}"),
                timeout_s=TIMEOUT_S,
                device=torch.device("cpu"),
            ),
            network=network or self.find_network(),
            compression=compression,
        )
        self._hubs.append(hub)
        return hub.open(tuple(ranks), "bench")

    def _verbs(self, verb: str) -> Callable[[Order], Report]:
        own = {"join": self._join, "measure": self._measure}
        if verb not in own and verb not in self._extras:
            self._extras |= _make_extras(self)
        return own.get(verb) or self._extras[verb]

    # -- orders -------------------------------------------------------------------------

    def _join(self, order: Order) -> Report:
        """Probe, plan, and connect the exchanges that are asked for."""
        network = self.find_network()
        for scheme in order.schemes:
            self._collectives[scheme] = self.open_exchange(scheme, CODEC_OF[scheme])
        self.baselines.barrier()
        return describe_network(network) if self.member.rank == 0 else Report()

    def _measure(self, order: Order) -> Report:
        num_elements = order.num_bytes // _FLOAT32_BYTES
        tensor = torch.empty(num_elements)
        known = self._known_sum(num_elements)
        timings = []
        for _ in range(order.repeats):
            timings += [self._time(scheme, tensor, known) for scheme in order.schemes]
        ours = {
            scheme: self._collectives[scheme]
            for scheme in order.schemes
            if scheme in self._collectives and self.member.rank == 0
        }
        return Report(
            timings=tuple(timings),
            schedules={
                scheme: collective.book.schedule_for(order.num_bytes)
                for scheme, collective in ours.items()
            },
            predicted_s={
                scheme: collective.predict_s(order.num_bytes)
                for scheme, collective in ours.items()
            },
        )

    def _time(self, scheme: str, tensor: torch.Tensor, known: KnownSum) -> Timing:
        all_reduce = self._scheme(scheme)
        known.fill(tensor)
        self.baselines.barrier()
        cpu_s, started_at_s = time.process_time(), time.perf_counter()
        all_reduce(tensor)
        seconds = time.perf_counter() - started_at_s
        timing = Timing(
            scheme=scheme,
            seconds=seconds,
            cpu_s=time.process_time() - cpu_s,
            checksum=checksum(tensor),
        )
        if scheme in self._collectives:
            stage_s: dict[str, float] = {}
            for observation in self._collectives[scheme].observations():
                stage_s = observation.stage_s
            timing = replace(timing, stage_s=stage_s)
        return replace(timing, relative_error=known.relative_error(tensor))

    def _scheme(self, scheme: str) -> Callable[[torch.Tensor], None]:
        if scheme in self._collectives:
            return partial(_sum, self._collectives[scheme])
        if scheme == STOCK:
            return self.baselines.stock_hierarchy
        orders: dict[str, Sequence[int]] = {
            GIVEN_RING: range(self.member.world_size),
            BEST_RING: self.member.best_ring,
        }
        return partial(self.baselines.ring, ranks=orders[scheme], name=scheme)

    def _known_sum(self, num_elements: int) -> KnownSum:
        if num_elements not in self._known:
            self._known.clear()
            self._known[num_elements] = KnownSum(
                rank=self.member.rank,
                world_size=self.member.world_size,
                num_elements=num_elements,
                knows_sum=self.member.rank == 0,
            )
        return self._known[num_elements]


def _sum(collective: ScheduledCollective, tensor: torch.Tensor) -> None:
    # The same key each time, as in training: what a code loses is added the next time.
    collective.all_reduce(tensor, key="bench").wait()


def describe_network(network: JobNetwork) -> Report:
    """What the probe found, with ranks for hosts."""
    placement = network.placement
    racks = tuple(
        tuple(r for r, host in enumerate(placement) if host in rack.member_ids)
        for rack in network.topology.racks
    )
    notes = [
        f"{tier.tier_id}: {tier.uplink_send_bytes_per_s} bytes/s out, "
        f"{tier.uplink_receive_bytes_per_s} in"
        for tier in network.topology.tiers
        if tier.uplink_send_bytes_per_s is not None
    ]
    return Report(
        found_racks=racks,
        num_hosts=len(set(placement)),
        probe_s=network.topology.probe_s,
        probe_bytes=network.topology.probe_bytes,
        notes=(*notes, *network.topology.notes),
    )


def _make_extras(worker: LabWorker) -> dict[str, Callable[[Order], Report]]:
    """Orders of other cases; imported here, as their modules build on this one."""
    from geartrain.bench.comm.ddp_training import train_with_ddp  # noqa: PLC0415
    from geartrain.bench.comm.watched_training import WatchedTraining  # noqa: PLC0415

    watched = WatchedTraining(worker)
    return {
        "overlap": partial(train_with_ddp, worker),
        "watch_begin": watched.begin,
        "watch_steps": watched.steps,
    }
