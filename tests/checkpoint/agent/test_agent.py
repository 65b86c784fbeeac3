"""Node agents over real sockets and shared memory; killed, lied to, and asked again."""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace

from geartrain.checkpoint.agent.caller import AgentCaller
from geartrain.checkpoint.agent.link import AgentLink, Reservation
from geartrain.checkpoint.agent.messages import (
    Answer,
    LogStep,
    Offer,
    PeerAddress,
    Refused,
    ShardChunk,
)
from geartrain.checkpoint.agent.process import start_agent
from geartrain.checkpoint.agent.recovery import Recovery
from geartrain.checkpoint.agent.server import AgentServer
from geartrain.checkpoint.agent.settings import AgentSettings
from geartrain.checkpoint.agent.shard_layout import (
    SnapshotLabel,
    copy_gradients,
    copy_shard,
    lay_out,
    make_facts,
)
from geartrain.checkpoint.agent.wire import receive_message, send_message
from geartrain.checkpoint.ranges import StateRange, split_ownership, whole_ranges
from geartrain.checkpoint.replay import (
    AppliedUpdate,
    ReplayTarget,
    read_hyperparameters,
    replay_steps,
)
from geartrain.errors import CheckpointError, CommunicationError, ConfigError
from geartrain.topology.agent_protocol import introduce

_TOKEN = "the token of this run"
_LIMIT_S = 20.0

State = dict[str, torch.Tensor]


def _settings(index: int, limit_bytes: int = 64 << 20) -> AgentSettings:
    return AgentSettings(
        node_id=f"n{index}", host_id=f"h{index}", memory_limit_bytes=limit_bytes
    )


@pytest.fixture
def servers() -> Iterator[list[AgentServer]]:
    started = [AgentServer(_settings(index), _TOKEN) for index in range(3)]
    yield started
    for server in started:
        server.close()


def _addresses(servers: Sequence[AgentServer]) -> list[PeerAddress]:
    return [
        PeerAddress(node_id=f"n{index}", host_id=f"h{index}", address=server.peer_address)
        for index, server in enumerate(servers)
    ]


def _state(step: int) -> State:
    generator = torch.Generator().manual_seed(step)
    return {
        "model/w": torch.randn(300, 7, generator=generator),
        "model/h": torch.randn(41, generator=generator).bfloat16(),
        "optimizer/w.exp_avg": torch.randn(300, 7, generator=generator),
        "optimizer/w.step": torch.tensor(float(step)),
    }


def _sizes(state: State) -> dict[str, int]:
    return {name: tensor.numel() for name, tensor in state.items()}


def _until(is_true: Callable[[], bool], what: str) -> None:
    deadline_at_s = time.monotonic() + _LIMIT_S
    while not is_true():
        assert time.monotonic() < deadline_at_s, what
        time.sleep(0.01)


class _Trainer:
    """A member with its shard of the state, linked to an agent."""

    def __init__(
        self,
        server_address: str,
        member: str = "d0",
        owned: Sequence[StateRange] | None = None,
        log_bytes: int = 0,
    ) -> None:
        self.member = member
        state = _state(0)
        self.layout = lay_out(state, owned or whole_ranges(_sizes(state)))
        self.incarnation = os.urandom(4).hex()
        reservation = Reservation(
            member_id=member,
            incarnation=self.incarnation,
            snapshot_bytes=self.layout.num_bytes,
            slot_bytes=1 << 14,
            num_slots=2 if log_bytes else 0,
            log_limit_bytes=log_bytes,
        )
        self.link = AgentLink(server_address, reservation)

    def begin(self) -> memoryview:
        deadline_at_s = time.monotonic() + _LIMIT_S
        while (buffer := self.link.begin()) is None:
            assert time.monotonic() < deadline_at_s
        return buffer

    def snapshot(self, step: int, state: State | None = None) -> None:
        copy_shard(self.layout, state or _state(step), self.begin())
        label = SnapshotLabel(
            member_id=self.member,
            incarnation=self.incarnation,
            step=step,
            lineage=f"l{step}",
            extras={"position": step},
        )
        self.link.seal(make_facts(self.layout, label))
        self.link.wait_kept(step, _LIMIT_S)

    def wait_copied(self, step: int, num_copies: int) -> None:
        def is_copied() -> bool:
            copies = self.link.read_status().copies
            return [c.snapshot_step for c in copies] == [step] * num_copies

        _until(is_copied, f"step {step} at {num_copies} peers")


def _connect(servers: Sequence[AgentServer]) -> list[AgentCaller]:
    return [AgentCaller.connect(s.peer_address, _TOKEN, s.peer_address) for s in servers]


def _read(recovery: Recovery, state: State, step: int) -> None:
    """Read by an ownership that nobody wrote, and compare every bit."""
    source = recovery.find(whole_ranges(_sizes(state)))
    assert source.base_step == step
    owned = split_ownership(_sizes(state), {"a": 1.0, "b": 2.5, "c": 0.7})
    for ranges in owned.values():
        targets = {
            part: memoryview(bytearray(part.num_elements * state[part.name].itemsize))
            for part in ranges
        }
        recovery.read(source, targets)
        for part, data in targets.items():
            expected = state[part.name].reshape(-1)[part.start : part.stop]
            assert data.tobytes() == expected.view(torch.uint8).numpy().tobytes()


def test_the_agent_imports_no_torch() -> None:
    code = (
        "import sys, geartrain.checkpoint.agent.process; "
        "sys.exit(' '.join(m for m in ('torch', 'scipy') if m in sys.modules) or 0)"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, timeout=60
    )

    assert (done.returncode, done.stderr) == (0, b"")


def test_a_lost_node_comes_back_from_peers_whatever_the_ownership(
    servers: list[AgentServer],
) -> None:
    owned = split_ownership(_sizes(_state(0)), {"d0": 1.0, "d1": 3.0, "d2": 0.5})
    trainers = [
        _Trainer(server.local_address, member, ranges)
        for server, (member, ranges) in zip(servers, owned.items(), strict=True)
    ]
    for trainer in trainers:
        trainer.link.set_peers(_addresses(servers), 2)
    for step in (3, 7):
        for trainer in trainers:
            trainer.snapshot(step)
    for trainer in trainers:
        trainer.wait_copied(7, 2)

    servers[0].close()
    servers[1].close()

    recovery = Recovery(_connect(servers[2:]))
    _read(recovery, _state(7), 7)
    source = recovery.find(whole_ranges(_sizes(_state(0))))
    assert recovery.extras(source) == {f"d{i}": {"position": 7} for i in range(3)}
    assert recovery.tensors(source)["model/w"].shape == (300, 7)
    recovery.close()


def test_members_that_are_not_equally_far_give_the_last_common_step(
    servers: list[AgentServer],
) -> None:
    owned = split_ownership(_sizes(_state(0)), {"d0": 1.0, "d1": 1.0})
    trainers = [
        _Trainer(server.local_address, member, ranges)
        for server, (member, ranges) in zip(servers, owned.items(), strict=False)
    ]
    for trainer in trainers:
        trainer.snapshot(10)
    trainers[0].snapshot(20)
    trainers[1].begin()[:100] = bytes(100)  # in the middle of it

    _read(Recovery(_connect(servers[:2])), _state(10), 10)


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
    state = _state(0)
    layout = lay_out(state, whole_ranges(_sizes(state)))
    for step in (1, 2):
        buffer = memoryview(bytearray(layout.num_bytes))
        copy_shard(layout, _state(step), buffer)
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
    agent = start_agent(_settings(0), _TOKEN)
    trainer = subprocess.Popen(
        [sys.executable, "-c", _MID_COPY, tmp_path, agent.place.local_address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert trainer.stdout is not None
    assert trainer.stdin is not None
    try:
        assert trainer.stdout.readline() == b"copying\n"
        trainer.kill()
        trainer.wait(_LIMIT_S)

        recovery = Recovery([AgentCaller.connect_here(agent.place.local_address)])
        _read(recovery, _state(2), 2)
        recovery.close()
        # The same member comes back, and the old state stays until it has sealed.
        again = _Trainer(agent.place.local_address)
        again.begin()[:1000] = b"y" * 1000
        _read(Recovery([AgentCaller.connect_here(agent.place.local_address)]), _state(2), 2)
        again.snapshot(3)
        _read(Recovery([AgentCaller.connect_here(agent.place.local_address)]), _state(3), 3)
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
    command_line = Path(f"/proc/{agent_id}/cmdline").read_bytes()
    environment = Path(f"/proc/{agent_id}/environ").read_bytes()

    starter.kill()
    starter.wait(_LIMIT_S)
    starter.stdin.close()
    starter.stdout.close()

    assert b"secret-token" not in command_line + environment
    _until(lambda: _state_of(agent_id) == "Z", "the agent to end")


def _state_of(process_id: int) -> str:
    """The kernel's letter for it; Z where it has ended."""
    try:
        text = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return "Z"
    return text.rpartition(")")[2].split()[0]


def test_a_stopped_agent_does_not_hold_training_up() -> None:
    agent = start_agent(_settings(0), _TOKEN)
    try:
        trainer = _Trainer(agent.place.local_address, log_bytes=1 << 20)
        trainer.snapshot(1)
        os.kill(agent.process.pid, signal.SIGSTOP)
        _until(lambda: _state_of(agent.process.pid) == "T", "the agent to stop")

        assert trainer.link.begin() is None
        assert trainer.link.begin() is None  # asked once, not each time
        for _ in range(2):
            slot = trainer.link.log_slot()
            assert slot is not None
            trainer.link.log(_logged(slot, 2, torch.ones(3)))
        assert trainer.link.log_slot() is None
        assert trainer.link.state.wants_snapshot

        os.kill(agent.process.pid, signal.SIGCONT)
        trainer.snapshot(5)
        agent.process.kill()
        with pytest.raises(CommunicationError, match="agent of d0's node"):
            _until(lambda: trainer.link.poll() is None, "the end to be noticed")
    finally:
        agent.close()


def _logged(
    slot: tuple[int, memoryview], step: int, gradient: torch.Tensor, name: str = "model/w"
) -> LogStep:
    index, view = slot
    part = StateRange(name=name, start=0, stop=gradient.numel())
    return LogStep(
        slot_index=index,
        step=step,
        previous_lineage=f"l{step - 1}",
        lineage=f"l{step}",
        update={},
        parts=copy_gradients([(part, gradient)], view),
    )


def test_a_peer_that_dies_is_replaced(servers: list[AgentServer]) -> None:
    trainer = _Trainer(servers[0].local_address)
    trainer.link.set_peers(_addresses(servers), 1)
    trainer.snapshot(1)
    trainer.wait_copied(1, 1)
    first = trainer.link.read_status().copies[0].node_id

    servers[int(first[1])].close()
    trainer.snapshot(2)

    def is_replaced() -> bool:
        copies = trainer.link.read_status().copies
        return [(c.node_id != first, c.snapshot_step) for c in copies] == [(True, 2)]

    _until(is_replaced, "another peer to have the copy")


def test_what_arrives_by_half_or_damaged_is_never_served(
    servers: list[AgentServer],
) -> None:
    state = _state(1)
    trainer = _Trainer(servers[0].local_address)
    trainer.snapshot(1, state)
    facts = servers[0].shelf.held().snapshots[0]
    with servers[0].shelf.reading("d0", 1, "l1") as kept:
        whole = [bytes(kept.chunk(index)) for index in range(len(facts.chunks))]
    host, port = servers[1].peer_address.rsplit(":", 1)

    def offer(payload: bytes) -> socket.socket:
        sock = socket.create_connection((host, int(port)), timeout=5)
        introduce(sock, _TOKEN, 5.0)
        send_message(sock, Offer(facts=facts), 5.0)
        receive_message(sock, Answer, 5.0)
        sock.sendall(payload)
        return sock

    joined = b"".join(whole)
    offer(joined[: len(joined) // 2]).close()
    flipped = bytearray(joined)
    flipped[len(flipped) // 3] ^= 4
    with offer(bytes(flipped)) as sock:
        answer = receive_message(sock, Answer, 5.0)
    assert isinstance(answer, Refused)
    assert "arrived damaged (model/w" in answer.reason
    assert servers[1].shelf.held().snapshots == ()
    with offer(joined) as sock:
        receive_message(sock, Answer, 5.0)
    _read(Recovery(_connect(servers[1:2])), state, 1)


def test_damage_in_memory_is_found_and_another_copy_read(
    servers: list[AgentServer],
) -> None:
    trainer = _Trainer(servers[0].local_address)
    trainer.link.set_peers(_addresses(servers), 1)
    trainer.snapshot(4)
    trainer.wait_copied(4, 1)
    with servers[0].shelf.reading("d0", 4, "l4") as kept:
        kept.chunk(0)[5] ^= 1

    _read(Recovery(_connect(servers)), _state(4), 4)
    alone = Recovery(_connect(servers[:1]))
    source = alone.find([StateRange(name="model/w", start=0, stop=9)])
    with pytest.raises(CheckpointError, match=r"model/w\[0:9\] of step 4 can't be read"):
        alone.read(
            source, {StateRange(name="model/w", start=0, stop=9): memoryview(bytearray(36))}
        )


def test_when_all_are_gone_the_ranges_are_named(servers: list[AgentServer]) -> None:
    with pytest.raises(CheckpointError, match=r"nobody holds a snapshot; wanted w\[0:4\]"):
        Recovery(_connect(servers), ["n7 is down"]).find(
            [StateRange(name="w", start=0, stop=4)]
        )
    trainer = _Trainer(servers[0].local_address)
    trainer.snapshot(3)
    with pytest.raises(CheckpointError, match=r"of step 3, the newest, .*other\[0:4\]"):
        Recovery(_connect(servers)).find([StateRange(name="other", start=0, stop=4)])


def test_too_much_memory_is_refused_with_what_would_help() -> None:
    server = AgentServer(_settings(0, limit_bytes=30_000), _TOKEN)
    try:
        with pytest.raises(CheckpointError, match="raise the agent's memory limit"):
            _Trainer(server.local_address)
    finally:
        server.close()


def test_strangers_get_nothing(servers: list[AgentServer]) -> None:
    with pytest.raises(CommunicationError, match="token"):
        AgentCaller.connect(servers[0].peer_address, "wrong", "n0")
    host, port = servers[0].peer_address.rsplit(":", 1)
    for garbage in (b"\xff" * 64, b"\x00\x00\x00\x05hello", b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=5) as sock:
            sock.sendall(garbage)
            with suppress(ConnectionError):  # it may hang up before it was sent all
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(4096):
                    pass
    with socket.create_connection((host, int(port)), timeout=5) as sock:
        introduce(sock, _TOKEN, 5.0)
        sock.sendall(b"\xff\xff\xff\xff")  # 4 GiB of JSON
        assert sock.recv(1) == b""
    assert AgentCaller.connect(servers[0].peer_address, _TOKEN, "n0").describe().node_id
    with pytest.raises(ConfigError, match="without a token"):
        AgentServer(
            AgentSettings(
                node_id="n", host_id="h", address="192.0.2.1", memory_limit_bytes=1
            ),
            "",
        )


def test_an_older_process_of_a_member_is_turned_away(servers: list[AgentServer]) -> None:
    old = _Trainer(servers[0].local_address)
    old.snapshot(1)
    new = _Trainer(servers[0].local_address)

    with pytest.raises(CommunicationError):
        _until(lambda: old.link.begin() is None and False, "the old one to be told")
    new.snapshot(2)

    _read(Recovery(_connect(servers[:1])), _state(2), 2)


def test_a_seal_that_does_not_fit_is_refused(servers: list[AgentServer]) -> None:
    trainer = _Trainer(servers[0].local_address)
    trainer.begin()
    label = SnapshotLabel(
        member_id="d0", incarnation=trainer.incarnation, step=1, lineage="l1", extras={}
    )
    facts = make_facts(trainer.layout, label)
    chunk = ShardChunk("model/w", 0, 10, facts.num_bytes - 1, 40)
    trainer.link.seal(replace(facts, chunks=(chunk,)))
    with pytest.raises(CheckpointError, match="does not fit step 1"):
        trainer.link.wait_kept(1, _LIMIT_S)
    assert servers[0].shelf.held().snapshots == ()
    # The buffer that was refused is free again.
    trainer.link.state = dataclasses.replace(trainer.link.state, problem="")
    for step in (2, 3, 4):
        trainer.snapshot(step)
    _read(Recovery(_connect(servers[:1])), _state(4), 4)


def test_a_history_that_a_restore_left_behind_is_not_taken(
    servers: list[AgentServer],
) -> None:
    trainer = _Trainer(servers[0].local_address)
    trainer.snapshot(10)
    again = _Trainer(servers[0].local_address)
    again.snapshot(5)
    recovery = Recovery(_connect(servers[:1]))
    want = whole_ranges(_sizes(_state(0)))

    assert recovery.find(want).step == 10
    committed = recovery.find(want, lambda step, lineage: (step, lineage) == (5, "l5"))
    assert committed.step == 5
    with pytest.raises(CheckpointError, match="no state is left"):
        recovery.find(want, lambda _step, _lineage: False)


def test_a_peer_without_room_is_passed_over() -> None:
    small = AgentServer(_settings(1, limit_bytes=20_000), _TOKEN)
    servers = [AgentServer(_settings(0), _TOKEN), small]
    try:
        trainer = _Trainer(servers[0].local_address)
        trainer.snapshot(1)
        trainer.link.set_peers(_addresses(servers), 1)
        _until(lambda: trainer.link.read_status().warning != "", "a warning")
        assert "0 of 1 copies can be kept" in trainer.link.read_status().warning
        assert small.shelf.held().snapshots == ()
    finally:
        for server in servers:
            server.close()


def test_snapshot_and_log_give_the_last_step_back_at_a_peer(
    servers: list[AgentServer],
) -> None:
    model = torch.nn.Linear(7, 300, bias=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = _state(0)
    trainer = _Trainer(servers[0].local_address, log_bytes=1 << 20)
    trainer.link.set_peers(_addresses(servers), 1)
    start = model.weight.detach().clone()
    trainer.snapshot(3, {**state, "model/w": start})
    for step in (4, 5, 6):
        slot = None
        while slot is None:
            slot = trainer.link.log_slot()
        model.weight.grad = torch.randn(300, 7)
        record = _logged(slot, step, model.weight.grad.reshape(-1))
        update = AppliedUpdate(groups=read_hyperparameters(optimizer), extras={"at": step})
        trainer.link.log(replace(record, update=update.to_json()))
        optimizer.step()

    def is_copied() -> bool:
        return [c.log_step for c in trainer.link.read_status().copies] == [6]

    _until(is_copied, "the log at a peer")
    assert trainer.link.poll().logged_step == 6
    servers[0].close()

    recovery = Recovery(_connect(servers[1:]))
    source = recovery.find([StateRange(name="model/w", start=0, stop=2100)])
    assert (source.base_step, source.step, source.lineage) == (3, 6, "l6")
    twin = torch.nn.Linear(7, 300, bias=False)
    with torch.no_grad():
        twin.weight.copy_(start)
    target = ReplayTarget(
        parameters={"model/w": twin.get_parameter("weight")},
        optimizer=torch.optim.AdamW(twin.parameters(), lr=0.5),
    )
    extras = replay_steps(target, recovery.logged_steps(source), source.base_lineage)
    assert extras == {"at": 6}
    assert torch.equal(twin.weight, model.weight)


def test_a_full_log_asks_for_a_snapshot_and_goes_on_after_it(
    servers: list[AgentServer],
) -> None:
    trainer = _Trainer(servers[0].local_address, log_bytes=10_000)
    trainer.snapshot(1)

    def log(step: int) -> None:
        slot = None
        while slot is None:
            slot = trainer.link.log_slot()
        trainer.link.log(_logged(slot, step, torch.randn(1000)))

    for step in range(2, 7):
        log(step)
    _until(lambda: trainer.link.poll().log_bytes > 5000, "the log to fill")
    _until(lambda: trainer.link.poll().wants_snapshot, "it to ask")
    assert servers[0].shelf.chain("d0").num_bytes <= 10_000
    trainer.snapshot(6)
    log(7)
    _until(lambda: trainer.link.poll().logged_step == 7, "the log to go on")

    source = Recovery(_connect(servers[:1])).find(
        [StateRange(name="model/w", start=0, stop=9)]
    )
    assert (source.base_step, source.step) == (6, 7)


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
