"""An agent as a process: started, stopped, killed, and its trainer killed."""

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch

from geartrain.checkpoint.agent.caller import AgentCaller
from geartrain.checkpoint.agent.process import start_agent
from geartrain.checkpoint.agent.recovery import Recovery
from geartrain.checkpoint.agent.settings import AgentSettings
from geartrain.checkpoint.agent.shard_layout import (
    SnapshotLabel,
    copy_shard,
    lay_out,
    make_facts,
)
from geartrain.checkpoint.ranges import whole_ranges
from geartrain.errors import CommunicationError
from node_agents import (
    LIMIT_S,
    TOKEN,
    Trainer,
    agent_settings,
    logged_step,
    make_state,
    read_back,
    sizes_of,
    until_heard,
)


def test_the_agent_imports_no_torch() -> None:
    code = (
        "import sys, geartrain.checkpoint.agent.process; "
        "sys.exit(' '.join(m for m in ('torch', 'scipy') if m in sys.modules) or 0)"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, timeout=60
    )

    assert (done.returncode, done.stderr) == (0, b"")


_MID_COPY = """
import sys
from pathlib import Path
import msgspec
from geartrain.checkpoint.agent.link import AgentLink, Reservation
from geartrain.checkpoint.agent.messages import SnapshotFacts
link = None
for step in (1, 2):
    folder = Path(sys.argv[1])
    facts = msgspec.json.decode((folder / f"{step}.json").read_bytes(), type=SnapshotFacts)
    if link is None:
        link = AgentLink(sys.argv[2], Reservation(
            member_id="d0", incarnation="first", snapshot_bytes=facts.num_bytes))
    while (buffer := link.begin()) is None:
        pass
    data = (folder / f"{step}.bytes").read_bytes()
    buffer[:len(data)] = data
    link.seal(facts)
    link.wait_kept(step, 20.0)
while (buffer := link.begin()) is None:
    pass
buffer[:1000] = b"x" * 1000
print("copying", flush=True)
sys.stdin.read()
"""
"""A trainer without torch, which takes seconds to import."""


def _write_snapshots(folder: Path) -> None:
    state = make_state(0)
    layout = lay_out(state, whole_ranges(sizes_of(state)))
    for step in (1, 2):
        buffer = memoryview(bytearray(layout.num_bytes))
        copy_shard(layout, make_state(step), buffer)
        label = SnapshotLabel(
            member_id="d0", incarnation="first", step=step, lineage=f"l{step}", extras={}
        )
        (folder / f"{step}.bytes").write_bytes(buffer)
        facts = msgspec.json.encode(make_facts(layout, label))
        (folder / f"{step}.json").write_bytes(facts)


def _shared_memory() -> set[str]:
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def test_a_trainer_killed_in_mid_copy_leaves_the_other_buffer(tmp_path: Path) -> None:
    _write_snapshots(tmp_path)
    before = _shared_memory()
    agent = start_agent(agent_settings(0), TOKEN)
    trainer = subprocess.Popen(
        [sys.executable, "-c", _MID_COPY, tmp_path, agent.place.local_address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert trainer.stdout is not None
    assert trainer.stdin is not None

    def here() -> Recovery:
        return Recovery([AgentCaller.connect_here(agent.place.local_address)])

    try:
        assert trainer.stdout.readline() == b"copying\n"
        trainer.kill()
        trainer.wait(LIMIT_S)

        read_back(here(), make_state(2), 2)
        # The same member comes back, and the old state stays until it has sealed.
        again = Trainer(agent.place.local_address)
        again.begin()[:1000] = b"y" * 1000
        read_back(
            here(),
            make_state(2),
            2,
        )
        again.snapshot(3)
        read_back(
            here(),
            make_state(3),
            3,
        )
    finally:
        trainer.kill()
        trainer.stdin.close()
        trainer.stdout.close()
        agent.process.kill()  # -9: nobody cleans up
        agent.close()
    assert _shared_memory() <= before


def test_an_agent_ends_with_the_process_that_started_it() -> None:
    code = (
        "import sys; from geartrain.checkpoint.agent.process import start_agent\n"
        "from geartrain.checkpoint.agent.settings import AgentSettings\n"
        "s = AgentSettings(node_id='n', host_id='h', memory_limit_bytes=1 << 20)\n"
        "a = start_agent(s, 'secret-token')\n"
        "print(a.process.pid, flush=True); sys.stdin.read()"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert starter.stdout is not None
    assert starter.stdin is not None
    agent_id = int(starter.stdout.readline())
    handle = os.pidfd_open(agent_id)
    command_line = Path(f"/proc/{agent_id}/cmdline").read_bytes()
    environment = Path(f"/proc/{agent_id}/environ").read_bytes()

    starter.kill()
    starter.wait(LIMIT_S)
    starter.stdin.close()
    starter.stdout.close()

    assert b"secret-token" not in command_line + environment
    # It is nobody's child any more; its descriptor becomes readable when it has ended.
    assert select.select([handle], [], [], LIMIT_S)[0], "the agent has not ended"
    os.close(handle)


def test_a_stopped_agent_does_not_hold_training_up() -> None:
    agent = start_agent(agent_settings(0), TOKEN)
    try:
        trainer = Trainer(agent.place.local_address, log_bytes=1 << 20)
        trainer.snapshot(1)
        os.kill(agent.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, agent.process.pid, os.WSTOPPED | os.WNOWAIT)

        assert trainer.link.begin() is None
        assert trainer.link.begin() is None  # asked once, not each time
        for _ in range(2):
            slot = trainer.link.log_slot()
            assert slot is not None
            trainer.link.log(logged_step(slot, 2, torch.ones(3)))
        assert trainer.link.log_slot() is None
        assert trainer.link.state.wants_snapshot

        os.kill(agent.process.pid, signal.SIGCONT)
        trainer.snapshot(5)
        agent.process.kill()
        with pytest.raises(CommunicationError, match="agent of d0's node"):
            until_heard(
                trainer.link, lambda: trainer.link.poll() is None, "the end to be noticed"
            )
    finally:
        agent.close()


def test_start_agent_says_what_is_wrong() -> None:
    busy = socket.create_server(("127.0.0.1", 0))
    settings = AgentSettings(
        node_id="n",
        host_id="h",
        memory_limit_bytes=1,
        port=busy.getsockname()[1],
    )
    with busy, pytest.raises(CommunicationError, match="did not come up"):
        start_agent(settings)
