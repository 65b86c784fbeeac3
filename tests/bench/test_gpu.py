"""The GPU benchmark: what it says without one, and its parts on emulated devices."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from example_fleets import emulated_fleet
from geartrain.bench.gpu import GpuOptions, measure, run_gpu, uneven_plan
from geartrain.bench.gpu_settings import HarvestSettings
from geartrain.bench.macro_settings import ModelSize
from geartrain.cli import main
from geartrain.devices.probe import resolve_fleet

has_gpu = any(d.kind in ("cuda", "rocm") for d in resolve_fleet(None).devices)
TINY = ModelSize(dim=32, num_layers=1, context=16)


@pytest.mark.skipif(has_gpu, reason="this machine has a GPU")
def test_machine_without_gpu_is_told_so_and_all_is_well() -> None:
    done = CliRunner().invoke(main, ["bench", "gpu", "--json"])

    result = json.loads(done.stdout.splitlines()[-1])
    assert done.exit_code == 0
    assert result["available"] is False
    assert "only cpu" in result["reason"]


@pytest.mark.skipif(not has_gpu, reason="needs a CUDA or ROCm GPU")
@pytest.mark.slow
def test_gpu_and_a_mixed_fleet_are_exact() -> None:
    result = run_gpu(lambda _text: None)

    assert float(str(result["gradient_error_mixed_float64"])) <= 1e-12
    assert float(str(result["gradient_error_mixed_float32"])) <= 1e-5


def test_exactness_is_checked_on_uneven_shares() -> None:
    plan = uneven_plan(emulated_fleet(0.6, 0.2))

    assert [replica.share for replica in plan.replicas] == [13, 3]
    assert plan.global_batch_size == 16


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_emulated_devices_pass_for_a_gpu_and_a_cpu() -> None:
    flat = measure(
        emulated_fleet(0.6),
        emulated_fleet(0.6, 0.3),
        GpuOptions(
            model=TINY,
            exactness_model=TINY,
            num_pairs=4,
            batch_size=8,
            harvest=HarvestSettings(
                global_batch_size=32, warmup_steps=2, num_steps=2, num_rounds=2
            ),
        ),
        lambda _text: None,
    )

    for fleet in ("one_device", "mixed"):
        assert float(str(flat[f"gradient_error_{fleet}_float64"])) <= 1e-12
        assert float(str(flat[f"gradient_error_{fleet}_float32"])) <= 1e-5
    assert flat["overhead_clock"] == "process CPU time"
    assert float(str(flat["mixed_samples_per_s"])) > 0
    assert flat["note_emulated:1"]
