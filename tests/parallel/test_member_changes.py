"""What the launcher and the run log are told of members that come and go."""

from __future__ import annotations

from pathlib import Path

from geartrain.parallel.member_changes import MemberChanges
from geartrain.parallel.membership import Gone
from geartrain.parallel.process_group import RankGroups
from geartrain.parallel.run_recorder import RunRecorder
from geartrain.parallel.worker_spec import WorkerLoss
from geartrain.telemetry import read_document

NAMES = ("a", "b", "c")
GONE = Gone(rank=1, incarnation="1.2", reason="killed", at_s=5.0)


def changes_in(folder: Path) -> MemberChanges:
    groups = RankGroups(0, len(NAMES), NAMES, None, 1.0)
    return MemberChanges(groups, RunRecorder(NAMES), folder, lambda: 7)


def test_launcher_is_told_of_each_process_once(tmp_path: Path) -> None:
    changes = changes_in(tmp_path)

    changes.report([GONE])
    changes.report([GONE, Gone(rank=1, incarnation="1.3", reason="again", at_s=6.0)])

    losses = [read_document(path, WorkerLoss) for path in sorted(tmp_path.glob("lost-*"))]
    assert [loss.incarnation for loss in losses] == ["1.2", "1.3"]
    assert (losses[0].device_id, losses[0].reason, losses[0].step) == ("b", "killed", 7)


def test_loss_that_could_not_be_written_down_is_told_after_a_later_step(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "in the way" / "run"
    folder.parent.write_text("no directory can be made here")
    changes = changes_in(folder)

    changes.report([GONE])  # as on a full disk, it does not fail
    folder.parent.unlink()
    folder.mkdir(parents=True)
    changes.applied(8)

    assert (folder / WorkerLoss.file_name("1.2")).exists()
