"""The socket of a run, over real connections."""

from __future__ import annotations

import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from geartrain.errors import CommunicationError, ConfigError, DeviceError
from geartrain.launch.control_messages import DrainRequest, ListRequest, ScaleRequest
from geartrain.launch.control_socket import (
    SOCKET_NAME,
    ControlSocket,
    ask_run,
    find_run,
)
from running_run import RunningRun, device, view_of

THREE = view_of(*(device(f"emulated:{i}", rank=i) for i in range(3)))

NAMELESS_DEVICE = (
    b'{"type":"scale","devices":[{"device_id":"","node_id":"a","vendor":"v","kind":"cpu",'
    b'"name":"n","memory_bytes":1}]}\n'
)


def connect(run_dir: Path) -> socket.socket:
    end = socket.socket(socket.AF_UNIX)
    end.settimeout(20)
    end.connect(str(run_dir / SOCKET_NAME))
    return end


def read_all(end: socket.socket) -> bytes:
    received = b""
    while data := end.recv(1 << 16):
        received += data
    return received


def test_run_is_asked_and_changes(tmp_path: Path) -> None:
    with RunningRun(tmp_path, THREE) as run:
        answer = ask_run(tmp_path, DrainRequest(target="emulated:1"))
        shown = ask_run(tmp_path, ListRequest()).run

    assert (answer.message, answer.removed) == (
        "at the next step boundary",
        ("emulated:1",),
    )
    assert [change.remove for change in run.changes] == [("emulated:1",)]
    assert shown is not None
    assert [d.state for d in shown.devices] == ["training", "out", "training"]


def test_refusal_reaches_who_asked_and_not_the_launcher(tmp_path: Path) -> None:
    with RunningRun(tmp_path, THREE) as run:
        with pytest.raises(ConfigError, match="no device or node 'cuda:7'"):
            ask_run(tmp_path, DrainRequest(target="cuda:7"))
        assert (
            ask_run(
                tmp_path, ScaleRequest(devices=tuple(d.profile for d in THREE.devices))
            ).message
            == "run run-1 is as asked already"
        )

    assert run.changes == []


def test_what_the_launcher_can_not_do_is_an_error(tmp_path: Path) -> None:
    with (
        RunningRun(tmp_path, THREE, lambda _: ("no memory for it", False)),
        pytest.raises(DeviceError, match="no memory for it"),
    ):
        ask_run(tmp_path, ScaleRequest(change=1))


def test_socket_is_for_its_owner_only(tmp_path: Path) -> None:
    with RunningRun(tmp_path, THREE):
        mode = (tmp_path / SOCKET_NAME).stat().st_mode

        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600


@pytest.mark.root
def test_another_user_is_refused_even_where_the_file_is_open_to_all(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o755)
    for folder in tmp_path.parents:
        if str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    text = f"""
import os, socket
os.setuid(65534)
end = socket.socket(socket.AF_UNIX)
end.settimeout(20)
end.connect({str(tmp_path / SOCKET_NAME)!r})
try:
    end.sendall(b'{{"type":"list"}}\\n')
    print(end.recv(100))
except ConnectionError:
    print(b"")
"""
    with RunningRun(tmp_path, THREE):
        (tmp_path / SOCKET_NAME).chmod(0o666)
        done = subprocess.run(
            [sys.executable, "-c", text],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    assert done.stdout.strip() == "b''", done.stderr


def test_run_directory_may_lie_deep(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 100) / ("y" * 100)
    folder.mkdir(parents=True)

    with RunningRun(folder, THREE):
        assert ask_run(folder, ListRequest()).run == THREE
    assert not (folder / SOCKET_NAME).exists()


def test_run_that_is_over_is_said_to_be(tmp_path: Path) -> None:
    with RunningRun(tmp_path, THREE):
        pass

    with pytest.raises(ConfigError, match="is over, or its launcher takes no"):
        ask_run(tmp_path, ListRequest())


def test_socket_of_a_killed_launcher_is_told_from_a_living_one(tmp_path: Path) -> None:
    text = f"""
import os, signal, sys
from pathlib import Path
sys.path.append({str(Path(__file__).parents[1])!r})
from running_run import device, view_of
from geartrain.launch.control_socket import ControlSocket
socket = ControlSocket(Path({str(tmp_path)!r}), view_of(device("cpu")))
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", text], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert (tmp_path / SOCKET_NAME).exists()

    with pytest.raises(ConfigError, match="is over: its launcher has gone"):
        ask_run(tmp_path, ListRequest())
    with RunningRun(tmp_path, THREE):
        assert ask_run(tmp_path, ListRequest()).run == THREE


def test_launcher_that_does_not_answer_has_a_deadline(tmp_path: Path) -> None:
    control = ControlSocket(tmp_path, THREE)
    try:
        with pytest.raises(CommunicationError, match=r"did not answer within 0\.2 s"):
            ask_run(tmp_path, ListRequest(), within_s=0.2)
    finally:
        control.close()


def test_who_waits_is_told_that_the_run_has_ended(tmp_path: Path) -> None:
    control = ControlSocket(tmp_path, THREE)
    errors: list[str] = []

    def ask() -> None:
        try:
            ask_run(tmp_path, ScaleRequest(change=-1), within_s=30)
        except ConfigError as error:
            errors.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    deadline_s = time.monotonic() + 20
    while not control.poll():
        assert time.monotonic() < deadline_s
        select.select([], [], [], 0.005)
    control.close()
    thread.join(20)

    assert errors == ["run run-1 ended before this was done"]


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\n",
        b"\xff\xfe\x00\n",
        b"[" * 100_000 + b"\n",
        b'{"type":"stop"}\n',
        b'{"type":"scale","change":"many"}\n',
        b'{"type":"scale","change":1e400}\n',
        b'{"type":"drain"}\n',
        NAMELESS_DEVICE,
    ],
)
def test_nonsense_is_answered_and_changes_nothing(tmp_path: Path, sent: bytes) -> None:
    with RunningRun(tmp_path, THREE) as run:
        with connect(tmp_path) as end:
            end.sendall(sent)
            answer = read_all(end)

        assert b'"error":"ConfigError"' in answer
        assert ask_run(tmp_path, ListRequest()).run == THREE
    assert run.changes == []


def test_endless_request_is_cut_off(tmp_path: Path) -> None:
    with RunningRun(tmp_path, THREE), connect(tmp_path) as end:
        sent = 0
        try:
            while sent < 2**26:
                sent += end.send(b"x" * 65536)
        except ConnectionError:
            pass
        assert sent < 2**23
        assert ask_run(tmp_path, ListRequest()).run == THREE


def test_silent_clients_hold_up_nobody_and_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("geartrain.launch.control_socket._CLIENT_S", 0.3)
    with RunningRun(tmp_path, THREE):
        files_before = len(list(Path("/proc/self/fd").iterdir()))
        silent = [connect(tmp_path) for _ in range(20)]
        for end in silent[:10]:
            end.sendall(b'{"type"')

        assert ask_run(tmp_path, ListRequest(), within_s=20).run == THREE
        assert [read_all(end) for end in silent] == [b""] * 20
        for end in silent:
            end.close()
        assert len(list(Path("/proc/self/fd").iterdir())) == files_before


def test_client_that_leaves_before_the_answer_disturbs_nobody(tmp_path: Path) -> None:
    control = ControlSocket(tmp_path, THREE)
    try:
        with connect(tmp_path) as end:
            end.sendall(b'{"type":"scale","change":-1}\n')
            deadline_s = time.monotonic() + 20
            while not (changes := control.poll()):
                assert time.monotonic() < deadline_s
        control.poll()
        control.answer(changes[0], "done")
        control.poll()
        assert changes[0].remove == ("emulated:2",)
    finally:
        control.close()


def test_request_ids_are_never_the_same(tmp_path: Path) -> None:
    with RunningRun(tmp_path, THREE) as run:
        ask_run(tmp_path, ScaleRequest(change=-1))
        ask_run(tmp_path, ScaleRequest(change=1))

    assert [change.request_id for change in run.changes] == [1, 2]
    assert [p.device_id for p in run.changes[1].add] == ["emulated:2"], "it came back"


def test_run_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir = tmp_path / "runs" / "one"
    run_dir.mkdir(parents=True)
    with RunningRun(run_dir, THREE):
        assert find_run(Path("one")).resolve() == run_dir
        assert find_run(run_dir) == run_dir
    with pytest.raises(ConfigError, match="no run at two or runs/two"):
        find_run(Path("two"))


def test_directory_that_can_not_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no socket can be made"):
        ControlSocket(tmp_path / "absent", THREE)
    assert os.listdir(tmp_path) == []  # noqa: PTH208 - empty
