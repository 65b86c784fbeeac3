"""Steps whose forward pass is the script's own: it takes micro-batches and gives losses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from geartrain.errors import CommunicationError, ConfigError
from geartrain.parallel.regroup_training import check_members, do_again, own_forward

if TYPE_CHECKING:
    from geartrain.parallel.loss_terms import LossTerm
    from geartrain.parallel.step_work import MicroBatch
    from geartrain.parallel.trainer import Trainer


@dataclass(slots=True)
class OwnForward:
    """The step of one rank that its script computes.

    Args:
        trainer: Of this rank.
    """

    trainer: Trainer
    _work: Iterator[MicroBatch] | None = None
    _micro: MicroBatch | None = None

    def micro_batches(self, batch: Any) -> Iterator[Any]:  # Any: the user's batch
        """Open a step; see ``Session.micro_batches``."""
        trainer = self.trainer
        self._work = self._open(batch)
        try:
            for micro in self._work:
                self._micro = micro
                with trainer.micro_context(micro):
                    yield micro.batch
                if self._micro is not None:
                    msg = (
                        "a micro-batch got no backward(); call it once for each micro-batch"
                    )
                    raise ConfigError(msg)
        except BaseException:  # GeneratorExit too: the loop was left before its end
            trainer.engine.abandon()
            raise
        finally:
            self._work = self._micro = None

    def backward(self, terms: dict[str, LossTerm]) -> None:
        """Run backward of the open micro-batch; see ``Session.backward``."""
        micro, trainer = self._micro, self.trainer
        if micro is None:
            msg = (
                "backward() needs an open micro-batch; iterate session.micro_batches(batch)"
            )
            raise ConfigError(msg)
        self._micro = None
        with own_forward(trainer):
            check_members(trainer)
            trainer.engine.accumulate(terms, last=micro.is_last, ghost=micro.is_ghost)
        trainer.count(micro)

    def optimizer_step(self) -> float:
        """Finish the step; see ``Session.optimizer_step``."""
        if self._work is not None:
            msg = (
                "optimizer_step() came before the last micro-batch; run the loop over "
                "session.micro_batches(batch) to its end first"
            )
            raise ConfigError(msg)
        with own_forward(self.trainer):
            return self.trainer.finish_step()

    def _open(self, batch: Any) -> Iterator[MicroBatch]:  # Any: the user's batch
        """Open a step; with another share of it, where members have come or gone."""
        while True:
            try:
                return self.trainer.open_step(batch)
            except CommunicationError as error:
                batch = do_again(self.trainer, error, batch)
