"""The topology of a single host: no network is touched."""

from __future__ import annotations

import time
from collections.abc import Sequence

from geartrain.topology.host_identity import HostIdentity, read_host_identity
from geartrain.topology.profile import Tier, Topology
from geartrain.topology.shared_memory import measure_copy_rate


def local_topology(
    device_ids: Sequence[str] = (),
    *,
    measure_memory: bool = False,
    identity: HostIdentity | None = None,
) -> Topology:
    """One rack with one host.

    Args:
        device_ids: The host's devices.
        measure_memory: Time copies through shared memory, about 50 ms.
        identity: Which host this is; None reads it.

    >>> [rack.member_ids for rack in local_topology().racks] == [
    ...     (read_host_identity().host_id,)
    ... ]
    True
    """
    identity = identity or read_host_identity()
    start_s = time.monotonic()
    memory = measure_copy_rate() if measure_memory else None
    return Topology(
        tiers=(
            Tier(
                kind="host",
                tier_id=identity.host_id,
                member_ids=tuple(device_ids),
                inner_bytes_per_s=memory,
            ),
            Tier(kind="rack", tier_id="rack0", member_ids=(identity.host_id,)),
            Tier(kind="fabric", tier_id="fabric", member_ids=("rack0",)),
        ),
        source="measured" if measure_memory else "assumed",
        measured_at_s=time.time(),
        probe_s=time.monotonic() - start_s,
    )
