"""Makes a worker's membership from what the launcher said."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from geartrain.elastic.address_file import read_address
from geartrain.elastic.client import Client
from geartrain.elastic.control import ControlSettings
from geartrain.elastic.greeting import Credentials
from geartrain.elastic.link import Callbacks, Identity
from geartrain.elastic.members import Members, OwnPlace
from geartrain.elastic.process import read_token
from geartrain.topology.host_identity import read_host_identity

if TYPE_CHECKING:
    from geartrain.elastic.connection import Address
    from geartrain.parallel.membership import Membership
    from geartrain.parallel.process_group import RankGroups
    from geartrain.parallel.worker_spec import CoordinatorSpec, WorkerSpec

_taken: set[str] = set()


def make_members(groups: RankGroups, spec: WorkerSpec) -> Membership | None:
    """The membership by the coordinator's word, for the first session of a process.

    Later sessions of a script train something else, with histories of their own, which
    their ranks keep together by themselves.

    Args:
        groups: Of this rank, with the hub in place.
        spec: What the launcher said.
    """
    coordinator = spec.coordinator
    if coordinator is None or groups.hub is None or groups.store is None:
        return None
    if spec.incarnation in _taken:
        return None
    _taken.add(spec.incarnation)
    identity = Identity(
        member_id=groups.device_ids[groups.rank],
        incarnation=spec.incarnation,
        host_id=read_host_identity().host_id,
        place=groups.rank,
    )
    place = OwnPlace(rank=groups.rank, timeout_s=spec.timeout_s)

    def make_client(callbacks: Callbacks) -> Client:
        return Client(identity, _control(coordinator), callbacks)

    return Members(groups.store, place, groups.hub, make_client)


def _control(coordinator: CoordinatorSpec) -> ControlSettings:
    address_file = Path(coordinator.address_file)
    token_file = coordinator.token_file

    def find_address() -> Address:
        address = read_address(address_file)
        return address.host, address.port

    return ControlSettings(
        credentials=Credentials(
            run_id=coordinator.run_id,
            token=read_token(Path(token_file) if token_file is not None else None),
        ),
        find_address=find_address,
    )
