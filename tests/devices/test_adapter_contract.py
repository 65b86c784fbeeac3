"""What every adapter owes: on this machine's CPU, else on recorded facts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from devices.recorded_torch import RecordedTorch, RecordedXla, read_facts
from geartrain.devices import DeviceProfile, accelerator
from geartrain.devices.accelerator import AcceleratorAdapter
from geartrain.devices.adapter import DeviceAdapter
from geartrain.devices.adapters import cpu as cpu_module
from geartrain.devices.adapters import emulated as emulated_module
from geartrain.devices.adapters.cpu import CpuAdapter
from geartrain.devices.adapters.cuda import CudaAdapter
from geartrain.devices.adapters.emulated import EmulatedAdapter
from geartrain.devices.adapters.mps import MpsAdapter
from geartrain.devices.adapters.npu import NpuAdapter
from geartrain.devices.adapters.rocm import RocmAdapter
from geartrain.devices.adapters.xla import XlaAdapter
from geartrain.devices.adapters.xpu import XpuAdapter
from geartrain.devices.probes import bandwidth
from geartrain.devices.probes.timing import TimingBudget
from geartrain.devices.registry import adapter_kinds, load_adapter
from geartrain.errors import DeviceError

QUICK = TimingBudget(window_s=0.001, num_repeats=3)

EMULATED = DeviceProfile(
    device_id="emulated:0",
    node_id="here",
    vendor="any",
    kind="emulated",
    name="half a core",
    memory_bytes=2**30,
    core_fraction=0.5,
    source="emulated",
    fingerprint="f",
)

ADAPTERS: dict[str, Callable[[], Any]] = {
    "cpu": CpuAdapter,
    "emulated": lambda: EmulatedAdapter([EMULATED]),
    "cuda": lambda: CudaAdapter(RecordedTorch(read_facts("cuda"))),
    "rocm": lambda: RocmAdapter(RecordedTorch(read_facts("rocm"))),
    "xpu": lambda: XpuAdapter(RecordedTorch(read_facts("xpu"))),
    "npu": lambda: NpuAdapter(RecordedTorch(read_facts("npu"))),
    "mps": lambda: MpsAdapter(RecordedTorch(read_facts("mps"))),
    "xla": lambda: XlaAdapter(
        RecordedTorch(read_facts("xla")), RecordedXla(read_facts("xla"))
    ),
}
IN_HOST_MEMORY = {"cpu", "emulated"}


@pytest.fixture(autouse=True)
def _small_and_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AcceleratorAdapter, "budget", QUICK)
    monkeypatch.setattr(XlaAdapter, "budget", QUICK)
    monkeypatch.setattr(cpu_module, "_BUDGET", QUICK)
    monkeypatch.setattr(emulated_module, "THROTTLED_BUDGET", QUICK)
    monkeypatch.setattr(cpu_module, "_MAX_MATRIX_SIZE", 64)
    monkeypatch.setattr(emulated_module, "_MAX_MATRIX_SIZE", 64)
    monkeypatch.setattr(accelerator, "_MAX_MATRIX_SIZE", 64)
    monkeypatch.setattr(bandwidth, "_DEVICE_BYTES", 2**16)
    monkeypatch.setattr(bandwidth, "_HOST_BYTES", 2**16)


@pytest.fixture(params=sorted(ADAPTERS))
def adapter(request: pytest.FixtureRequest) -> Any:
    return ADAPTERS[request.param]()


def first_id(adapter: Any) -> str:
    device_id: str = adapter.list_devices()[0].device_id
    return device_id


def test_every_registered_kind_is_under_contract() -> None:
    assert set(adapter_kinds()) == set(ADAPTERS)


def test_adapter_satisfies_the_protocol(adapter: Any) -> None:
    assert isinstance(adapter, DeviceAdapter)


@pytest.mark.parametrize("kind", sorted(ADAPTERS))
def test_entry_point_gives_an_adapter_of_its_name_that_answers_here(kind: str) -> None:
    adapter = load_adapter(kind)

    assert adapter.kind == kind
    if not adapter.is_available():
        assert adapter.list_devices() == ()


def test_listed_devices_are_of_its_kind_and_without_rates(adapter: Any) -> None:
    assert adapter.is_available()
    devices = adapter.list_devices()

    assert devices
    assert len({device.device_id for device in devices}) == len(devices)
    for device in devices:
        assert device.device_id.partition(":")[0] == adapter.kind == device.kind
        assert device.memory_bytes > 2**20
        assert not device.flop_per_s
        assert device.fingerprint


def test_probe_measures_exactly_the_dtypes_that_work(adapter: Any) -> None:
    device_id = first_id(adapter)
    told: list[str] = []

    profile = adapter.probe(device_id, told.append)

    assert profile.device_id == device_id
    assert set(profile.flop_per_s) == set(adapter.supported_dtypes(device_id))
    assert "float32" in profile.flop_per_s
    for rate in profile.flop_per_s.values():
        assert rate.per_s > 0
        assert rate.num_repeats == QUICK.num_repeats
    assert profile.measured_at_s > 0
    assert any("float32" in line for line in told)


@pytest.mark.parametrize("kind", sorted(set(ADAPTERS) - IN_HOST_MEMORY))
def test_refused_dtypes_are_not_in_the_profile(kind: str) -> None:
    adapter = ADAPTERS[kind]()

    supported = adapter.supported_dtypes(first_id(adapter))

    assert not set(read_facts(kind)["unsupported_dtypes"]) & set(supported)


def test_host_link_is_measured_where_there_is_one(adapter: Any) -> None:
    profile = adapter.probe(first_id(adapter))

    has_link = adapter.kind not in IN_HOST_MEMORY
    assert (profile.host_to_device_bytes_per_s is not None) == has_link
    assert (profile.device_to_host_bytes_per_s is not None) == has_link
    assert profile.memory_bytes_per_s.per_s > 0


def test_reset_brings_the_peak_down_to_what_is_in_use(adapter: Any) -> None:
    device_id = first_id(adapter)
    ballast = torch.ones(2**24)  # 64 MiB that a process's resident memory shows
    before = adapter.memory_stats(device_id)
    del ballast

    adapter.reset_peak(device_id)
    after = adapter.memory_stats(device_id)

    assert before.peak_bytes >= before.in_use_bytes > 0
    assert after.in_use_bytes <= after.peak_bytes < before.peak_bytes
    assert before.limit_bytes > 0


def test_restored_generator_repeats_itself(adapter: Any) -> None:
    device_id = first_id(adapter)
    adapter.manual_seed(device_id, 7)
    seven = adapter.rng_state(device_id)

    adapter.manual_seed(device_id, 8)
    eight = adapter.rng_state(device_id)
    adapter.set_rng_state(device_id, seven)

    assert not torch.equal(seven, eight)
    assert torch.equal(adapter.rng_state(device_id), seven)


def test_absent_device_is_refused_with_those_present(adapter: Any) -> None:
    with pytest.raises(DeviceError, match=f"present: {first_id(adapter)}"):
        adapter.torch_device("cuda:77")


def test_torch_device_and_wait_exist_for_a_listed_device(adapter: Any) -> None:
    device_id = first_id(adapter)
    expected = {"rocm": "cuda", "emulated": "cpu"}.get(adapter.kind, adapter.kind)

    adapter.synchronize(device_id)

    assert adapter.torch_device(device_id).type == expected


def test_gloo_is_the_last_resort_of_every_kind(adapter: Any) -> None:
    backends = adapter.collective_backends()

    assert backends[-1] == "gloo"
    assert adapter.list_devices()[0].collective_backends == backends


def test_slices_are_told_for_a_listed_device(adapter: Any) -> None:
    slices = adapter.slices_supported(first_id(adapter))

    assert isinstance(slices, tuple)
    assert ("memory" in slices) == (adapter.kind in IN_HOST_MEMORY)


def test_nvidia_and_amd_builds_are_told_apart() -> None:
    nvidia, amd = RecordedTorch(read_facts("cuda")), RecordedTorch(read_facts("rocm"))

    assert CudaAdapter(nvidia).is_available()
    assert RocmAdapter(amd).is_available()
    assert not CudaAdapter(amd).is_available()
    assert not RocmAdapter(nvidia).is_available()


def test_mig_is_told_only_for_gpus_that_have_it() -> None:
    adapter = CudaAdapter(RecordedTorch(read_facts("cuda")))

    assert adapter.slices_supported("cuda:0") == ("mig", "mps")
    assert adapter.slices_supported("cuda:1") == ("mps",)


def test_older_xla_runtime_tells_the_same_memory() -> None:
    facts = read_facts("xla")
    new = XlaAdapter(RecordedTorch(facts), RecordedXla(facts))
    old = XlaAdapter(RecordedTorch(facts), RecordedXla(facts, in_kib=True))

    assert old.memory_stats("xla:0") == new.memory_stats("xla:0")


def test_datasheet_stands_in_only_where_nothing_runs() -> None:
    facts = read_facts("cuda")
    facts["unsupported_dtypes"] = [
        "float32",
        "float64",
        "float16",
        "bfloat16",
        "float8_e4m3fn",
    ]
    adapter = CudaAdapter(RecordedTorch(facts))

    profile = adapter.probe("cuda:0")

    assert profile.source == "datasheet"
    assert profile.flop_per_s["bfloat16"].num_repeats == 0
    with pytest.raises(DeviceError, match="maker's numbers are unknown"):
        adapter.probe("cuda:1")


COMMON = [
    "is_available",
    "device_count",
    "device",
    "get_device_name",
    "get_device_properties",
    "memory_allocated",
    "max_memory_allocated",
    "reset_peak_memory_stats",
    "synchronize",
    "manual_seed",
    "get_rng_state",
    "set_rng_state",
]
MPS = [
    "is_available",
    "current_allocated_memory",
    "recommended_max_memory",
    "synchronize",
    "manual_seed",
    "get_rng_state",
    "set_rng_state",
]


@pytest.mark.parametrize(
    ("space", "names"),
    [
        (torch.cuda, [*COMMON, "get_device_capability"]),
        (torch.xpu, COMMON),
        (torch.mps, MPS),
    ],
    ids=["cuda", "xpu", "mps"],
)
def test_installed_torch_has_every_function_that_adapters_call(
    space: Any, names: list[str]
) -> None:
    missing = [name for name in names if not callable(getattr(space, name, None))]

    assert not missing
