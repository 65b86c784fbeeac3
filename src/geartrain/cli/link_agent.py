"""``geartrain probe --agent``: answers the link probe of another host."""

from __future__ import annotations

import signal
import threading
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import click

from geartrain.cli.verb import print_json
from geartrain.devices.probe import resolve_fleet
from geartrain.errors import ConfigError
from geartrain.topology.agent import AgentSettings, LinkAgent
from geartrain.topology.agent_protocol import is_loopback
from geartrain.topology.interfaces import InterfaceChoice, choose_interface, interface_of

_MAX_PORT = 65535
_OTHERS_MASK = 0o077


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions:
    """What the command line says."""

    listen: str | None
    interface: str | None
    token_file: Path | None
    fleet_spec: str | None


def run_agent(options: AgentOptions, *, as_json: bool) -> None:
    """Answer until Ctrl-C or SIGTERM.

    Raises:
        ConfigError: If it can't listen there, or may not without a token.
    """
    token = read_token(options.token_file)
    choice, port = _where(options, has_token=bool(token))
    if not token and not is_loopback(choice.address):
        msg = (
            f"an agent on {choice.address} can be reached by others: give --token-file "
            "FILE with a secret, or --listen 127.0.0.1"
        )
        raise ConfigError(msg)
    device_ids: tuple[str, ...] = ()
    if options.fleet_spec is not None:
        fleet = resolve_fleet(options.fleet_spec, oversubscribe=True)
        device_ids = tuple(device.device_id for device in fleet.devices)
    settings = AgentSettings(
        addresses=(choice.address,), port=port, device_ids=device_ids, notes=choice.notes
    )
    stop = threading.Event()

    def end(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    before = [
        (number, signal.signal(number, end)) for number in (signal.SIGINT, signal.SIGTERM)
    ]
    try:
        with LinkAgent(token, settings) as agent:
            _say(agent, choice, as_json=as_json)
            stop.wait()
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    click.echo("agent ended", err=True)


def read_token(path: Path | None) -> str:
    """Read the secret; empty where none was given.

    Raises:
        ConfigError: If the file can't be read or is empty.
    """
    if path is None:
        return ""
    try:
        token = path.read_text().strip()
        mode = path.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        msg = f"cannot read the token file {path}: {why}; expected a line of text"
        raise ConfigError(msg) from error
    if not token:
        msg = f"the token file {path} is empty; write a secret: openssl rand -hex 16"
        raise ConfigError(msg)
    if mode & _OTHERS_MASK:
        click.echo(f"warning: others can read {path}; chmod 600 {path}", err=True)
    return token


def _where(options: AgentOptions, *, has_token: bool) -> tuple[InterfaceChoice, int]:
    address, port = split_address(options.listen or "")
    if address and options.interface is not None:
        msg = (
            f"--listen {options.listen} and --interface {options.interface} both say where "
            "to listen; give one, or --listen :PORT"
        )
        raise ConfigError(msg)
    if address:
        name, reason = interface_of(address) or "?", "was asked for"
        return InterfaceChoice(address=address, interface=name, reason=reason), port
    if options.interface is None and not has_token:
        return InterfaceChoice(
            address="127.0.0.1", interface="lo", reason="needs no token"
        ), port
    return choose_interface(name=options.interface), port


def split_address(text: str) -> tuple[str, int]:
    """Read ``ADDRESS[:PORT]``; an absent address is empty, an absent port 0.

    Raises:
        ConfigError: If the port is none.

    >>> split_address("10.0.0.5:7777"), split_address("fd00::5"), split_address(":80")
    (('10.0.0.5', 7777), ('fd00::5', 0), ('', 80))
    >>> split_address("[fd00::5]:7777")
    ('fd00::5', 7777)
    """
    text = text.strip()
    if text.startswith("["):
        address, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    elif text.count(":") > 1:
        address, port = text, ""
    else:
        address, _, port = text.partition(":")
    if port and not (port.isdecimal() and int(port) <= _MAX_PORT):
        msg = f"--listen {text}: {port!r} is no port; expected 0 to {_MAX_PORT}"
        raise ConfigError(msg)
    return address, int(port or 0)


def _say(agent: LinkAgent, choice: InterfaceChoice, *, as_json: bool) -> None:
    if as_json:
        shown = {
            "address": str(agent.address),
            "host_id": agent.identity.host_id,
            "interface": choice.interface,
        }
        print_json(shown)
        return
    click.echo(
        f"agent of {agent.identity.host_id} at {agent.address} on {choice.interface}, "
        f"which {choice.reason}"
    )
    for note in choice.notes:
        click.echo(f"note: {note}")
    click.echo(f"elsewhere: geartrain probe --links --hosts {agent.address},...")
