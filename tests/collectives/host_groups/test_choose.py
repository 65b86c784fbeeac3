import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from geartrain.collectives.host_groups.choose import (
    HostMember,
    common_backend,
    make_host_group,
    slice_shares,
)
from geartrain.collectives.host_groups.lone import LoneGroup
from geartrain.errors import ConfigError
from local_ranks import run_ranks

CUDA = HostMember(name="a", kind="cuda", backends=("nccl", "gloo"))
ROCM = HostMember(name="b", kind="rocm", backends=("nccl", "gloo"))
CPU = HostMember(name="c")


def test_single_process_stands_for_itself() -> None:
    assert isinstance(make_host_group([CPU], 0, None), LoneGroup)


def test_several_processes_need_a_store() -> None:
    with pytest.raises(ConfigError, match="store"):
        make_host_group([CPU, CPU], 0, None)


@pytest.mark.parametrize(
    ("members", "backend"),
    [
        ((CUDA, CUDA), "nccl"),
        ((ROCM, ROCM), "nccl"),
        # Both say nccl, but NVIDIA's and AMD's libraries do not speak to each other.
        ((CUDA, ROCM), None),
        ((CUDA, CPU), None),
        ((CPU, CPU), None),
    ],
)
def test_vendors_library_is_used_among_devices_of_one_kind(
    members: tuple[HostMember, ...], backend: str | None
) -> None:
    assert common_backend(members) == backend


def test_device_adds_as_much_as_its_cores_allow_but_uses_one_thread() -> None:
    members = [HostMember(name="a", cores=cores) for cores in (0.1, 0.8, 16.0)]

    assert slice_shares(members) == (0.1, 0.8, 1.0)
    assert slice_shares([*members, CPU]) is None


def _meet(rank: int, world_size: int) -> tuple[str, float]:
    members = [HostMember(name=f"{r}", cores=1.0 + r) for r in range(world_size)]
    store = PrefixStore("host", dist.distributed_c10d._get_default_store())
    group = make_host_group(members, rank, store, only_host=True)
    tensor = torch.full((10,), float(rank))
    running = group.open(tensor, [(0, 10)], 2.0)
    running.reduce(0)
    running.publish(0)
    running.finish()
    group.close()
    return type(group).__name__, float(tensor.sum())


def test_processes_without_a_vendor_meet_in_shared_memory() -> None:
    assert run_ranks(_meet, 3) == [("SharedMemoryGroup", 60.0)] * 3
