"""Whether there is time to compress a step of the gradient log: from what was measured."""

from __future__ import annotations

from collections import deque

_MAX_FRACTION = 0.01
"""Of the time between two steps; the trainer wants the same cores."""
_KEPT = 8
_TRIES = 3


class CodingPace:
    """Follows how long compressing takes and how often a step comes.

    >>> pace = CodingPace()
    >>> for at_s in (0.0, 0.1, 0.2):
    ...     pace.note(0.02, at_s)  # a fifth of the time between two steps
    >>> pace.allows(0.3)
    False
    """

    def __init__(self) -> None:
        self._coding_s: deque[float] = deque(maxlen=_KEPT)
        self._begun_at_s: deque[float] = deque(maxlen=_KEPT + 1)

    def allows(self, now_s: float) -> bool:
        """Whether to compress the step that comes now; the first ones to learn from."""
        if len(self._coding_s) < _TRIES or not self._begun_at_s:
            return True
        period_s = (now_s - self._begun_at_s[0]) / len(self._begun_at_s)
        return _middle(self._coding_s) <= _MAX_FRACTION * period_s

    def note(self, coding_s: float | None, begun_at_s: float) -> None:
        """Take note of a step.

        Args:
            coding_s: How long compressing took; None where it was not done.
            begun_at_s: When the step came.
        """
        self._begun_at_s.append(begun_at_s)
        if coding_s is not None:
            self._coding_s.append(coding_s)


def _middle(values: deque[float]) -> float:
    return sorted(values)[len(values) // 2]
