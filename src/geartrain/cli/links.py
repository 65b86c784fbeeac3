"""``geartrain probe --links``."""

from __future__ import annotations

import dataclasses
import importlib.util
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import click
import msgspec

from geartrain.cli.emulated_agents import emulated_agents
from geartrain.cli.fabric import print_absent, print_interconnect
from geartrain.cli.fleet import show_progress
from geartrain.cli.link_agent import read_token
from geartrain.cli.link_tables import print_topology, show_latency
from geartrain.cli.rack_labels import read_rack_labels
from geartrain.cli.verb import print_json
from geartrain.devices.probe import resolve_fleet
from geartrain.devices.profile import DeviceProfile, Fleet, MeasuredRate
from geartrain.errors import ConfigError
from geartrain.monitoring.link_charts import draw_links
from geartrain.telemetry import write_document
from geartrain.telemetry.documents import write_atomically
from geartrain.topology.advice.advise import relevant_absences
from geartrain.topology.agent_protocol import AgentAddress
from geartrain.topology.fabric.affinity import nearest_nics
from geartrain.topology.fabric.facts import FabricFacts
from geartrain.topology.fabric.loopback import LoopbackReading, measure_loopback
from geartrain.topology.fabric.read import read_fabric
from geartrain.topology.fleet_document import extend_fleet
from geartrain.topology.limits import ProbeLimits, ProbeProgress
from geartrain.topology.local import local_topology
from geartrain.topology.probe import probe_topology
from geartrain.topology.profile import LinkProfile, Topology
from geartrain.units import format_bytes, format_rate, parse_bytes

_BETWEEN_LINES_S = 0.5
"""A line of progress at most so often, but for a stage's last one."""
_FORMATS: dict[str, Literal["png", "svg"]] = {".png": "png", ".svg": "svg"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOptions:
    """What the command line says."""

    fleet_spec: str | None
    output: Path | None
    use_cache: bool
    oversubscribe: bool
    hosts: str | None
    hosts_file: Path | None
    token_file: Path | None
    racks: Path | None
    scontrol: Path | None
    kubernetes_labels: Path | None
    picture: Path | None
    max_bytes: str | None
    emulate_links: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    fleet: Fleet
    topology: Topology
    fabric: FabricFacts
    loopback: LoopbackReading | None = None


def probe_links(options: LinkOptions, *, as_json: bool) -> None:
    """Measure links, print them, and write them where asked.

    Raises:
        ConfigError: If an option is wrong or a file can't be written.
        CommunicationError: If a host can't be reached, or two can't reach each other.
    """
    _check_outputs(options)
    agents = read_agents(options.hosts, options.hosts_file)
    measured = _probe(options, agents)
    document = extend_fleet(measured.fleet, measured.topology, measured.fabric)
    if options.output is not None:
        write_document(options.output, document)
    if options.picture is not None:
        file_format = _FORMATS[options.picture.suffix.lower()]
        words = () if options.emulate_links is None else ("emulated",)
        picture = draw_links(measured.topology, file_format, words)
        write_atomically(options.picture, picture)
    if as_json:
        loopback = msgspec.to_builtins(measured.loopback)
        print_json(msgspec.to_builtins(document) | {"loopback": loopback})
        return
    print_topology(measured.topology)
    if measured.loopback is not None:
        _print_host(measured)
    for path in (options.output, options.picture):
        if path is not None:
            click.echo(f"written to {path}")


def read_agents(hosts: str | None, hosts_file: Path | None) -> tuple[AgentAddress, ...]:
    """Read the addresses of agents.

    Args:
        hosts: Separated by commas.
        hosts_file: One a line; what follows ``#`` is passed over.

    Raises:
        ConfigError: If both are given, one is no address, or one is there twice.
    """
    if hosts is not None and hosts_file is not None:
        msg = "--hosts and --hosts-file both name the agents; give one of them"
        raise ConfigError(msg)
    if hosts is None and hosts_file is None:
        return ()
    parts = hosts.split(",") if hosts is not None else _lines(hosts_file)
    texts = [part.strip() for part in parts if part.strip()]
    agents = tuple(AgentAddress.parse(text) for text in texts)
    if not agents:
        where = "--hosts" if hosts is not None else str(hosts_file)
        msg = f"{where} names no agent; write HOST:PORT, as geartrain probe --agent prints"
        raise ConfigError(msg)
    twice = sorted({str(agent) for agent in agents if agents.count(agent) > 1})
    if twice:
        msg = f"the agents {', '.join(twice)} are listed more than once; name each once"
        raise ConfigError(msg)
    return agents


def _lines(path: Path | None) -> list[str]:
    assert path is not None
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        msg = f"cannot read {path}: {why}; expected lines of HOST:PORT"
        raise ConfigError(msg) from error
    return [line.partition("#")[0] for line in text.splitlines()]


def _check_outputs(options: LinkOptions) -> None:
    """Refuse at once what would fail only after measuring."""
    if options.picture is not None:
        if options.picture.suffix.lower() not in _FORMATS:
            msg = f"--picture {options.picture}: expected a name that ends in .png or .svg"
            raise ConfigError(msg)
        if importlib.util.find_spec("matplotlib") is None:
            msg = "--picture needs matplotlib; pip install 'geartrain[report]'"
            raise ConfigError(msg)
    for path in (options.output, options.picture):
        if path is not None:
            _check_writable(path)


def _check_writable(path: Path) -> None:
    parent = next(one for one in path.resolve().parents if one.exists())
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        msg = f"cannot write {path}: {error.strerror}; choose another place"
        raise ConfigError(msg) from error


def _probe(options: LinkOptions, agents: Sequence[AgentAddress]) -> _Measured:
    if options.emulate_links is None:
        if not agents:
            return _probe_here(options)
        return _probe_hosts(options, agents, read_token(options.token_file))
    if agents:
        msg = "--emulate-links makes the hosts itself; leave --hosts and --hosts-file out"
        raise ConfigError(msg)
    show_progress(f"emulating {options.emulate_links}, and an agent on each host")
    with emulated_agents(options.emulate_links) as emulated:
        measured = _probe_hosts(options, emulated.addresses, emulated.token)
    notes = (f"emulated: {options.emulate_links}", *measured.topology.notes)
    topology = dataclasses.replace(measured.topology, notes=notes)
    return dataclasses.replace(measured, topology=topology)


def _probe_hosts(
    options: LinkOptions, agents: Sequence[AgentAddress], token: str
) -> _Measured:
    labels = read_rack_labels(options.racks, options.scontrol, options.kubernetes_labels)
    limits = ProbeLimits(
        max_bytes=None if options.max_bytes is None else parse_bytes(options.max_bytes)
    )
    # First what may be refused: measuring takes seconds.
    fleet = resolve_fleet(options.fleet_spec, oversubscribe=options.oversubscribe)
    topology = probe_topology(agents, token, labels, _Progress(), limits)
    return _Measured(fleet=fleet, topology=topology, fabric=read_fabric())


def _probe_here(options: LinkOptions) -> _Measured:
    needing = {
        "--token-file": options.token_file,
        "--racks": options.racks,
        "--scontrol": options.scontrol,
        "--kubernetes-labels": options.kubernetes_labels,
        "--max-bytes": options.max_bytes,
    }
    idle = [name for name, value in needing.items() if value is not None]
    if idle:
        msg = f"{', '.join(idle)} says something of several hosts; add --hosts A:PORT,..."
        raise ConfigError(msg)
    fleet = resolve_fleet(
        options.fleet_spec,
        oversubscribe=options.oversubscribe,
        probe=True,
        use_cache=options.use_cache,
        on_progress=show_progress,
    )
    show_progress("shared memory and loopback")
    device_ids = [device.device_id for device in fleet.devices]
    topology = local_topology(device_ids, measure_memory=True)
    (host,) = topology.hosts
    links = tuple(
        link for device in fleet.devices for link in _device_links(host.tier_id, device)
    )
    return _Measured(
        fleet=fleet,
        topology=dataclasses.replace(topology, links=links),
        fabric=read_fabric(),
        loopback=measure_loopback(),
    )


def _device_links(host_id: str, device: DeviceProfile) -> list[LinkProfile]:
    """Copies between a host and its device; none where it works in host memory."""

    def link(source: str, target: str, rate: MeasuredRate | None) -> list[LinkProfile]:
        if rate is None:
            return []
        return [
            LinkProfile(
                source_id=source,
                target_id=target,
                bytes_per_s=rate.per_s,
                latency_s=0.0,  # the probe takes rates of large copies only
                backend="pcie",
            )
        ]

    there = link(host_id, device.device_id, device.host_to_device_bytes_per_s)
    return there + link(device.device_id, host_id, device.device_to_host_bytes_per_s)


def _print_host(measured: _Measured) -> None:
    (host,) = measured.topology.hosts
    click.echo("")
    if host.inner_bytes_per_s is not None:
        click.echo(f"shared memory   {format_rate(host.inner_bytes_per_s, 'B/s')}")
    if measured.loopback is not None:
        rate = format_rate(measured.loopback.bytes_per_s, "B/s")
        latency = show_latency(measured.loopback.latency_s)
        click.echo(f"loopback (TCP)  {rate} ({latency} one way)")
    for link in measured.topology.links:
        rate = format_rate(link.bytes_per_s, "B/s")
        click.echo(f"{link.source_id} -> {link.target_id}  {rate}")
    in_memory = [
        device.device_id
        for device in measured.fleet.devices
        if device.host_to_device_bytes_per_s is None
    ]
    if in_memory:
        click.echo(f"no copy to measure: {', '.join(in_memory)} works in host memory")
    click.echo("")
    print_interconnect(measured.fabric, nearest_nics(measured.fabric))
    print_absent(relevant_absences(measured.fabric), "not shown")


@dataclass(slots=True)
class _Progress:
    """Prints how far the probe is, but not every step."""

    shown_at_s: float = field(default=float("-inf"))

    def __call__(self, progress: ProbeProgress) -> None:
        now_s = time.monotonic()
        is_last = progress.done >= progress.total
        if not is_last and now_s - self.shown_at_s < _BETWEEN_LINES_S:
            return
        self.shown_at_s = now_s
        show_progress(
            f"{progress.stage}: {progress.done} of {progress.total}, "
            f"{progress.elapsed_s:.1f} s, {format_bytes(progress.sent_bytes)} sent"
        )
