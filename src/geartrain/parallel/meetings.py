"""What all ranks do together outside of steps: evaluations, reduced metrics.

Who takes part but has not made a step yet stands elsewhere in its script, so that it can't
be met. Each rank leaves in the store what came of a meeting; who joins takes it from there
when its script comes to that place, and so does who was interrupted in a meeting that had
ended for others.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar, cast

from geartrain.errors import CommunicationError
from geartrain.parallel.commit import StepName
from geartrain.parallel.regroup_training import go_on, retried

if TYPE_CHECKING:
    from geartrain.parallel.trainer import Trainer

T = TypeVar("T")

_KEPT = 64
"""Results that stay in the store; who joins is never far behind."""
_PAUSE_S = 0.01


@dataclass(slots=True)
class Meetings:
    """The meetings of one rank, named by the step that they come after, and their order.

    Args:
        trainer: Of this rank.
    """

    trainer: Trainer
    _after: StepName | None = None
    _num_held: int = 0  # since that step
    _kept: deque[str] = field(default_factory=deque)

    def hold(self, operation: Callable[[], T]) -> T:
        """Do what needs all ranks, or read what came of it.

        Args:
            operation: Returns what JSON can hold where others may have to read it.

        Raises:
            CommunicationError: If the others can't go on.
        """
        trainer = self.trainer
        key = self._next_key()
        if trainer.joiner is not None or trainer.place.rank in trainer.place.groups.fresh:
            return self._read(key, operation)

        was_begun = False

        def meet() -> T:
            nonlocal was_begun
            if was_begun and self._is_known(key):
                return self._take(key)  # it had ended for others when it was interrupted
            was_begun = True
            with trainer.place.groups.among_established():
                return operation()

        number = trainer.regrouper.num_together + 1 if trainer.regrouper else 0
        result = retried(trainer, meet)
        if trainer.regrouper is not None:
            trainer.regrouper.num_together = number
            self._leave(key, number, result)
        return result

    def _next_key(self) -> str:
        name = self.trainer.engine.name
        if self._after != name:
            self._after, self._num_held = name, 0
        self._num_held += 1
        # Of the history too: a script may load a state, and come to a step twice.
        return f"meetings/{name.step}/{name.lineage}/{self._num_held}"

    def _leave(self, key: str, number: int, result: object) -> None:
        store = self.trainer.place.groups.store
        assert store is not None
        try:
            text = json.dumps([number, result])
        except TypeError:
            text = json.dumps([number, None])  # of use to the lead alone
        store.set(key, text)
        self._kept.append(key)
        while len(self._kept) > _KEPT:
            forgotten = self._kept.popleft()
            if self.trainer.place.groups.is_lead:
                store.delete_key(forgotten)

    def _read(self, key: str, operation: Callable[[], T]) -> T:
        """Wait for what came of a meeting.

        Where the others are past it and have held none, it is this rank's alone.
        """
        trainer = self.trainer
        store = trainer.place.groups.store
        assert store is not None
        deadline_s = time.monotonic() + trainer.place.groups.timeout_s
        while not store.check([key]):
            joiner = trainer.joiner
            if joiner is not None and joiner.knows_later() and not store.check([key]):
                return operation()
            if joiner is None:
                self._look_up()
            if time.monotonic() > deadline_s:
                msg = (
                    f"waited {trainer.place.groups.timeout_s:g} s for what the others "
                    f"found out after step {trainer.step_index}; look at the lead's log"
                )
                raise CommunicationError(msg)
            time.sleep(_PAUSE_S)
        return self._take(key)

    def _is_known(self, key: str) -> bool:
        store = self.trainer.place.groups.store
        return store is not None and bool(store.check([key]))

    def _take(self, key: str) -> T:  # type: ignore[type-var]  # as the meeting returned it
        store = self.trainer.place.groups.store
        assert store is not None
        number, result = json.loads(store.get(key))
        regrouper = self.trainer.regrouper
        if regrouper is not None:
            regrouper.num_together = max(regrouper.num_together, number)
        return cast("T", result)

    def _look_up(self) -> None:
        """Go along where members come and go meanwhile."""
        trainer = self.trainer
        if trainer.regrouper is None:
            return
        try:
            trainer.regrouper.membership.check()
        except CommunicationError as error:
            go_on(trainer, error)
