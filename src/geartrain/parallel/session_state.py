"""What a session keeps: the state is saved, loaded, and more may be tracked beside it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from geartrain.parallel.session_facts import SessionFacts
from geartrain.parallel.tracked_objects import TrackedObjects

if TYPE_CHECKING:
    from geartrain.data.loader import ShareLoader


@dataclass(slots=True)
class SessionState(SessionFacts):
    """The state of a session, which its subclass trains with."""

    _loaders: list[ShareLoader] = field(init=False, default_factory=list)
    _saved_positions: list[dict[str, int | bool]] = field(init=False, default_factory=list)
    _tracked: TrackedObjects = field(init=False, default_factory=TrackedObjects)

    def track(self, **objects: object) -> None:
        """Keep the state of more objects: saved, loaded and handed over with the rest.

        For averages of weights, metrics, counters: all that has ``state_dict()`` and
        ``load_state_dict(state)``, and whose state consists of tensors, arrays, numbers,
        strings and containers. What the lead holds is saved, and every rank gets it back.
        Call it before the first step, before or after ``setup``: where the run is resumed,
        or joined, the objects take on their saved state at once, or as soon as it is
        there.

            ema = torch.optim.swa_utils.AveragedModel(model)
            session.track(ema=ema)
            session.after_step(lambda: ema.update_parameters(model))

        Args:
            objects: By name; each becomes a component of what is saved.

        Raises:
            CheckpointError: If a state holds what can't be kept, or the saved one does not
                fit its object.
            ConfigError: If a name can't be used, or an object has no state.
        """
        self._tracked.add(objects)

    def after_step(self, function: Callable[[], object]) -> None:
        """Call a function after each step that is applied, before its state is saved.

        What is updated here goes with its step: into a save of that step, and on a device
        that joins, also for steps that the others made while it came. What the loop updates
        by itself comes a step later there.

        Args:
            function: Called without arguments, on all ranks that train.

        Raises:
            ConfigError: If it can't be called.
        """
        self._tracked.call_after_steps(function)

    def save(self, path: str | Path) -> None:
        """Save everything needed to go on: the lead writes, the others return at once.

        With ``setup(compression=...)`` on several hosts all ranks must call it, after the
        same step: each keeps a part of what its codes lost, and hands it to the lead. To
        call it on all ranks is right in any case: where the lead is lost over it, the
        next one saves again after the next step.

        Raises:
            CheckpointError: If it can't be written; an older snapshot there is kept.
            CommunicationError: If a rank's part of what compression owes did not come.
        """
        self._trained().save(Path(path), self._positions())

    def load(self, path: str | Path) -> None:
        """Continue from a snapshot, on this or any other fleet; all ranks call it.

        What the saved run's compression owed goes to whoever codes that part of the
        gradient now; parts that nobody codes any more are dropped with a warning.

        Raises:
            CheckpointError: If it is damaged or belongs to another model.
        """
        self._saved_positions = self._trained().load(Path(path))
        for loader, position in zip(self._loaders, self._saved_positions, strict=False):
            loader.load_state_dict(position)

    def _move_to(self, positions: list[dict[str, int | bool]]) -> None:
        self._saved_positions = positions
        for loader, position in zip(self._loaders, positions, strict=False):
            loader.move_to(position)

    def _positions(self) -> list[dict[str, int | bool]]:
        return [loader.state_dict() for loader in self._loaders]
