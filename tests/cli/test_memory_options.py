"""Options of ``geartrain run`` that say how the state is kept in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from geartrain.cli import main
from geartrain.cli.memory_options import take_peer_memory
from geartrain.parallel.save_spec import PeerMemorySettings


def test_options_make_the_settings() -> None:
    given = {"peer_memory": True, "peer_copies": 2, "peer_memory_limit": "4GiB"}

    found = take_peer_memory(given)

    assert found == PeerMemorySettings(num_copies=2, memory_limit_bytes=4 << 30)
    nothing = {"peer_memory": False, "peer_copies": None, "peer_memory_limit": None}
    assert take_peer_memory(nothing) is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--no-peer-memory", "--peer-copies", "2"], "leave one of them out"),
        (["--peer-copies", "-1"], "num_copies=-1"),
        (["--peer-memory-limit", "4 apples"], "4 apples"),
    ],
)
def test_options_that_can_not_be_are_refused(
    tmp_path: Path, options: list[str], expected: str
) -> None:
    script = tmp_path / "train.py"
    script.touch()

    result = CliRunner().invoke(
        main, ["run", "--run-dir", str(tmp_path / "run"), *options, str(script)]
    )

    assert result.exit_code == 2
    assert expected in result.output
    assert not (tmp_path / "run").exists()
