"""Documents on disk: what is written reads back equal, and what is wrong is said."""

from __future__ import annotations

from pathlib import Path

import pytest

from geartrain.errors import ConfigError
from geartrain.planner import Plan, Replica, Stage
from geartrain.telemetry import read_document, write_document


def make_plan() -> Plan:
    replica = Replica(
        device_id="emulated:0", share=8, micro_batch_size=4, num_micro_batches=2
    )
    stage = Stage(stage_index=0, replicas=(replica,))
    return Plan(global_batch_size=8, stages=(stage,), left_out=("emulated:1",))


def test_a_document_reads_back_equal(tmp_path: Path) -> None:
    write_document(tmp_path / "plan.json", make_plan())

    assert read_document(tmp_path / "plan.json", Plan) == make_plan()


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('"share": 8', '"share": 9', r"plan\.json is not a valid Plan: .*share=9"),
        ('"share": 8', '"share": "8"', r"plan\.json is not a valid Plan: Expected `int`"),
        (
            '"predicted_memory_bytes"',
            '"predicted_memory"',
            r"plan\.json has \$\.stages\[0\]\.replicas\[0\]\.predicted_memory, which",
        ),
        ('"tail_samples"', '"tail"', r"plan\.json has \$\.tail, which a Plan does not"),
        (
            '"schema_version": 1',
            '"schema_version": 99',
            "schema_version=99, but this geartrain reads 1",
        ),
        ('"share": 8', '"share":', r"plan\.json is not a valid Plan: JSON is malformed"),
    ],
)
def test_an_edit_that_went_wrong_is_named(
    tmp_path: Path, before: str, after: str, message: str
) -> None:
    path = tmp_path / "plan.json"
    write_document(path, make_plan())
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))

    with pytest.raises(ConfigError, match=message):
        read_document(path, Plan)
