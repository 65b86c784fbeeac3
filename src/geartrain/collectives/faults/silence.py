"""How long a member may be silent before it counts as lost."""

from __future__ import annotations

from dataclasses import dataclass

# Together with one interval below the 3 s within which a frozen process must be known.
FLOOR_S = 2.4
# A member whose heartbeats were ever this rare is better judged by its exchanges.
_CEILING_S = 30.0
_FACTOR = 3.0
# Of the longest gap, per heartbeat: at five a second it halves in 14 s.
_KEPT = 0.99
_NEARLY = 0.8


@dataclass(slots=True)
class Silence:
    """The silence of one member, counted in time in which this process itself was awake.

    A device that is held to a twentieth of a core, or a machine with ten times as many
    runnable threads as cores, sends its heartbeats late. So the limit is three times the
    longest gap of late, and at least 2.4 s.
    """

    silent_s: float = 0.0
    longest_gap_s: float = 0.0
    _last_at_s: float | None = None

    def heard(self, now_s: float) -> None:
        """Count a sign of life; ``now_s`` is monotonic."""
        if self._last_at_s is not None:
            gap_s = now_s - self._last_at_s
            self.longest_gap_s = max(gap_s, _KEPT * self.longest_gap_s)
        self._last_at_s = now_s
        self.silent_s = 0.0

    def passed(self, awake_s: float) -> None:
        """Count time without a sign of life.

        Args:
            awake_s: Since the last call, less what this process itself slept through: one
                that was held up must not blame the others for it.
        """
        self.silent_s += awake_s

    @property
    def limit_s(self) -> float:
        """Silence from which the member counts as lost."""
        return min(max(FLOOR_S, _FACTOR * self.longest_gap_s), _CEILING_S)

    @property
    def is_lost(self) -> bool:
        """Whether it was silent for too long."""
        return self.silent_s > self.limit_s

    @property
    def is_nearly_lost(self) -> bool:
        """Whether it will be in a few heartbeats; they don't all fall silent in step."""
        return self.silent_s > _NEARLY * self.limit_s
