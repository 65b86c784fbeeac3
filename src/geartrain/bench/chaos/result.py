"""What came of a chaos run, for programs, files and the report."""

from __future__ import annotations

from dataclasses import dataclass

from geartrain.bench.chaos.checks import CheckResult
from geartrain.bench.chaos.evidence import Deed
from geartrain.bench.chaos.pauses import Pause

Figure = float | int | str | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """One committed step on the timeline."""

    step: int
    at_s: float
    """From the beginning of chaos; negative before."""
    device_ids: tuple[str, ...]
    """Who has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLine:
    """Something that the run itself told."""

    at_s: float
    kind: str
    device_id: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosResult:
    """One run."""

    seed: int
    script: str
    devices: str
    duration_s: float
    device_ids: tuple[str, ...]
    began_at_s: float
    """Unix time."""
    watched_s: float
    """From then until the run was asked to stop."""
    num_faults: int
    """That were done."""
    num_by_kind: dict[str, int]
    num_steps: int
    num_left: int
    """Devices that were there at the end."""
    longest_pause_s: float
    calm_step_s: float
    steps_per_s: float
    """Commits while faults came, over that time."""
    load_average: float
    """Of the machine, at the end; others' work moves all times."""
    checks: tuple[CheckResult, ...]
    deeds: tuple[Deed, ...]
    pauses: tuple[Pause, ...]
    """The longest."""
    steps: tuple[StepLine, ...]
    events: tuple[EventLine, ...]
    command: str
    commit: str
    versions: dict[str, str]
    schema_version: int = 1

    @property
    def has_passed(self) -> bool:
        """Whether no check failed."""
        return all(check.status != "failed" for check in self.checks)

    def as_json(self) -> dict[str, object]:
        """The figures, without the timeline."""
        return {
            "passed": self.has_passed,
            "seed": self.seed,
            "script": self.script,
            "devices": self.devices,
            "duration_s": self.duration_s,
            "faults": self.num_faults,
            "faults_by_kind": self.num_by_kind,
            "faults_left_out": sum(not deed.was_done for deed in self.deeds),
            "steps": self.num_steps,
            "devices_left": self.num_left,
            "longest_pause_s": self.longest_pause_s,
            "calm_step_s": self.calm_step_s,
            "steps_per_s": self.steps_per_s,
            "load_average": self.load_average,
            "checks": {check.name: check.status for check in self.checks},
            "failures": {
                check.name: list(check.details)
                for check in self.checks
                if check.status == "failed"
            },
            "figures": {check.name: check.figures for check in self.checks},
            "command": self.command,
            "commit": self.commit,
        }


CHECK_TABLE_HEAD = ("check", "", "what was found")
_MARKS = {"passed": "ok", "failed": "FAILED", "skipped": "left out"}


def check_rows(result: ChaosResult) -> list[tuple[str, str, str]]:
    """A row a check, for people."""
    return [(check.name, _MARKS[check.status], check.summary) for check in result.checks]
