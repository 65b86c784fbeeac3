"""``geartrain probe``: devices, links between hosts, settings of the fabric."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from geartrain.cli.fabric import show_advice
from geartrain.cli.fleet import show_progress
from geartrain.cli.link_agent import AgentOptions, run_agent
from geartrain.cli.links import LinkOptions, probe_links
from geartrain.cli.tables import print_table
from geartrain.cli.verb import (
    Verb,
    fleet_option,
    json_option,
    oversubscribe_option,
    print_json,
)
from geartrain.devices.probe import resolve_fleet
from geartrain.devices.profile import DeviceProfile, Fleet, MeasuredRate
from geartrain.errors import ConfigError
from geartrain.telemetry import write_document
from geartrain.units import format_bytes, format_rate

_NOISY_FRACTION = 0.5
"""A spread above half of the median says more about the machine's other work."""
_FILE = click.Path(path_type=Path, dir_okay=False)
_OF_LINKS = (
    "hosts",
    "hosts_file",
    "racks",
    "scontrol",
    "kubernetes_labels",
    "picture",
    "max_bytes",
    "emulate_links",
)
_OF_AGENT = ("listen",)


@click.command(cls=Verb)
@fleet_option
@click.option(
    "-o",
    "--output",
    type=_FILE,
    help="Write the fleet to this file, for --fleet; with --links the links as well.",
)
@click.option("--no-cache", is_flag=True, help="Measure again what was measured before.")
@oversubscribe_option
@click.option(
    "--links",
    is_flag=True,
    help="Measure links: within this host, or between the hosts of --hosts.",
)
@click.option(
    "--hosts", metavar="A:PORT,B:PORT", help="With --links: the agents, one a host."
)
@click.option("--hosts-file", type=_FILE, help="The agents, one a line.")
@click.option(
    "--racks", type=_FILE, help='Which host is in which rack: [racks] left = ["node1"].'
)
@click.option("--scontrol", type=_FILE, help="Output of `scontrol show topology`.")
@click.option(
    "--kubernetes-labels", type=_FILE, help="Output of `kubectl get nodes -o json`."
)
@click.option("--picture", type=_FILE, help="Draw the links: FILE.png or FILE.svg.")
@click.option(
    "--max-bytes",
    metavar="SIZE",
    help="All that --links may send, such as 64MB, the default up to 8 hosts.",
)
@click.option(
    "--emulate-links",
    metavar="SPEC",
    help="With --links: between emulated hosts, 2x4:500Mbit:50Mbit is 2 racks of 4 hosts, "
    "their cards, and the racks' uplinks. Needs root.",
)
@click.option(
    "--agent", is_flag=True, help="Answer the --links of another host, until Ctrl-C."
)
@click.option(
    "--listen",
    metavar="ADDRESS[:PORT]",
    help="With --agent: where; else the fastest interface, any port.",
)
@click.option("--token-file", type=_FILE, help="The secret that agents and --links share.")
@click.option("--interface", metavar="NAME", help="The network interface to use.")
@click.option(
    "--fabric-advice",
    is_flag=True,
    help="Check this host's network settings; print what to set, and set nothing.",
)
@json_option
def probe(
    fleet_spec: str | None,
    output: Path | None,
    no_cache: bool,
    oversubscribe: bool,
    as_json: bool,
    **options: Any,  # Any: those of --links, --agent and --fabric-advice
) -> None:
    """Measure the devices: how fast they multiply, read memory, and copy.

    With --links, measure what connects them; see also --agent and --fabric-advice.
    """
    mode = _choose_mode(options)
    token_file, interface = options["token_file"], options["interface"]
    if mode == "agent":
        agent = AgentOptions(
            listen=options["listen"],
            interface=interface,
            token_file=token_file,
            fleet_spec=fleet_spec,
        )
        run_agent(agent, as_json=as_json)
        return
    if mode == "fabric_advice":
        show_advice(interface, output, as_json=as_json)
        return
    if mode == "links":
        links = LinkOptions(
            fleet_spec=fleet_spec,
            output=output,
            use_cache=not no_cache,
            oversubscribe=oversubscribe,
            token_file=token_file,
            **{name: options[name] for name in _OF_LINKS},
        )
        probe_links(links, as_json=as_json)
        return
    fleet = resolve_fleet(
        fleet_spec,
        oversubscribe=oversubscribe,
        probe=True,
        use_cache=not no_cache,
        on_progress=show_progress,
    )
    if output is not None:
        write_document(output, fleet)
    if as_json:
        print_json(fleet)
        return
    print_fleet(fleet)
    if output is not None:
        click.echo(f"fleet written to {output}")


def _choose_mode(options: dict[str, Any]) -> str | None:  # Any: values of options
    """Find what is asked for, and refuse options that belong to something else.

    Raises:
        ConfigError: If two things are asked for, or an option has nothing to act on.
    """
    modes = [name for name in ("links", "agent", "fabric_advice") if options[name]]
    if len(modes) > 1:
        both = " and ".join(_flag(name) for name in modes)
        msg = f"{both} are different things to do; give one of them"
        raise ConfigError(msg)
    mode = modes[0] if modes else None
    allowed = {
        "links": (*_OF_LINKS, "token_file"),
        "agent": (*_OF_AGENT, "token_file", "interface"),
        "fabric_advice": ("interface",),
    }
    for name in (*_OF_LINKS, *_OF_AGENT, "token_file", "interface"):
        if options[name] is not None and name not in allowed.get(mode or "", ()):
            wanted = [_flag(m) for m, names in allowed.items() if name in names]
            msg = f"{_flag(name)} goes with {' or '.join(wanted)}; add it or leave this out"
            raise ConfigError(msg)
    return mode


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def print_fleet(fleet: Fleet) -> None:
    """Print what was measured, a line a quantity."""
    for device in fleet.devices:
        memory = format_bytes(device.memory_limit_bytes or device.memory_bytes)
        share = (
            "" if device.core_fraction is None else f", {device.core_fraction:g} of a core"
        )
        click.echo(
            f"{device.device_id}  {device.name} ({device.vendor}), {memory}{share}, "
            f"{device.source}"
        )
        rows = (("  ", *row) for row in rate_rows(device))
        print_table(("", "", "", ""), rows, num_text_columns=2)
    count = len(fleet.devices)
    noun = "device" if count == 1 else "devices"
    click.echo(f"{count} {noun}, {', '.join(fleet.labels)}")
    rates = [rate for device in fleet.devices for _, rate, _ in _rates(device)]
    if any(rate.spread_fraction > _NOISY_FRACTION for rate in rates):
        click.echo("noisy: something else was using the device; --no-cache measures again")


def rate_rows(device: DeviceProfile) -> Iterator[tuple[str, str, str]]:
    """Name, rate and spread of all that was measured on a device."""
    for name, rate, unit in _rates(device):
        spread = f"median of {rate.num_repeats}, spread {rate.spread_fraction:.0%}"
        noisy = ", noisy" if rate.spread_fraction > _NOISY_FRACTION else ""
        yield name, format_rate(rate.per_s, unit), spread + noisy


def _rates(device: DeviceProfile) -> list[tuple[str, MeasuredRate, str]]:
    rates: list[tuple[str, MeasuredRate | None, str]] = [
        (f"{dtype} matmul", rate, "FLOP/s") for dtype, rate in device.flop_per_s.items()
    ]
    rates += [
        ("memory", device.memory_bytes_per_s, "B/s"),
        ("host to device", device.host_to_device_bytes_per_s, "B/s"),
        ("device to host", device.device_to_host_bytes_per_s, "B/s"),
    ]
    return [(name, rate, unit) for name, rate, unit in rates if rate is not None]
