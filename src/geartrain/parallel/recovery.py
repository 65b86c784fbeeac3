"""Times what a loss costs, from its notice to the next step that is applied."""

from __future__ import annotations

from dataclasses import dataclass

from geartrain.telemetry import RecoveryReport


@dataclass(slots=True)
class Recovery:
    """One recovery under way, or none; all times are Unix times."""

    lost_samples: int = 0
    _noticed_at_s: float = 0.0
    _planned_at_s: float = 0.0
    _detect_s: float = 0.0

    def notice(self, at_s: float, detect_s: float) -> None:
        """A loss was noticed; of several in a row the first counts.

        Args:
            at_s: When.
            detect_s: How long it had lasted by then.
        """
        if not self._noticed_at_s:
            self._noticed_at_s, self._detect_s = at_s, detect_s

    def planned(self, at_s: float, num_in_vain: int) -> None:
        """Those that are left are in step, and have a plan.

        Args:
            at_s: When.
            num_in_vain: Samples that had been computed of a step that is made again.
        """
        self._planned_at_s = at_s
        self.lost_samples += num_in_vain

    def finish(self, at_s: float) -> RecoveryReport | None:
        """A step was applied; returns what it took, None where nothing had happened."""
        if not self._noticed_at_s:
            return None
        planned_at_s = self._planned_at_s or at_s
        report = RecoveryReport(
            detect_s=self._detect_s,
            replan_s=max(planned_at_s - self._noticed_at_s, 0.0),
            restore_s=max(at_s - planned_at_s, 0.0),
            lost_samples=self.lost_samples,
        )
        self._noticed_at_s = self._planned_at_s = self._detect_s = 0.0
        self.lost_samples = 0
        return report
