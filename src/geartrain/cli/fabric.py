"""``geartrain probe --fabric-advice``."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from geartrain.cli.tables import print_table
from geartrain.cli.verb import print_json
from geartrain.devices.interconnect.facts import AbsentFact, DeviceLink
from geartrain.errors import ConfigError
from geartrain.telemetry import write_document
from geartrain.topology.advice.advise import advise
from geartrain.topology.advice.ethernet import show_rate
from geartrain.topology.advice.finding import EnvironmentSetting, FabricAdvice, Finding
from geartrain.topology.fabric.affinity import NicAffinity
from geartrain.topology.fabric.facts import FabricFacts
from geartrain.topology.fabric.read import read_fabric


def show_advice(interface: str | None, output: Path | None, *, as_json: bool) -> None:
    """Check this host and print what to change; nothing is set.

    Args:
        interface: The network interface for TCP; None chooses.
        output: Where to write the advice as JSON as well.
        as_json: Print JSON instead.

    Raises:
        ConfigError: If there is no such interface.
    """
    facts = read_fabric()
    if interface is not None and facts.interface(interface) is None:
        names = ", ".join(one.name for one in facts.interfaces) or "none"
        msg = f"--interface {interface}: this host has {names}; name one of them"
        raise ConfigError(msg)
    advice = advise(facts, interface)
    if output is not None:
        write_document(output, advice)
    if as_json:
        print_json(advice)
        return
    print_advice(advice)
    if output is not None:
        click.echo(f"advice written to {output}")


def print_advice(advice: FabricAdvice) -> None:
    """Print findings, the environment, and what could not be checked."""
    for line in advice.summary:
        click.echo(line)
    wrong = [one for one in advice.findings if one.severity != "good"]
    good = [one for one in advice.findings if one.severity == "good"]
    for alike in _group(wrong):
        click.echo("")
        for line in _finding_lines(alike):
            click.echo(line)
    click.echo("")
    checks = ", ".join(dict.fromkeys(one.rule for one in good)) or "nothing"
    click.echo(f"{_count(wrong)}; as it should be: {checks}")
    print_affinities(advice.affinities)
    _print_environment(advice.environment)
    print_absent(advice.unchecked, "not checked")


def print_interconnect(facts: FabricFacts, affinities: Sequence[NicAffinity]) -> None:
    """Print what connects the devices of this host."""
    for device in facts.pci_devices:
        link = device.link
        rate = (
            "no PCIe link told" if link is None else f"PCIe {show_rate(link.bytes_per_s)}"
        )
        node = "" if device.numa_node is None else f", memory node {device.numa_node}"
        click.echo(f"{device.address}  {device.kind}, {rate}{node}")
    for rdma in facts.rdma_devices:
        for port in rdma.ports:
            rate = show_rate(port.bytes_per_s)
            state = "active" if port.is_active else port.state
            click.echo(f"{rdma.name}:{port.port}  {port.link_layer}, {rate}, {state}")
    for line in map(_device_link_line, facts.device_links):
        click.echo(line)
    print_affinities(affinities)


def print_affinities(affinities: Sequence[NicAffinity]) -> None:
    """Print which RDMA devices are nearest to each accelerator."""
    if not affinities:
        return
    click.echo("")
    rows = ((one.accelerator, one.distance, ", ".join(one.nearest)) for one in affinities)
    print_table(("accelerator", "distance", "nearest RDMA"), rows, num_text_columns=3)


def print_absent(absences: Sequence[AbsentFact], title: str) -> None:
    """Print what could not be read, and why."""
    if not absences:
        return
    click.echo("")
    click.echo(f"{title}, since it could not be read:")
    for absent in absences:
        click.echo(f"  {absent.what}: {absent.reason}")


def _group(findings: Sequence[Finding]) -> list[list[Finding]]:
    """Put what several ports have in common together: hosts have eight of them."""
    groups: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in findings:
        key = (finding.rule, finding.severity, finding.found)
        groups.setdefault(key, []).append(finding)
    return list(groups.values())


def _finding_lines(alike: Sequence[Finding]) -> Iterator[str]:
    finding = alike[0]
    subjects = ", ".join(one.subject for one in alike)
    likewise = len({one.action for one in alike}) > 1
    yield f"{finding.severity}: {subjects}: {finding.found}"
    yield f"  expected  {finding.expected}"
    yield f"  do        {finding.action}{'; likewise for the others' if likewise else ''}"
    yield f"  why       {finding.why}"
    yield f"  read from {finding.read_from}"
    yield f"  source    {finding.source}"


def _print_environment(settings: Sequence[EnvironmentSetting]) -> None:
    click.echo("")
    if not settings:
        click.echo("no environment to advise: no network interface is up")
        return
    click.echo("environment (set nothing that a cluster's own image already sets):")
    for setting in settings:
        click.echo(f"  export {setting.name}={shlex.quote(setting.value)}")
        click.echo(f"      {setting.why} [{setting.source}]")


def _count(wrong: Sequence[Finding]) -> str:
    words = []
    for severity in ("error", "warning", "hint"):
        number = sum(one.severity == severity for one in wrong)
        if number:
            words.append(f"{number} {severity}{'s' if number > 1 else ''}")
    return ", ".join(words) or "nothing to change"


def _device_link_line(link: DeviceLink) -> str:
    rate = "" if link.bytes_per_s is None else f", {show_rate(link.bytes_per_s)} each way"
    active = f"{link.num_active} of {link.num_links} links"
    return f"{link.source} -> {link.target}  {link.kind}, {active}{rate}"
