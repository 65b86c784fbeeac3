"""Asks the coordinator of a run for something, beside the launcher's loop."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from geartrain.elastic.address_file import read_address
from geartrain.elastic.asking import ask
from geartrain.elastic.greeting import Credentials
from geartrain.elastic.messages import Answer, DrainAsked
from geartrain.elastic.process import read_token
from geartrain.errors import GeartrainError
from geartrain.parallel.worker_spec import CoordinatorSpec

_ANSWER_S = 5.0
REASON = "asked to by geartrain"


class CoordinatorSide(Protocol):
    """Where the coordinator can be reached from."""

    def coordinator_side(self) -> AbstractContextManager[None]:
        """Have this thread's new sockets reach it."""


class CoordinatorQuestion:
    """One request, in a thread of its own, since the answer may take a moment.

    Attributes:
        member_ids: Whom it is about.
        refusal: Why it comes to nothing, once it is answered; None: it is done.
    """

    def __init__(
        self,
        coordinator: CoordinatorSpec,
        member_ids: tuple[str, ...],
        side: CoordinatorSide,
    ) -> None:
        self.member_ids = member_ids
        self.refusal: str | None = None
        self._coordinator = coordinator
        self._side = side
        self._thread = threading.Thread(
            target=self._ask, name="geartrain-question", daemon=True
        )
        self._thread.start()

    @property
    def is_open(self) -> bool:
        """Whether the answer is still to come."""
        return self._thread.is_alive()

    def wait(self, within_s: float) -> bool:
        """Wait for the answer; whether it is there."""
        self._thread.join(within_s)
        return not self.is_open

    def _ask(self) -> None:
        coordinator = self._coordinator
        request = DrainAsked(request_id=1, member_ids=self.member_ids, reason=REASON)
        try:
            address = read_address(Path(coordinator.address_file))
            token_file = coordinator.token_file
            credentials = Credentials(
                run_id=coordinator.run_id,
                token=read_token(Path(token_file) if token_file is not None else None),
            )
            with self._side.coordinator_side():
                answer = ask((address.host, address.port), credentials, request, _ANSWER_S)
        except (GeartrainError, OSError) as error:
            self.refusal = f"the coordinator could not be asked: {error}"
            return
        if isinstance(answer, Answer) and not answer.is_accepted:
            self.refusal = answer.text


def ask_to_drain(
    coordinator: CoordinatorSpec, member_ids: tuple[str, ...], side: CoordinatorSide
) -> CoordinatorQuestion:
    """Have members leave at the next step boundary."""
    return CoordinatorQuestion(coordinator, member_ids, side)
