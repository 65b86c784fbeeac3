"""Makes a worker's membership from what the launcher said."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from geartrain.elastic.address_file import read_address
from geartrain.elastic.client import Client
from geartrain.elastic.control import ControlSettings
from geartrain.elastic.epoch_builder import PLACE_FACT
from geartrain.elastic.greeting import Credentials
from geartrain.elastic.link import Callbacks, Identity
from geartrain.elastic.members import Members, OwnPlace
from geartrain.elastic.process import read_token
from geartrain.elastic.state_giver import StateGiver

if TYPE_CHECKING:
    from geartrain.elastic.connection import Address
    from geartrain.parallel.membership import JoiningMembership
    from geartrain.parallel.process_group import RankGroups
    from geartrain.parallel.worker_spec import CoordinatorSpec, WorkerSpec

_LOOPBACK = "127.0.0.1"
_taken: set[str] = set()


def make_members(groups: RankGroups, spec: WorkerSpec) -> JoiningMembership | None:
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
    control, own = _control(coordinator), groups.hub.network.ranks[groups.rank]
    is_one_host = groups.hub.network.is_one_host
    giver = StateGiver(_LOOPBACK if is_one_host else own.address, control.credentials)
    identity = Identity(
        member_id=groups.device_ids[groups.rank],
        incarnation=spec.incarnation,
        host_id=own.host_id,
        place=groups.rank,
        address=giver.address,
        facts={PLACE_FACT: msgspec.json.encode(own).decode()},
    )
    place = OwnPlace(
        rank=groups.rank,
        member_id=identity.member_id,
        timeout_s=spec.timeout_s,
        fleet_path=Path(spec.fleet_path),
        credentials=control.credentials,
    )

    def make_client(callbacks: Callbacks) -> Client:
        return Client(identity, control, callbacks)

    return Members(groups.store, place, groups.hub, giver, make_client)


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
