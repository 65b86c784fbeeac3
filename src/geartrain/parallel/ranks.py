"""This process among the others: its device, the fleet, and how they are connected."""

from __future__ import annotations

import dataclasses
import logging
import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.rendezvous import rendezvous

from geartrain.collectives.job_network import (
    JobNetwork,
    describe_place,
    find_network,
    with_ranks,
)
from geartrain.collectives.lost_peers import lost_peers
from geartrain.collectives.rendezvous import Rendezvous
from geartrain.devices import DeviceProfile, Fleet
from geartrain.devices.registry import load_adapter, load_adapters
from geartrain.errors import CommunicationError, ConfigError
from geartrain.parallel.default_group import choose_backend, join
from geartrain.parallel.process_group import RankGroups
from geartrain.planner.exchange import CodecProfile
from geartrain.telemetry import decode_document, encode_document, read_document

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store

    from geartrain.devices.adapter import DeviceAdapter
    from geartrain.parallel.worker_spec import WorkerSpec

logger = logging.getLogger(__name__)

_PREFERRED_KINDS = ("cuda", "rocm", "xpu", "npu", "mps", "xla", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalDevice:
    """A device of this process and the adapter that works it."""

    profile: DeviceProfile
    """As the fleet lists it; its id is unique among all ranks."""
    adapter: DeviceAdapter
    local_id: str
    """Its id on this node, which the adapter knows."""

    @property
    def torch_device(self) -> torch.device:
        """Torch's name of the device."""
        return self.adapter.torch_device(self.local_id)

    @property
    def works_asynchronously(self) -> bool:
        """Whether kernels still run after the call that started them has returned."""
        return self.torch_device.type != "cpu"

    def synchronize(self) -> None:
        """Wait until the device has done all it was given."""
        if self.works_asynchronously:
            self.adapter.synchronize(self.local_id)


@dataclass(slots=True, kw_only=True)
class RankPlace:
    """One rank's device, the fleet in rank order, and its groups."""

    device: LocalDevice
    fleet: Fleet
    groups: RankGroups
    network: JobNetwork | None = None
    """Where all ranks are; None for a single one."""
    codecs: tuple[CodecProfile, ...] = ()
    """What the others have found out about codecs, where this rank joins them."""

    def grow(self, fleet: Fleet, network: JobNetwork) -> None:
        """There are more devices than before, at the end of the fleet."""
        self.fleet, self.network = fleet, network
        self.groups.grow(tuple(device.device_id for device in fleet.devices))

    @property
    def devices(self) -> tuple[DeviceProfile, ...]:
        """Of the ranks that are left, in their order."""
        return tuple(self.fleet.devices[rank] for rank in self.groups.members)

    @property
    def rank(self) -> int:
        """This process."""
        return self.groups.rank

    @property
    def world_size(self) -> int:
        """All processes."""
        return self.groups.world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class StartedBy:
    """Who started this process, and what they said; nobody where all are None."""

    spec: WorkerSpec | None
    """What ``geartrain run`` said."""
    local_rank: int | None
    """torchrun's; None where torchrun did not start this process."""
    meeting_point: str | None
    """Where the ranks of a torchrun, or of the script's own group, meet."""


def find_place(
    started_by: StartedBy, timeout_s: float, *, deterministic: bool
) -> RankPlace:
    """Take this process's place among the others.

    Args:
        started_by: Who says which place.
        timeout_s: Deadline of each wait, where no launcher says it.
        deterministic: Measure no links.

    Raises:
        CommunicationError: If the others can't be reached in time.
        ConfigError: If what was said contradicts itself.
    """
    if started_by.spec is not None:
        return connect_worker(started_by.spec, deterministic=deterministic)
    meeting_point = started_by.meeting_point
    if dist.is_available() and dist.is_initialized():
        return adopt_group(timeout_s, meeting_point, deterministic=deterministic)
    if started_by.local_rank is not None:
        assert meeting_point is not None  # torchrun sets both or neither
        return connect_torchrun(
            started_by.local_rank, timeout_s, meeting_point, deterministic=deterministic
        )
    return stand_alone(timeout_s)


def connect_worker(spec: WorkerSpec, *, deterministic: bool = False) -> RankPlace:
    """Take the place that ``geartrain run`` gave this process.

    Raises:
        CommunicationError: If the others can't be reached in time.
        ConfigError: If the spec and the fleet disagree.
    """
    fleet = read_document(Path(spec.fleet_path), Fleet)
    if len(fleet.devices) != spec.world_size and not spec.joins:
        msg = (
            f"{spec.fleet_path} lists {len(fleet.devices)} devices but world_size is "
            f"{spec.world_size}; start again with `geartrain run`"
        )
        raise ConfigError(msg)
    profile = fleet.devices[spec.rank]
    device = LocalDevice(
        profile=profile, adapter=load_adapter(profile.kind), local_id=profile.device_id
    )
    if spec.world_size == 1:
        return _alone(device, fleet, spec.timeout_s)
    if spec.joins:
        return _join_others(spec, device, fleet)
    store = _session_store(_connect_store(spec), spec.rank)
    is_first = not dist.is_initialized()
    if is_first:
        join(_backend(fleet), store, spec.rank, spec.world_size, spec.timeout_s)
    groups = _groups(fleet, spec.rank, store, spec.timeout_s, owns_default_group=is_first)
    network = find_network(
        groups.rendezvous,
        device.profile,
        peers=(spec.store_host,),
        address=spec.address,
        fleet_path=spec.fleet_path,
        measures=not deterministic,
    )
    return RankPlace(device=device, fleet=fleet, groups=groups, network=network)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFacts:
    """What a process must know of a job before it can join."""

    KEY: ClassVar[str] = "job"

    network: JobNetwork
    codecs: tuple[CodecProfile, ...]


def publish_job(groups: RankGroups) -> None:
    """Tell those that will join what they must know; the lead calls it."""
    hub, store = groups.hub, groups.store
    if hub is not None and store is not None:
        facts = JobFacts(network=hub.network, codecs=hub.codecs)
        store.set(JobFacts.KEY, encode_document(facts).decode())


def _join_others(spec: WorkerSpec, device: LocalDevice, fleet: Fleet) -> RankPlace:
    """Take a place in a job that is under way, beside the others for now.

    Raises:
        CommunicationError: If the job is not there.
    """
    store = PrefixStore(_session_prefix(1), _connect_store(spec))
    facts = _read_job(store, spec)
    ids = tuple(profile.device_id for profile in fleet.devices)
    network = facts.network
    own = describe_place(
        device.profile,
        peers=(spec.store_host,),
        address=spec.address,
        fleet_path=spec.fleet_path,
    )
    missing = len(ids) - len(network.ranks)
    if missing > 0:
        network = with_ranks(network, (own,) * missing, ids)
    groups = RankGroups(spec.rank, len(ids), ids, store, spec.timeout_s, joins=True)
    return RankPlace(
        device=device, fleet=fleet, groups=groups, network=network, codecs=facts.codecs
    )


def _read_job(store: Store, spec: WorkerSpec) -> JobFacts:
    with lost_peers("the rendezvous store"):
        store.wait([JobFacts.KEY], timedelta(seconds=spec.timeout_s))
        text = store.get(JobFacts.KEY)
    return decode_document(text, JobFacts, "the job to join")


def connect_torchrun(
    local_rank: int, timeout_s: float, meeting_point: str, *, deterministic: bool = False
) -> RankPlace:
    """Take the place that torchrun (RANK, WORLD_SIZE, MASTER_ADDR...) gave.

    Args:
        local_rank: Of this process on its host.
        timeout_s: Deadline of each wait.
        meeting_point: Host name or address where all ranks meet.
        deterministic: Measure no links.

    Raises:
        CommunicationError: If the others can't be reached in time.
    """
    store, rank, world_size = next(
        rendezvous("env://", timeout=timedelta(seconds=timeout_s))
    )
    shared = _session_store(store, rank)
    device, fleet = _gather_fleet(local_rank, rank, world_size, shared, timeout_s)
    if world_size == 1:
        return _alone(device, fleet, timeout_s)
    join(_backend(fleet), shared, rank, world_size, timeout_s)
    groups = _groups(fleet, rank, shared, timeout_s, owns_default_group=True)
    return _place(device, fleet, groups, meeting_point, measures=not deterministic)


def adopt_group(
    timeout_s: float, meeting_point: str | None = None, *, deterministic: bool = False
) -> RankPlace:
    """Use the default process group that the script has made itself.

    Args:
        timeout_s: Deadline of each wait.
        meeting_point: Host name or address where all ranks meet, where it is known.
        deterministic: Measure no links.

    Raises:
        ConfigError: If it cannot carry tensors in host memory.
    """
    from torch.distributed.distributed_c10d import _get_default_store  # noqa: PLC0415

    if "gloo" not in dist.get_backend_config():
        msg = (
            f"the script's process group has the backends {dist.get_backend_config()}; "
            "geartrain needs gloo for what lies in host memory: call "
            "init_process_group('cpu:gloo,cuda:nccl'), or leave it to gt.Session()"
        )
        raise ConfigError(msg)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    shared = _session_store(_get_default_store(), rank)
    local_rank = dist.get_node_local_rank(fallback_rank=rank)
    device, fleet = _gather_fleet(local_rank, rank, world_size, shared, timeout_s)
    groups = _groups(fleet, rank, shared, timeout_s, owns_default_group=False)
    return _place(device, fleet, groups, meeting_point, measures=not deterministic)


def stand_alone(timeout_s: float) -> RankPlace:
    """One process, one device: an accelerator if there is one, else the CPU."""
    device = local_device(0)
    return _alone(device, Fleet(devices=(device.profile,)), timeout_s)


def local_device(local_rank: int) -> LocalDevice:
    """The device of the local rank: accelerators in order, else the CPU."""
    adapters = load_adapters()
    for kind in _PREFERRED_KINDS:
        adapter = adapters.get(kind)
        if adapter is None or not adapter.is_available():
            continue
        profiles = adapter.list_devices()
        profile = profiles[local_rank % len(profiles)]
        return LocalDevice(profile=profile, adapter=adapter, local_id=profile.device_id)
    msg = "no device adapter works, not even the CPU's; reinstall geartrain"
    raise ConfigError(msg)


def _gather_fleet(
    local_rank: int, rank: int, world_size: int, store: Store, timeout_s: float
) -> tuple[LocalDevice, Fleet]:
    device = local_device(local_rank)
    names = tuple(f"rank {r}" for r in range(world_size))
    rendezvous = Rendezvous(PrefixStore("fleet", store), rank, world_size, timeout_s, names)
    mine = dataclasses.replace(device.profile, node_id=socket.gethostname())
    profiles = rendezvous.gather("device profile", mine, DeviceProfile)
    fleet = Fleet(devices=tuple(_unique_names(profiles)))
    return dataclasses.replace(device, profile=fleet.devices[rank]), fleet


def _unique_names(profiles: list[DeviceProfile]) -> list[DeviceProfile]:
    """Two ranks may share a CPU, and two nodes both have a cuda:0."""
    ids = [p.device_id for p in profiles]
    if len({p.node_id for p in profiles}) > 1:
        ids = [f"{p.node_id}/{p.device_id}" for p in profiles]
    return [
        dataclasses.replace(p, device_id=f"{i}#{r}" if ids.count(i) > 1 else i)
        for r, (p, i) in enumerate(zip(profiles, ids, strict=True))
    ]


def _backend(fleet: Fleet) -> str:
    return choose_backend([device.collective_backends for device in fleet.devices])


def _connect_store(spec: WorkerSpec) -> Store:
    try:
        return TCPStore(
            spec.store_host,
            spec.store_port,
            is_master=False,
            timeout=timedelta(seconds=spec.timeout_s),
        )
    except (RuntimeError, ConnectionError) as error:
        msg = (
            f"rank {spec.rank} could not reach the rendezvous store at "
            f"{spec.store_host}:{spec.store_port} within {spec.timeout_s:g} s; is the "
            "launcher still running?"
        )
        raise CommunicationError(msg) from error


def _alone(device: LocalDevice, fleet: Fleet, timeout_s: float) -> RankPlace:
    ids = (device.profile.device_id,)
    return RankPlace(
        device=device, fleet=fleet, groups=RankGroups(0, 1, ids, None, timeout_s)
    )


def _session_store(store: Store, rank: int) -> Store:
    """A part of the store for this session alone.

    A script may train one model after the other; the keys of an earlier session would be
    taken for answers. All ranks make their sessions in the same order.
    """
    with lost_peers("the rendezvous store"):
        number = int(store.add(f"geartrain/sessions/{rank}", 1))
    return PrefixStore(_session_prefix(number), store)


def _session_prefix(number: int) -> str:
    return f"geartrain/{number}"


def _groups(
    fleet: Fleet, rank: int, store: Store, timeout_s: float, *, owns_default_group: bool
) -> RankGroups:
    ids = tuple(d.device_id for d in fleet.devices)
    return RankGroups(
        rank, len(ids), ids, store, timeout_s, owns_default_group=owns_default_group
    )


def _place(
    device: LocalDevice,
    fleet: Fleet,
    groups: RankGroups,
    meeting_point: str | None,
    *,
    measures: bool,
) -> RankPlace:
    peers = () if meeting_point is None else (meeting_point,)
    network = find_network(
        groups.rendezvous, device.profile, peers=peers, measures=measures
    )
    return RankPlace(device=device, fleet=fleet, groups=groups, network=network)
