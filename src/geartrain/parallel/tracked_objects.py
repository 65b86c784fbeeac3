"""What a script keeps beside its model: averages of weights, metrics, counters.

Each becomes a component of the saved state under the name that the script gives it, and is
given to a device that joins like the weights. A state that is restored before the script
has named the object waits for it until the next step.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from geartrain.checkpoint.state_tensors import restore_objects
from geartrain.checkpoint.tree import flatten
from geartrain.errors import ConfigError

logger = logging.getLogger(__name__)

RESERVED_NAMES = frozenset(
    {
        *("model", "optimizer", "training", "lr_scheduler", "loss_scaler"),
        *("averages", "residuals"),
    }
)
"""Components that a training has by itself."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*\Z")  # it may become a file's name


@runtime_checkable
class HasState(Protocol):
    """An object whose state can be taken and given back, as torch's have it."""

    def state_dict(self) -> Any:  # Any: a tree of the checkpoint room
        """The state."""

    def load_state_dict(self, state: Any, /) -> Any:  # Any: as above; torch returns keys
        """Take on a state."""


class TrackedObjects:
    """The objects of one session, and what is done after each step that is applied."""

    def __init__(self) -> None:
        self._objects: dict[str, HasState] = {}
        self._waiting: dict[str, Any] = {}  # Any: state dicts
        self._functions: list[Callable[..., object]] = []

    def add(self, objects: Mapping[str, object]) -> None:
        """Keep the state of more objects from now on.

        An object whose state was restored before it was named takes that on.

        Args:
            objects: By name.

        Raises:
            CheckpointError: If a state holds what can't be kept, or the saved one does not
                fit. Nothing is tracked then.
            ConfigError: If a name is taken or can't be one, or an object has no state.
        """
        checked = {name: self._check(name, found) for name, found in objects.items()}
        waiting = {name: self._waiting[name] for name in checked if name in self._waiting}
        restore_objects({name: checked[name] for name in waiting}, waiting)
        self._objects |= checked
        for name in waiting:
            del self._waiting[name]

    def call_after_steps(self, function: object) -> None:
        """Have a function called after each step that is applied here.

        Raises:
            ConfigError: If it can't be called.
        """
        if not callable(function):
            msg = (
                f"after_step({function!r}) needs a function without arguments, such as "
                "lambda: ema.update_parameters(model)"
            )
            raise ConfigError(msg)
        self._functions.append(function)

    def after_step(self) -> None:
        """A step was applied: here, or taken over as it was computed elsewhere."""
        if self._waiting:
            logger.warning(
                "The saved state of %s is dropped: no object was tracked under that name "
                "before the first step.",
                ", ".join(self._waiting),
            )
            self._waiting.clear()
        for function in self._functions:
            function()

    def state_dicts(self) -> dict[str, Any]:  # Any: trees of the checkpoint room
        """The states by name, also those that wait for their objects."""
        return self._waiting | {
            name: found.state_dict() for name, found in self._objects.items()
        }

    def restore(self, parts: Mapping[str, Any]) -> None:  # Any: see state_dicts
        """Take on the states among these components.

        An object that has none stays as it is, with a warning.

        Raises:
            CheckpointError: If a state does not fit its object.
        """
        own = {name: part for name, part in parts.items() if name not in RESERVED_NAMES}
        known = {name: one for name, one in self._objects.items() if name in own}
        restore_objects(known, own)
        self._waiting = {name: part for name, part in own.items() if name not in known}
        missing = [name for name in self._objects if name not in own]
        if missing:
            logger.warning(
                "No state was saved for %s; it goes on as it is.", ", ".join(missing)
            )

    def _check(self, name: str, found: object) -> HasState:
        if name in RESERVED_NAMES or not _NAME.match(name):
            msg = (
                f"an object can't be tracked as {name!r}; use letters, digits and _, and "
                f"none of {', '.join(sorted(RESERVED_NAMES))}"
            )
            raise ConfigError(msg)
        if self._objects.get(name, found) is not found:
            msg = (
                f"another object is tracked as {name!r} already; give this one another name"
            )
            raise ConfigError(msg)
        if not isinstance(found, HasState):
            msg = (
                f"{name}={type(found).__name__} has no state_dict() and load_state_dict(); "
                "track an object that has both"
            )
            raise ConfigError(msg)
        flatten(found.state_dict(), name)  # refused now, and not at the first save
        return found
