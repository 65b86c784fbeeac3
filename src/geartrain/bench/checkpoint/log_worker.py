"""Measures what a logged step takes, on gradients of a GPT that is being trained."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from geartrain.bench.byte_gpt import (
    SourceWindows,
    byte_losses,
    make_model,
    make_optimizer,
)
from geartrain.bench.checkpoint.orders import (
    ADAM_BYTES,
    LOG_MEMBERS,
    ExchangeLog,
    LogFound,
    LogOrder,
)
from geartrain.bench.checkpoint.worker_process import read_order, write_result
from geartrain.bench.macro_settings import ModelSize
from geartrain.checkpoint.agent.messages import LogStep
from geartrain.checkpoint.agent.shard_layout import copy_gradients
from geartrain.checkpoint.gradient_log import ROW_ELEMENTS, decode_step, encode_slot
from geartrain.checkpoint.ranges import StateRange
from geartrain.collectives.codecs.rows import Int8Codec

_SIZE = ModelSize(dim=256, num_layers=4, context=128)
_BATCH_SIZE = 8
_MANTISSA_AND_SIGN_BITS = 24
_ADAM_BITS = 8 * ADAM_BYTES

Array = np.ndarray[Any, np.dtype[Any]]  # Any: of codes


class _Training:
    """A GPT over source code; every step has other samples."""

    def __init__(self, seed: int) -> None:
        self.model = make_model(_SIZE, seed)
        self._optimizer = make_optimizer(self.model)
        self._data = SourceWindows(_SIZE.context)
        self._order = np.random.default_rng(seed)

    @property
    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return list(self.model.named_parameters())

    def step(self) -> torch.Tensor:
        """Train; returns the gradient of all parameters, shape (num_parameters,)."""
        indices = self._order.integers(len(self._data), size=_BATCH_SIZE).tolist()
        batch = self._data.batch(indices)
        self._optimizer.zero_grad()
        loss = byte_losses(self.model(batch[0]), batch).mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types for it
        grads = [p.grad.reshape(-1) for _, p in self.parameters if p.grad is not None]
        flat = torch.cat(grads)
        self._optimizer.step()
        return flat


class _Member:
    """What one member logs of each step: a run of the gradient in whole rows."""

    def __init__(self, training: _Training, start: int, stop: int) -> None:
        self._stop, self._start = stop, start
        self._parts: list[tuple[StateRange, slice]] = []
        begin = 0
        for name, parameter in training.parameters:
            end = begin + parameter.numel()
            first, last = max(start, begin), min(stop, end)
            if first < last:
                part = StateRange(name=name, start=first - begin, stop=last - begin)
                self._parts.append((part, slice(first, last)))
            begin = end
        self._slot = memoryview(bytearray(8 * (stop - start)))

    def log(self, message: torch.Tensor, step: int) -> tuple[int, bool]:
        """Code a step; returns its bytes, and whether the same bits come back."""
        placed = copy_gradients(((p, message[s]) for p, s in self._parts), self._slot)
        record = LogStep(
            slot_index=0,
            step=step,
            previous_lineage=f"{step - 1:x}",
            lineage=f"{step:x}",
            update={},
            parts=placed,
        )
        data = encode_slot(record, self._slot)
        back = b"".join(part.data for part in decode_step(data).parts)
        expected = message[self._start : self._stop].numpy().tobytes()
        return len(data), back == expected


class _Exchange:
    """Counts what the messages of one kind of exchange take in the log."""

    def __init__(self, training: _Training) -> None:
        total = sum(p.numel() for _, p in training.parameters)
        self.num_parameters = total
        rows = -(-total // ROW_ELEMENTS)
        cuts = [
            min(total, ROW_ELEMENTS * (rows * index // LOG_MEMBERS))
            for index in range(LOG_MEMBERS + 1)
        ]
        cuts[-1] = total
        self._members = [
            _Member(training, start, stop) for start, stop in itertools.pairwise(cuts)
        ]
        self._sizes: list[list[int]] = []
        self._entropies: list[float] = []
        self.is_exact = True

    def log(self, message: torch.Tensor, step: int, entropy_bits: float) -> None:
        """Have all members log what was applied."""
        coded = [member.log(message, step) for member in self._members]
        self._sizes.append([size for size, _ in coded])
        self._entropies.append(entropy_bits)
        self.is_exact &= all(is_equal for _, is_equal in coded)

    def found(self) -> ExchangeLog:
        """The means over the steps."""
        state_bytes = ADAM_BYTES * self.num_parameters
        totals = [sum(sizes) / state_bytes for sizes in self._sizes]
        largest = [max(sizes) / state_bytes for sizes in self._sizes]
        return ExchangeLog(
            all_fraction=float(np.mean(totals)),
            member_fraction=float(np.mean(largest)),
            entropy_fraction=float(np.mean(self._entropies)) / _ADAM_BITS,
        )


def _entropy_bits(codes: Array) -> float:
    """Shannon's entropy of single bytes, in bits each."""
    shares = np.bincount(codes, minlength=256) / codes.size
    shares = shares[shares > 0]
    return float(-(shares * np.log2(shares)).sum())


def float_bits(values: torch.Tensor) -> float:
    """Bits a value of a perfect code, were sign and mantissa random.

    Zeros, such as the rows of embeddings that no sample had, take none.
    """
    words = values.numpy().view(np.uint32)
    others = words[(words << 1) != 0]
    exponents = ((others >> 23) & 0xFF).astype(np.uint8)
    bits = _MANTISSA_AND_SIGN_BITS + _entropy_bits(exponents)
    share: float = others.size / words.size
    return bits * share


def row_code_bits(message: torch.Tensor) -> float:
    """Bits a value of a perfect code for the places between a row's least and largest."""
    whole = message[: message.numel() // ROW_ELEMENTS * ROW_ELEMENTS].numpy()
    rows = whole.reshape(-1, ROW_ELEMENTS)
    rows = rows[rows.max(axis=1) > rows.min(axis=1)]
    least = rows.min(axis=1, keepdims=True)
    span = rows.max(axis=1, keepdims=True) - least
    codes = np.rint(255 * (rows - least) / span).reshape(-1).astype(np.uint8)
    share: float = codes.size / whole.size
    return _entropy_bits(codes) * share


def _messages(training: _Training, order: LogOrder) -> Iterator[torch.Tensor]:
    for step in range(order.num_steps):
        gradient = training.step()
        if step >= order.num_steps - order.num_logged:
            yield gradient


def main() -> None:
    """Train, and log the last steps both ways."""
    order = read_order(LogOrder)
    training, codec = _Training(order.seed), Int8Codec()
    exact, coded = _Exchange(training), _Exchange(training)
    code = torch.empty(codec.encoded_bytes(exact.num_parameters), dtype=torch.uint8)
    for step, gradient in enumerate(_messages(training, order)):
        exact.log(gradient, step, float_bits(gradient))
        codec.encode(gradient, code)
        message = torch.empty_like(gradient)
        codec.decode(code, message)
        coded.log(message, step, row_code_bits(message))
    found = LogFound(
        num_parameters=exact.num_parameters,
        float32=exact.found(),
        int8=coded.found(),
        is_exact=exact.is_exact and coded.is_exact,
    )
    write_result(order.result, found)


if __name__ == "__main__":
    main()
