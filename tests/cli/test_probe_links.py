"""``geartrain probe --links``, ``--agent`` and ``--fabric-advice``."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner, Result

from example_fleets import emulated_fleet
from fabric_hosts import wrong_roce
from geartrain.cli import main
from geartrain.cli.fabric import print_advice
from geartrain.cli.fleet import find_fleet
from geartrain.cli.link_tables import print_topology
from geartrain.cli.links import read_agents
from geartrain.cli.rack_labels import read_rack_labels
from geartrain.devices.emulation.network import NetworkLab, parse_links, sweep_networks
from geartrain.errors import ConfigError
from geartrain.launch.run_directory import order_fleet
from geartrain.telemetry import write_document
from geartrain.topology.advice.advise import advise
from geartrain.topology.agent import AgentSettings, LinkAgent
from geartrain.topology.fleet_document import (
    FleetDocument,
    extend_fleet,
    read_fleet_document,
)
from geartrain.topology.host_identity import make_host_identity
from topologies import MEGABIT, make_racks

GEARTRAIN = (sys.executable, "-m", "geartrain.cli")
TOKEN = "open sesame"


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    path.chmod(0o600)
    return path


@contextmanager
def two_agents() -> Iterator[str]:
    """Agents that pass for two hosts; what --hosts takes."""
    hosts = [make_host_identity(f"node{index}", str(index), "net:[1]") for index in (1, 2)]
    with (
        LinkAgent(TOKEN, AgentSettings(), hosts[0]) as one,
        LinkAgent(TOKEN, AgentSettings(), hosts[1]) as other,
    ):
        yield f"{one.address},{other.address}"


def error_of(result: Result, exit_code: int) -> str:
    """The one line that says what is wrong."""
    assert result.exit_code == exit_code, result.output
    (line,) = [one for one in result.stderr.splitlines() if one.startswith("error: ")]
    assert "Traceback" not in result.output
    return line


def test_links_of_one_host_are_shared_memory_and_loopback(tmp_path: Path) -> None:
    output = tmp_path / "fleet.json"

    result = invoke("probe", "--links", "--fleet", "cpu", "-o", output)

    assert result.exit_code == 0, result.output
    assert re.search(r"^shared memory +[\d.]+ [MG]B/s$", result.stdout, re.MULTILINE)
    assert re.search(r"^loopback \(TCP\) +[\d.]+ [MG]B/s", result.stdout, re.MULTILINE)
    document = read_fleet_document(output)
    assert document.topology is not None
    assert document.topology.hosts[0].member_ids == ("cpu",)
    assert document.fabric is not None


def test_links_between_hosts_are_measured_shown_and_written(
    tmp_path: Path, token_file: Path
) -> None:
    output, picture = tmp_path / "fleet.json", tmp_path / "links.svg"
    files = "-o", output, "--picture", picture, "--token-file", token_file

    with two_agents() as hosts:
        result = invoke("probe", "--links", "--fleet", "cpu", "--hosts", hosts, *files)

    assert result.exit_code == 0, result.output
    assert "[geartrain] pairs: 1 of 1" in result.stderr
    assert "NIC out" in result.stdout
    assert "node1" in result.stdout
    topology = read_fleet_document(output).topology
    assert topology is not None
    assert [link.source_id[:5] for link in topology.links] == ["node1", "node2"]
    assert "<svg" in picture.read_text()


def test_json_is_the_document_that_is_written(tmp_path: Path, token_file: Path) -> None:
    output = tmp_path / "fleet.json"
    options = "--token-file", token_file, "--max-bytes", "4MB", "-o", output, "--json"

    with two_agents() as hosts:
        result = invoke("probe", "--links", "--fleet", "cpu", "--hosts", hosts, *options)

    shown = json.loads(result.stdout.splitlines()[-1])
    assert shown.pop("loopback") is None
    assert shown == json.loads(output.read_text())
    assert shown["topology"]["probe_bytes"] <= 4_000_000


def test_racks_that_a_file_names_are_used(tmp_path: Path, token_file: Path) -> None:
    racks, output = tmp_path / "racks.toml", tmp_path / "fleet.json"
    racks.write_text('[racks]\nleft = ["node1", "node2"]\n')
    files = "-o", output, "--token-file", token_file, "--racks", racks

    with two_agents() as hosts:
        result = invoke("probe", "--links", "--fleet", "cpu", "--hosts", hosts, *files)

    assert result.exit_code == 0, result.output
    topology = read_fleet_document(output).topology
    assert topology is not None
    assert [rack.tier_id for rack in topology.racks] == ["left"]


def test_wrong_token_is_one_line(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong"
    wrong.write_text("mumble")
    wrong.chmod(0o600)

    with two_agents() as hosts:
        result = invoke("probe", "--links", "--hosts", hosts, "--token-file", wrong)

    assert "refused the token" in error_of(result, exit_code=1)


def test_host_where_nobody_listens_is_named() -> None:
    result = invoke("probe", "--links", "--hosts", "127.0.0.1:9")

    assert "127.0.0.1:9 cannot be reached" in error_of(result, exit_code=1)


def test_unknown_host_is_named() -> None:
    result = invoke("probe", "--links", "--hosts", "no-such-host.invalid:7777")

    assert "no-such-host.invalid:7777" in error_of(result, exit_code=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--links", "--hosts", "node1"], "'node1' is not an agent's address"),
        (["--links", "--hosts", "a:1,a:1"], "a:1 are listed more than once"),
        (["--links", "--hosts", " , "], "names no agent"),
        (["--links", "--hosts", "a:1", "--hosts-file", "x"], "give one of them"),
        (["--links", "--hosts-file", "/no/file"], "cannot read /no/file"),
        (["--links", "--picture", "links.gif"], "ends in .png or .svg"),
        (["--links", "-o", "/proc/no/fleet.json"], "cannot write /proc/no/fleet.json"),
        (["--links", "--racks", "racks.toml"], "add --hosts"),
        (["--links", "--hosts", "a:1", "--racks", "/no/racks"], "/no/racks"),
        (["--links", "--hosts", "a:1", "--max-bytes", "much"], "'much'"),
        (["--links", "--hosts", "a:1", "--token-file", "/no/token"], "/no/token"),
        (["--links", "--emulate-links", "2x2"], "2x2"),
        (
            ["--links", "--emulate-links", "2x2:1Mbit:1Mbit", "--hosts", "a:1"],
            "leave --hosts",
        ),
        (["--links", "--agent"], "--links and --agent are different things"),
        (["--hosts", "a:1"], "--hosts goes with --links"),
        (["--interface", "eth0"], "--interface goes with --agent or --fabric-advice"),
        (["--agent", "--picture", "x.png"], "--picture goes with --links"),
        (["--agent", "--listen", "127.0.0.1:99999"], "'99999' is no port"),
        (["--agent", "--listen", "10.99.99.99"], "can be reached by others"),
        (["--agent", "--listen", "1.2.3"], "an agent on 1.2.3 can be reached by others"),
        (["--agent", "--listen", "localhost"], "name a numeric address"),
        (["--agent", "--interface", "no0"], "no interface 'no0'"),
        (["--agent", "--listen", "::1", "--interface", "lo"], "both say where"),
        (["--fabric-advice", "--interface", "no0"], "--interface no0"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str
) -> None:
    assert message in error_of(invoke("probe", *arguments), exit_code=2)


def test_agents_are_read_from_a_file_with_comments(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# two racks\n10.0.0.1:7777  # left\n\n[fd00::2]:7777\n")

    agents = read_agents(None, path)

    assert [str(agent) for agent in agents] == ["10.0.0.1:7777", "[fd00::2]:7777"]


def test_kubernetes_labels_count_for_names_and_addresses(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    node = {
        "metadata": {"name": "n1", "labels": {"topology.kubernetes.io/rack": "r7"}},
        "status": {"addresses": [{"type": "InternalIP", "address": "10.0.0.1"}]},
    }
    path.write_text(json.dumps({"kind": "List", "items": [node]}))

    labels = read_rack_labels(None, None, path)

    assert labels is not None
    assert labels.rack_by_host == {"n1": "r7", "10.0.0.1": "r7"}


@pytest.mark.parametrize(("option", "text"), [(1, "no switch here"), (2, '{"items": [1]}')])
def test_label_file_of_another_kind_is_refused(
    tmp_path: Path, option: int, text: str
) -> None:
    path = tmp_path / "labels"
    path.write_text(text)
    paths = [path if index == option else None for index in range(3)]

    with pytest.raises(ConfigError, match=r"expected|is not the output"):
        read_rack_labels(*paths)


def test_agent_says_where_it_listens_and_ends_cleanly(token_file: Path) -> None:
    command = *GEARTRAIN, "probe", "--agent", "--listen", "127.0.0.1"
    agent = subprocess.Popen(
        [*command, "--token-file", token_file, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert agent.stdout is not None
    told = json.loads(agent.stdout.readline())

    agent.send_signal(signal.SIGINT)
    _, errors = agent.communicate(timeout=30)

    assert re.fullmatch(r"127\.0\.0\.1:\d+", told["address"])
    assert agent.returncode == 0
    assert errors.strip() == "agent ended"


def test_advice_is_printed_with_reason_and_source() -> None:
    result = invoke("probe", "--fabric-advice")

    assert result.exit_code == 0, result.output
    assert "as it should be: " in result.stdout
    assert "export NCCL_SOCKET_IFNAME==" in result.stdout
    assert "NCCL_SOCKET_IFNAME" not in os.environ


def test_advice_is_one_json_object_and_a_file(tmp_path: Path) -> None:
    output = tmp_path / "advice.json"

    result = invoke("probe", "--fabric-advice", "-o", output, "--json")

    shown = json.loads(result.stdout.splitlines()[-1])
    assert shown["schema_version"] == 1
    assert shown["facts"]["host"]
    assert json.loads(output.read_text()) == shown


def test_findings_that_ports_share_are_told_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_advice(advise(wrong_roce(tmp_path).read()))

    shown = capsys.readouterr().out
    (pfc,) = re.findall(r"^error: (.*): PFC on priority", shown, re.MULTILINE)
    assert pfc == "mlx5_0 (ens1), mlx5_1 (ens2)"
    assert "likewise for the others" in shown
    assert "7 errors, 16 warnings, 4 hints" in shown


def test_table_shows_both_directions_and_notes(capsys: pytest.CaptureFixture[str]) -> None:
    uplinks = {1: (12 * MEGABIT, 50 * MEGABIT)}
    print_topology(make_racks([2, 2], uplinks=uplinks, notes=("a label lied",)))

    shown = capsys.readouterr().out
    assert re.search(r"^rack1 +node2, node3 +12 Mbit/s +50 Mbit/s$", shown, re.MULTILINE)
    assert "note: a label lied" in shown
    assert "4 hosts in 2 racks, measured in 1.25 s, 19.1 MiB sent" in shown


def test_links_stay_with_a_fleet_until_the_run_directory(tmp_path: Path) -> None:
    path = tmp_path / "fleet.json"
    topology = make_racks([2, 2])
    write_document(path, extend_fleet(emulated_fleet(0.1, 0.2), topology))

    fleet = order_fleet(find_fleet(str(path), oversubscribe=True))

    assert isinstance(fleet, FleetDocument)
    assert fleet.topology == topology
    assert [device.core_fraction for device in fleet.devices] == [0.2, 0.1]


@pytest.mark.root
@pytest.mark.slow
def test_racks_of_a_real_network_are_found_and_drawn(
    tmp_path: Path, token_file: Path
) -> None:
    output, picture = tmp_path / "fleet.json", tmp_path / "links.png"
    token = "--token-file", str(token_file)
    with NetworkLab(parse_links("2+2:200Mbit:20Mbit")) as lab:
        agents = [
            subprocess.Popen(
                lab.command(index, [*GEARTRAIN, "probe", "--agent", "--json", *token]),
                stdout=subprocess.PIPE,
                text=True,
            )
            for index in range(4)
        ]
        lines = [agent.stdout.readline() for agent in agents if agent.stdout]
        hosts = ",".join(json.loads(line)["address"] for line in lines)
        files = "-o", str(output), "--picture", str(picture), *token
        probe = *GEARTRAIN, "probe", "--links", "--fleet", "cpu", "--hosts", hosts, *files
        done = subprocess.run(
            lab.command(0, probe), capture_output=True, text=True, timeout=60, check=False
        )
        for agent in agents:
            agent.terminate()
        codes = [agent.wait(timeout=30) for agent in agents]

    assert done.returncode == 0, done.stderr
    assert codes == [0] * 4
    topology = read_fleet_document(output).topology
    assert topology is not None
    racks = [[topology.host(i).address for i in r.member_ids] for r in topology.racks]
    assert racks == [["198.18.0.1", "198.18.0.2"], ["198.18.0.3", "198.18.0.4"]]
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.root
@pytest.mark.slow
def test_emulated_hosts_are_made_measured_and_removed(tmp_path: Path) -> None:
    output = tmp_path / "fleet.json"
    before = {path.name for path in Path("/run/netns").glob("geartrain-*")}
    links = "--links", "--emulate-links", "2x2:200Mbit:20Mbit"

    result = invoke("probe", *links, "--fleet", "cpu", "-o", output)

    assert result.exit_code == 0, result.output
    assert "note: emulated: 2x2:200Mbit:20Mbit" in result.stdout
    topology = read_fleet_document(output).topology
    assert topology is not None
    assert [len(rack.member_ids) for rack in topology.racks] == [2, 2]
    made = {path.name for path in Path("/run/netns").glob("geartrain-*")} - before
    assert not {name for name in made if name.startswith(f"geartrain-{os.getpid()}-")}


@pytest.mark.root
@pytest.mark.slow
def test_killed_probe_leaves_no_agent_behind(tmp_path: Path) -> None:
    links = "--links", "--emulate-links", "2x1:200Mbit:20Mbit", "--fleet", "cpu"
    probe = subprocess.Popen(
        [*GEARTRAIN, "probe", *links], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    assert probe.stderr is not None
    assert any(b"connect: " in line for line in probe.stderr)  # so the agents run
    agents = psutil.Process(probe.pid).children()
    probe.kill()

    gone, alive = psutil.wait_procs(agents, timeout=30)
    probe.communicate(timeout=30)
    sweep_networks()

    assert len(gone) == 2
    assert alive == []
    assert not list(Path("/run/netns").glob(f"geartrain-{probe.pid}-*"))
