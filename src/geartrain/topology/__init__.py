"""How hosts are connected: measured links, hosts in racks, racks in a fabric."""

from geartrain.topology.profile import LinkProfile, Tier, TierKind, Topology

__all__ = ["LinkProfile", "Tier", "TierKind", "Topology"]
