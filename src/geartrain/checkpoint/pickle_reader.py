"""Read what a pickle describes, without running any of it.

torch's distributed checkpoints keep their metadata as a pickle, and loading one calls
whatever it names. Here the stream is taken as a description: its instructions are
followed for plain data, and what it would import or call becomes a record of the name
and the arguments. Nothing is imported, nothing is called, no class is touched; who
reads the records knows the few names that make sense and refuses all others.

Source: the opcodes as the standard library's ``pickletools`` documents them.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from geartrain.errors import CheckpointError

Value = Any
"""Plain data, and the two records below."""

_MARK = object()
_MAX_BYTES = 2**30


@dataclass(frozen=True, slots=True, eq=False)
class Name:
    """What a pickle would import."""

    path: str
    """Such as ``torch.Size``."""


@dataclass(slots=True, eq=False)
class Call:
    """What a pickle would make by a call; hashable, since some are keys of dicts."""

    path: str
    arguments: tuple[Value, ...]
    state: Value = None
    items: list[tuple[Value, Value]] = field(default_factory=list)
    """What it would put into it, where it is a kind of dict."""


def read_pickle(data: bytes, source: str) -> Value:
    """Follow a pickle's instructions as far as they are data.

    Args:
        data: The pickle, of protocol 2 or later.
        source: What to call it in an error.

    Raises:
        CheckpointError: If it is damaged, or uses instructions that data don't need.
    """
    if len(data) > _MAX_BYTES:
        msg = f"{source} has {len(data)} bytes, more than {_MAX_BYTES}: it is not read"
        raise CheckpointError(msg)
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.pop()
            machine.follow(opcode.name, argument)
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        msg = f"{source} is damaged or no pickle ({error}); take another copy"
        raise CheckpointError(msg) from error
    msg = f"{source} is cut off; take another copy"
    raise CheckpointError(msg)


def refuse(what: str) -> NoReturn:
    """Say what is wrong with data; who reads a whole file says which one.

    Raises:
        ValueError: Always.
    """
    raise ValueError(what)


class _Machine:
    """The stack, and what each instruction does to it."""

    def __init__(self) -> None:
        self._stack: list[Value] = []
        self._memo: dict[int, Value] = {}

    def follow(self, name: str, argument: Value) -> None:
        if name in _IGNORED:
            return
        if name in _LITERALS:
            self._stack.append(argument)
        elif name in _CONSTANTS:
            self._stack.append(_CONSTANTS[name]())
        elif name in _ACTIONS:
            _ACTIONS[name](self, argument)
        else:
            refuse(f"it uses {name}, which plain data don't need")

    def pop(self) -> Value:
        value = self._stack.pop()
        if value is _MARK:
            refuse("a mark stands where a value should")
        return value

    def remember(self, argument: Value) -> None:
        index = len(self._memo) if argument is None else argument
        self._memo[index] = self._stack[-1]

    def recall(self, argument: Value) -> None:
        self._stack.append(self._memo[argument])

    def make_tuple(self, count: int) -> None:
        items = [self.pop() for _ in range(count)]
        self._stack.append(tuple(reversed(items)))

    def make_marked_tuple(self, _: Value) -> None:
        self._stack.append(tuple(self._pop_to_mark()))

    def append(self, _: Value) -> None:
        item = self.pop()
        self._extend([item])

    def append_marked(self, _: Value) -> None:
        self._extend(self._pop_to_mark())

    def set_item(self, _: Value) -> None:
        value, key = self.pop(), self.pop()
        self._update([key, value])

    def set_marked_items(self, _: Value) -> None:
        self._update(self._pop_to_mark())

    def name(self, argument: Value) -> None:
        module, _, qualified = argument.partition(" ")
        self._stack.append(Name(f"{module}.{qualified}"))

    def name_from_stack(self, _: Value) -> None:
        qualified, module = self.pop(), self.pop()
        if not isinstance(module, str) or not isinstance(qualified, str):
            refuse("a name is no text")
        self._stack.append(Name(f"{module}.{qualified}"))

    def call(self, _: Value) -> None:
        arguments, what = self.pop(), self.pop()
        if not isinstance(what, Name) or not isinstance(arguments, tuple):
            refuse("it calls what is no name")
        self._stack.append(Call(what.path, arguments))

    def build(self, _: Value) -> None:
        state = self.pop()
        target = self._stack[-1]
        if not isinstance(target, Call) or target.state is not None:
            refuse("it gives a state to what can't have one")
        target.state = state

    def persistent(self, _: Value) -> None:
        self._stack.append(Call("persistent", (self.pop(),)))

    def _pop_to_mark(self) -> list[Value]:
        items = []
        while (value := self._stack.pop()) is not _MARK:
            items.append(value)
        return items[::-1]

    def _extend(self, items: list[Value]) -> None:
        target = self._stack[-1]
        if not isinstance(target, list):
            refuse("it appends to what is no list")
        target.extend(items)

    def _update(self, flat: list[Value]) -> None:
        target = self._stack[-1]
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        if isinstance(target, Call):
            target.items.extend(pairs)
        elif isinstance(target, dict):
            target.update(pairs)
        else:
            refuse("it sets items of what is no dict")


_IGNORED = frozenset({"PROTO", "FRAME"})
_LITERALS = frozenset(
    {
        "BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT",
        "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8",
        "SHORT_BINBYTES", "BINBYTES", "BINBYTES8",
    }
)  # fmt: skip
_CONSTANTS: dict[str, Callable[[], Value]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_DICT": dict,
    "MARK": lambda: _MARK,
}
_ACTIONS: dict[str, Callable[[_Machine, Value], None]] = {
    "BINPUT": _Machine.remember,
    "LONG_BINPUT": _Machine.remember,
    "MEMOIZE": _Machine.remember,
    "BINGET": _Machine.recall,
    "LONG_BINGET": _Machine.recall,
    "TUPLE1": lambda machine, _: machine.make_tuple(1),
    "TUPLE2": lambda machine, _: machine.make_tuple(2),
    "TUPLE3": lambda machine, _: machine.make_tuple(3),
    "TUPLE": _Machine.make_marked_tuple,
    "APPEND": _Machine.append,
    "APPENDS": _Machine.append_marked,
    "SETITEM": _Machine.set_item,
    "SETITEMS": _Machine.set_marked_items,
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.name_from_stack,
    "REDUCE": _Machine.call,
    "NEWOBJ": _Machine.call,
    "BUILD": _Machine.build,
    "BINPERSID": _Machine.persistent,
}
