"""Lets a witness see what a script asks of its session.

The public methods of ``Session`` and of the loader are wrapped, in this process only,
for as long as the script runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from geartrain.bench.chaos.witness import Witness
from geartrain.data.loader import ShareLoader
from geartrain.errors import TrainingStopped
from geartrain.session import Session

Decorator = Callable[[Any], Any]  # Any: a method of any signature


@contextmanager
def watched(witness: Witness) -> Iterator[None]:
    """Have a witness follow the session that is made inside the block."""
    undo = [_wrap(*which) for which in _hooks(witness)]
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        witness.ends(error)
        for restore in undo:
            restore()


def _hooks(witness: Witness) -> list[tuple[type, str, Decorator]]:
    return [
        (Session, "__post_init__", _after(lambda owner, _: witness.met(owner))),
        (Session, "setup", _after(lambda _, result: witness.trains(*result))),
        (Session, "setup_dataloader", _after(lambda _, result: witness.reads(result))),
        (Session, "load", _after(lambda _, __: witness.restored())),
        (Session, "step", functools.partial(_step, witness)),
        (Session, "micro_batches", functools.partial(_opening, witness)),
        (Session, "optimizer_step", functools.partial(_step, witness)),
        (ShareLoader, "reassign", _after(lambda _, result: witness.begins(result))),
    ]


def _step(witness: Witness, method: Any) -> Any:  # Any: a method of Session
    @functools.wraps(method)
    def wrapper(session: Session, *arguments: Any) -> float:  # Any: its own
        before = session.step_index
        if arguments:  # optimizer_step has none; its micro_batches has begun the step
            witness.begins(arguments[0])
        try:
            loss: float = method(session, *arguments)
        except TrainingStopped:
            if session.step_index > before:
                witness.committed(None)
            raise
        witness.committed(loss)
        return loss

    return wrapper


def _opening(witness: Witness, method: Any) -> Any:  # Any: a method of Session
    @functools.wraps(method)
    def wrapper(session: Session, batch: Any) -> Any:  # Any: its own
        witness.begins(batch)
        return method(session, batch)

    return wrapper


def _after(observe: Callable[[Any, Any], None]) -> Decorator:
    """Have a method's object and result observed."""

    def decorate(method: Any) -> Any:  # Any: a method of any signature
        @functools.wraps(method)
        def wrapper(owner: Any, *arguments: Any, **options: Any) -> Any:  # Any: its own
            result = method(owner, *arguments, **options)
            observe(owner, result)
            return result

        return wrapper

    return decorate


def _wrap(owner: type, name: str, decorate: Decorator) -> Callable[[], None]:
    """Replace a method; what is returned puts the old one back."""
    original = getattr(owner, name)
    setattr(owner, name, decorate(original))

    def restore() -> None:
        setattr(owner, name, original)

    return restore
