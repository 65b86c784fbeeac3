"""Faults over shaped links, with a process a host: kills, pulled cables, slow devices."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fault_ranks import Rank, Ring, longest_silence_s, make_rank
from geartrain.collectives.faults.fault import Fault
from geartrain.collectives.faults.roll_call import roll_call
from geartrain.devices import DeviceProfile
from geartrain.devices.emulation.cgroup_throttle import CgroupThrottle
from geartrain.devices.emulation.cgroups import usable_cgroups
from geartrain.devices.emulation.network.lab import NetworkLab
from geartrain.devices.emulation.network.namespaces import enter
from geartrain.devices.emulation.network.spec import parse_links
from geartrain.errors import CommunicationError
from local_ranks import run_ranks

pytestmark = pytest.mark.root

Host = tuple[str, str]
"""Namespace and address."""


def rank_on(host: Host, rank: int, world_size: int) -> Rank:
    # The store's connection is made before, and stays in the namespace of the test.
    me = make_rank(rank, world_size, address=host[1])
    enter(host[0])
    return me


def add_for_ever(ring: Ring, tensor: torch.Tensor) -> None:
    while True:
        ring.add(tensor)


def go_on_without(
    rank: int, world_size: int, hosts: list[Host], victim: int, ready: str, how: str
) -> tuple[Fault, float, float, float]:
    """A host is lost in the middle of an exchange; the others go on."""
    me = rank_on(hosts[rank], rank, world_size)
    store = dist.distributed_c10d._get_default_store()
    ring = me.ring(list(range(world_size)), 0)
    ring.add(torch.ones(1000))
    if rank == victim and how == "kill":
        Path(ready).write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == victim:
        Path(ready).write_text("cut me")
    with pytest.raises(CommunicationError, match="epoch 0 is over"):
        add_for_ever(ring, torch.ones(250_000))
    fault = me.fault()
    known_at_s = time.monotonic()
    if rank == victim:
        return fault, known_at_s, known_at_s, 0.0
    survivors = [r for r in range(world_size) if r != victim]
    members = roll_call(store, 1, rank, 2.0, survivors)
    total = me.ring(list(members), 1).add(torch.ones(250_000))
    done_at_s = time.monotonic()
    me.service.close()
    return fault, known_at_s, done_at_s, float(total[-1])


@contextlib.contextmanager
def cutting(lab: NetworkLab, victim: int, ready: Path) -> Iterator[list[float]]:
    """Pull the victim's cable once it says that it is ready."""
    cut_at_s: list[float] = []
    done = threading.Event()

    def run() -> None:
        while not ready.exists() and not done.wait(0.005):
            pass
        lab.cut(f"host{victim}")
        cut_at_s.append(time.monotonic())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield cut_at_s
    finally:
        done.set()
        thread.join()


def test_a_kill_behind_shaped_links_is_known_and_left_behind_in_time(
    tmp_path: Path,
) -> None:
    ready = tmp_path / "ready"
    with NetworkLab(parse_links("4+4:500Mbit:50Mbit")) as lab:
        hosts = [(host.namespace, host.address) for host in lab.hosts]
        results = run_ranks(go_on_without, 8, hosts, 2, str(ready), "kill", may_die=(2,))
    killed_at_s = float(ready.read_text())
    survivors = [result for rank, result in enumerate(results) if rank != 2]
    known_s = max(known_at_s for _, known_at_s, _, _ in survivors) - killed_at_s
    done_s = max(done_at_s for _, _, done_at_s, _ in survivors) - killed_at_s

    print(f"lab: kill known after {known_s:.3f} s, 1 MB added after {done_s:.3f} s")  # noqa: T201
    assert all(fault.suspects == (2,) for fault, *_ in survivors)
    assert all(total == 7.0 for *_, total in survivors)
    assert known_s < 1.0
    assert done_s < 5.0


@pytest.mark.slow
def test_a_pulled_cable_is_known_on_both_sides_within_three_seconds(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    with (
        NetworkLab(parse_links("2+2:500Mbit:50Mbit")) as lab,
        cutting(lab, 3, ready) as cut_at_s,
    ):
        hosts = [(host.namespace, host.address) for host in lab.hosts]
        results = run_ranks(go_on_without, 4, hosts, 3, str(ready), "cut")
    known_s = [known_at_s - cut_at_s[0] for _, known_at_s, _, _ in results]

    print(f"lab: cable known after {[round(s, 2) for s in known_s]} s")  # noqa: T201
    assert all(fault.suspects == (3,) for fault, *_ in results[:3])
    assert all(total == 3.0 for *_, total in results[:3])
    assert max(known_s) < longest_silence_s()
    assert "or this host is" in results[3][0].detail


def train_slowly(rank: int, world_size: int, files: str) -> tuple[float, int]:
    """Rank 1 has a twentieth of a core and a lot to do."""
    me = make_rank(rank, world_size)
    ring = me.ring([0, 1], 0)
    if rank == 1:
        Path(files, "pid.part").write_text(str(os.getpid()))
        Path(files, "pid.part").rename(Path(files, "pid"))
    tensor, weight = torch.ones(64, 256), torch.ones(256, 256)
    ends_at_s = time.monotonic() + 8.0
    num_steps = 0
    going = True
    while going:
        for _ in range(20 if rank == 1 else 1):
            tensor = torch.tanh(tensor @ weight)
            sum(range(20_000))  # what holds Python's lock for long
        going = bool(ring.add(torch.tensor([float(time.monotonic() < ends_at_s)])) == 2.0)
        num_steps += 1
    live = me.service._live
    assert live is not None
    assert live._pulse is not None
    gap_s = max(link.silence.longest_gap_s for link in live._pulse._links.values())
    assert me.faults.empty()
    me.service.close()
    return gap_s, num_steps


@pytest.mark.slow
def test_a_device_with_a_twentieth_of_a_core_is_not_taken_for_dead(tmp_path: Path) -> None:
    cgroups = usable_cgroups()
    if cgroups is None:
        pytest.skip("no cgroup controllers can be used here")
    device = DeviceProfile(
        device_id="emulated:0",
        node_id="here",
        vendor="any",
        kind="emulated",
        name="part of a core",
        memory_bytes=2**30,
        core_fraction=0.05,
        source="emulated",
    )
    throttle = CgroupThrottle(cgroups, [device])
    done = threading.Event()

    def attach() -> None:
        while not (tmp_path / "pid").exists() and not done.wait(0.005):
            pass
        throttle.attach("emulated:0", int((tmp_path / "pid").read_text()))

    thread = threading.Thread(target=attach)
    thread.start()
    try:
        (gap_s, num_steps), _ = run_ranks(train_slowly, 2, str(tmp_path))
    finally:
        done.set()
        thread.join()
        throttle.close()

    print(f"lab: longest gap between heartbeats {gap_s:.2f} s in {num_steps} steps")  # noqa: T201
    assert num_steps > 1
