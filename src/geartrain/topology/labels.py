"""What others say about which host is in which rack: read, and only believed if measured.

Labels name the racks, are verified first, and find an uplink that single pairs of hosts
do not fill. Where measurement says otherwise, measurement is right.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import msgspec

from geartrain.errors import ConfigError

KUBERNETES_KEYS = (
    "topology.kubernetes.io/rack",
    "network.topology.nvidia.com/leaf",
    "cloud.google.com/gce-topology-subblock",
    "cloud.google.com/gce-topology-block",
    "topology.k8s.aws/network-node-layer-3",
    "topology.k8s.aws/network-node-layer-2",
    "topology.kubernetes.io/zone",
    "failure-domain.beta.kubernetes.io/zone",
)
"""Node labels that name a rack, a switch or a zone, the narrowest first."""
_RACK_NAME = re.compile(
    r"(?<![a-z])(?:rack|rk|r|cab|cabinet|pod|leaf)[-_]?(\d+)", re.IGNORECASE
)
_BRACKETS = re.compile(r"^(?P<head>[^\[\]]*)\[(?P<body>[^\[\]]+)\](?P<tail>.*)$")
_FIELD = re.compile(r"(\w+)=(\S*)")
_MAX_RANGE = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Labels:
    """A rack's name by host."""

    rack_by_host: Mapping[str, str]
    """A host is named by its id, its host name with or without domain, or its address."""
    source: str
    """Where they come from, for messages."""

    def rack_of(self, names: Iterable[str]) -> str | None:
        """The rack of the first of these names that is labelled."""
        for name in names:
            for key in (name, name.partition(".")[0]):
                if key and key in self.rack_by_host:
                    return self.rack_by_host[key]
        return None


def labels_from_hostnames(hostnames: Sequence[str]) -> Labels:
    """Read racks out of host names.

    Args:
        hostnames: Such as ``rack12-node3`` or ``gpu-r02-07``.

    Returns:
        Labels of the hosts whose name holds a rack; empty where all are in one, which
        would say nothing.

    >>> labels_from_hostnames(["rack1-node1", "rack2-node1", "db"]).rack_by_host
    {'rack1-node1': 'rack1', 'rack2-node1': 'rack2'}
    """
    racks = {
        name: f"rack{int(match[1])}"
        for name in hostnames
        if (match := _RACK_NAME.search(name.partition(".")[0])) is not None
    }
    if len(set(racks.values())) < 2:  # noqa: PLR2004 - one rack tells nothing apart
        racks = {}
    return Labels(rack_by_host=racks, source="host names")


def labels_from_kubernetes(
    node_labels: Mapping[str, Mapping[str, str]], keys: Sequence[str] = KUBERNETES_KEYS
) -> Labels:
    """Read racks out of Kubernetes node labels.

    Args:
        node_labels: Each node's labels, by node name.
        keys: Label names, the narrowest first; the first that every node has decides,
            else the one that most have.

    >>> zone = "topology.kubernetes.io/zone"
    >>> labels_from_kubernetes({"n1": {zone: "a"}, "n2": {zone: "b"}}).rack_by_host
    {'n1': 'a', 'n2': 'b'}
    """
    counts = {key: sum(key in labels for labels in node_labels.values()) for key in keys}
    key = max(keys, key=lambda k: (counts[k], -keys.index(k)))
    return Labels(
        rack_by_host={n: labels[key] for n, labels in node_labels.items() if key in labels},
        source=f"the Kubernetes label {key}",
    )


def labels_from_scontrol(text: str) -> Labels:
    """Read racks out of what ``scontrol show topology`` prints.

    Args:
        text: Of the tree plugin (``SwitchName=... Level=0 Nodes=...``) or the block
            plugin (``BlockName=... Nodes=...``).

    Raises:
        ConfigError: If it names no switch or block with nodes.

    >>> labels_from_scontrol("SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[1-2]").rack_by_host
    {'n1': 's1', 'n2': 's1'}
    """
    racks: dict[str, str] = {}
    for line in text.splitlines():
        fields = dict(_FIELD.findall(line))
        name = fields.get("SwitchName") or fields.get("BlockName")
        # Higher switches list all nodes below them; a rack is a leaf switch.
        if name is None or int(fields.get("Level") or 0) != 0:
            continue
        for node in expand_host_list(fields.get("Nodes", "")):
            racks.setdefault(node, name)
    if not racks:
        start = text.strip().splitlines()[:1]
        msg = (
            f"no switch or block with nodes in {start}; expected what `scontrol show "
            "topology` prints, such as 'SwitchName=s1 Level=0 LinkSpeed=1 Nodes=n[1-4]'"
        )
        raise ConfigError(msg)
    return Labels(rack_by_host=racks, source="scontrol show topology")


def expand_host_list(text: str) -> tuple[str, ...]:
    """Write out Slurm's short form of a list of hosts.

    Raises:
        ConfigError: If brackets or a range are malformed.

    >>> expand_host_list("n[01-03,7],login,r[1-2]x[1-2]")
    ('n01', 'n02', 'n03', 'n7', 'login', 'r1x1', 'r1x2', 'r2x1', 'r2x2')
    """
    hosts: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text):
        if part and part != "(null)":
            hosts += _expand(part)
    return tuple(hosts)


def _expand(part: str) -> list[str]:
    match = _BRACKETS.match(part)
    if match is None:
        if "[" in part or "]" in part:
            msg = f"{part!r} is not a host list; expected such as n[1-4,7]"
            raise ConfigError(msg)
        return [part]
    expanded = []
    for piece in match["body"].split(","):
        first, dash, last = piece.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            msg = f"{part!r} has {piece!r} in brackets; expected numbers such as 1-4"
            raise ConfigError(msg)
        numbers = range(int(first), int(last or first) + 1)
        if len(numbers) > _MAX_RANGE:
            msg = f"{part!r} names {len(numbers)} hosts; expected at most {_MAX_RANGE}"
            raise ConfigError(msg)
        expanded += [f"{match['head']}{n:0{len(first)}d}" for n in numbers]
    return [f"{host}{tail}" for host in expanded for tail in _expand_tail(match["tail"])]


def _expand_tail(tail: str) -> list[str]:
    return _expand(tail) if tail else [""]


def read_labels(path: Path) -> Labels:
    """Read a user's file: racks with their hosts, as TOML or JSON.

    The file holds ``racks``, a table from a rack's name to a list of hosts::

        [racks]
        left = ["node1", "node2"]
        right = ["10.0.1.7", "node4"]

    Raises:
        ConfigError: If it cannot be read, holds something else, or puts a host in two.
    """
    expected = 'expected [racks] with lists of hosts, such as left = ["node1", "node2"]'
    try:
        data = path.read_bytes()
    except OSError as error:
        msg = f"cannot read the racks in {path}: {error.strerror}; {expected}"
        raise ConfigError(msg) from error
    try:
        raw = (
            msgspec.json.decode(data)
            if path.suffix.lower() == ".json"
            else tomllib.loads(data.decode())
        )
        racks = msgspec.convert(raw, dict[str, dict[str, list[str]]])["racks"]
    except (msgspec.MsgspecError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        msg = f"{path} holds no racks: {error}; {expected}"
        raise ConfigError(msg) from error
    except KeyError as error:
        msg = f"{path} has no table named racks; {expected}"
        raise ConfigError(msg) from error
    counts = Counter(host for hosts in racks.values() for host in hosts)
    twice = sorted(host for host, count in counts.items() if count > 1)
    if twice:
        msg = f"{path} lists {', '.join(twice)} more than once; put each host in one rack"
        raise ConfigError(msg)
    if not counts:
        msg = f"{path} has racks without any host; {expected}"
        raise ConfigError(msg)
    return Labels(
        rack_by_host={host: rack for rack, hosts in racks.items() for host in hosts},
        source=str(path),
    )


def contested_pairs(
    racks: Sequence[Sequence[int]], labels: Sequence[str | None]
) -> tuple[tuple[int, int], ...]:
    """Pairs of which the labels and the racks say different things."""
    rack_of = {host: index for index, rack in enumerate(racks) for host in rack}
    return tuple(
        (a, b)
        for a, b in combinations(range(len(labels)), 2)
        if labels[a] is not None
        and labels[b] is not None
        and (labels[a] == labels[b]) != (rack_of[a] == rack_of[b])
    )


def group_by_label(labels: Sequence[str | None]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Positions of the hosts of each label, in order of their first.

    >>> group_by_label(["b", "a", None, "b"])
    (('b', (0, 3)), ('a', (1,)))
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for position, label in enumerate(labels):
        if label is not None:
            groups[label].append(position)
    return tuple((label, tuple(members)) for label, members in groups.items())
