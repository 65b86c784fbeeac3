"""How a script's error is written down."""

from pathlib import Path

import pytest

from geartrain.errors import CommunicationError, ConfigError
from geartrain.launch.script_failure import describe, is_deliberate, message_of
from geartrain.parallel.worker_spec import WorkerFailure


def describe_script(tmp_path: Path, text: str) -> WorkerFailure:
    script = tmp_path / "train.py"
    script.write_text(text)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any error will do
        exec(compile(text, str(script), "exec"), {})
    return describe(caught.value, script=script, rank=1, device_id="cpu", at_s=5.0)


def test_traceback_starts_in_the_script(tmp_path: Path) -> None:
    told = describe_script(tmp_path, "def f():\n    raise ValueError('boo')\nf()\n")

    lines = told.traceback.splitlines()
    assert lines[1].strip().startswith(f'File "{tmp_path / "train.py"}", line 3')
    assert lines[-1] == "ValueError: boo"


def test_syntax_error_shows_the_line_only(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("x = (\n")
    with pytest.raises(SyntaxError) as caught:
        compile(script.read_text(), str(script), "exec")

    told = describe(caught.value, script=script, rank=0, device_id="cpu", at_s=5.0)

    assert "Traceback" not in told.traceback
    assert "was never closed" in told.traceback


@pytest.mark.parametrize(
    ("error", "secondary"),
    [
        (CommunicationError("rank 1 is gone"), True),
        (RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:40"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_only_lost_peers_are_secondary(
    tmp_path: Path, error: Exception, secondary: bool
) -> None:
    told = describe(error, script=tmp_path, rank=0, device_id="cpu", at_s=5.0)

    assert told.secondary is secondary


def test_torchs_out_of_memory_is_recognised(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    error = torch.OutOfMemoryError("3 GiB wanted")

    told = describe(error, script=tmp_path, rank=0, device_id="cpu", at_s=5.0)

    assert told.out_of_memory


def test_deliberate_error_gives_its_message(tmp_path: Path) -> None:
    error = ConfigError("batch: 3 < 4")

    told = describe(error, script=tmp_path, rank=0, device_id="cpu", at_s=5.0)

    assert is_deliberate(told)
    assert message_of(told) == "batch: 3 < 4"
