"""A limit on the bytes of a process's tensors, raising torch's own error.

The one file of this folder that imports torch. Storages are counted as operators
return them, so what an operator needs inside itself is not seen.

Source: the storage-counting dispatch mode measured against a real allocator: equal
but for tensors made outside the mode.
"""
# ruff: noqa: SLF001 - torch has no public name for a storage's identity or a schema

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)

from geartrain.errors import ConfigError
from geartrain.units import format_bytes

_FORESEE_NUMEL = 2**22
"""Operators on this many elements or more are sized before they run: beyond it the
memory cgroup, some hundred MiB above the limit, could kill the process first."""


class TensorMemoryLimit:
    """Counts CPU tensor storages and refuses to exceed a limit.

    Use as a context manager around everything that makes tensors; those that exist
    already are not counted. It holds for the thread that enters it and for the
    backward passes that thread starts.

    Args:
        limit_bytes: The most that tensors may take together; None only counts.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        if limit_bytes is not None and limit_bytes <= 0:
            msg = f"limit_bytes={limit_bytes} must be > 0, or None for no limit"
            raise ConfigError(msg)
        self.limit_bytes = limit_bytes
        self._mode = _CountStorages(limit_bytes)

    @property
    def in_use_bytes(self) -> int:
        """Bytes of the storages alive now."""
        return self._mode.in_use_bytes

    @property
    def peak_bytes(self) -> int:
        """Most bytes in use since the start or the last ``reset_peak``."""
        return self._mode.peak_bytes

    def reset_peak(self) -> None:
        """Start the peak anew from what is in use."""
        self._mode.peak_bytes = self._mode.in_use_bytes

    def __enter__(self) -> Self:
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # torch's
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._mode.__exit__(kind, error, trace)  # type: ignore[no-untyped-call]  # torch's


def active_counter() -> _CountStorages | None:
    """The counting in force in this thread, innermost first; None without one."""
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, _CountStorages):
            return mode
    return None


class _UnknownSizeError(Exception):
    """An argument whose operator can't be run without memory to see what it returns."""


class _CountStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    supports_higher_order_operators = True

    def __init__(self, limit_bytes: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.limit_bytes = limit_bytes
        self.in_use_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        self._never_allocates: dict[Any, bool] = {}

    def __torch_dispatch__(
        self,
        func: Any,  # Any: an OpOverload or a higher-order operator
        types: Any,  # Any: torch's own signature says no more
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        skip = self._never_allocates.get(func)
        if skip is None:
            skip = self._never_allocates[func] = _never_allocates(func)
        if skip:
            return func(*args, **kwargs)
        if self.limit_bytes is not None and _is_large(args):
            self._check(_foresee_bytes(func, args, kwargs))
        result = func(*args, **kwargs)
        try:
            self._count(result)
        except torch.OutOfMemoryError:
            del result  # the traceback would keep it alive
            raise
        return result

    def _count(self, result: Any) -> None:
        for tensor in _tensors_in(result):
            if tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            if storage.device.type != "cpu":  # a fake tensor says cpu, its storage meta
                continue
            key, num_bytes = storage._cdata, storage.nbytes()
            before = self._sizes.get(key)
            if before == num_bytes:
                continue
            self._check(num_bytes - (before or 0))
            if before is None:
                weakref.finalize(storage, self._forget, key).atexit = False
                before = 0
            self._sizes[key] = num_bytes  # out= and resize_ change a known storage
            self.in_use_bytes += num_bytes - before
            self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)

    def _forget(self, key: int) -> None:
        self.in_use_bytes -= self._sizes.pop(key, 0)

    def _check(self, wanted_bytes: int) -> None:
        limit = self.limit_bytes
        if limit is None or self.in_use_bytes + wanted_bytes <= limit:
            return
        msg = (
            f"tried to allocate {format_bytes(wanted_bytes)} ({wanted_bytes} bytes) with "
            f"{format_bytes(self.in_use_bytes)} ({self.in_use_bytes} bytes) in use; this "
            f"emulated device holds {format_bytes(limit)} ({limit} bytes). Lower the "
            "micro-batch size or give the device more memory"
        )
        raise torch.OutOfMemoryError(msg)


def _never_allocates(func: Any) -> bool:
    """Views and plain in-place operators make no storage."""
    if not isinstance(func, torch._ops.OpOverload):
        return False
    if func.is_view:
        return True
    name = str(func._schema.name)
    changes_size = name in {"aten::resize_", "aten::set_", "aten::resize_as_"}
    return name.endswith("_") and func._schema.is_mutable and not changes_size


def _is_large(args: tuple[Any, ...]) -> bool:
    for value in args:
        if isinstance(value, torch.Tensor):
            if value.numel() >= _FORESEE_NUMEL:
                return True
        elif isinstance(value, (list, tuple, torch.Size)) and value:
            if isinstance(value[0], int):
                numel = 1
                for size in value:
                    numel *= size if isinstance(size, int) else 1
                if numel >= _FORESEE_NUMEL:
                    return True
            elif _is_large(tuple(value)):
                return True
    return False


def _foresee_bytes(func: Any, args: Any, kwargs: Any) -> int:
    """Bytes that an operator will return anew, by running it without memory.

    Returns:
        0 where it can't be told; then the check after the run has to do.
    """
    if torch._guards.detect_fake_mode() is not None:
        return 0
    known: set[int] = set()

    def without_memory(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.device.type != "cpu" or value.layout is not torch.strided:
            raise _UnknownSizeError
        if type(value) not in {torch.Tensor, torch.nn.Parameter}:
            raise _UnknownSizeError
        meta = torch.empty_strided(
            value.size(), value.stride(), dtype=value.dtype, device="meta"
        )
        known.add(meta.untyped_storage()._cdata)
        return meta

    try:
        meta_args = _map(without_memory, args)
        meta_kwargs = {key: _map(without_memory, value) for key, value in kwargs.items()}
        if not known or "device" in meta_kwargs:  # a factory, or a copy to a device
            device = meta_kwargs.get("device")
            if device is not None and torch.device(device).type != "cpu":
                return 0
            meta_kwargs["device"] = torch.device("meta")
            meta_kwargs.pop("pin_memory", None)
        result = func(*meta_args, **meta_kwargs)
    except Exception:  # noqa: BLE001 - the operator itself will say what is wrong
        return 0
    sizes = {
        storage._cdata: storage.nbytes()
        for storage in (tensor.untyped_storage() for tensor in _tensors_in(result))
    }
    return sum(size for key, size in sizes.items() if key not in known)


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)([_map(change, item) for item in value])
    return change(value)


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        inner = _inner_tensors(value)
        if inner is None:
            yield value
        else:
            yield from _tensors_in(inner)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors_in(item)


def _inner_tensors(value: Any) -> list[Any] | None:  # Any: torch's type guard is narrow
    """Return the tensors that a wrapper subclass holds; None for plain tensors."""
    if type(value) in {torch.Tensor, torch.nn.Parameter}:  # nearly all, and fast
        return None
    if not is_traceable_wrapper_subclass(value):
        return None
    return [getattr(value, name) for name in value.__tensor_flatten__()[0]]
