"""Watches a session from inside its process and writes down what the checks need.

The script knows nothing of it; ``witness_hooks`` wraps what it calls.
"""

from __future__ import annotations

import hashlib
import math
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from geartrain.bench.chaos.witness_log import (
    Commit,
    Goodbye,
    Hello,
    Restore,
    WitnessWriter,
    Work,
)
from geartrain.data.loader import ShareLoader
from geartrain.errors import TrainingStopped
from geartrain.session import Session

_DIGEST_BYTES = 12
"""Against accidents, not against attackers."""


class EnoughSteps(BaseException):
    """As many steps as were wanted have been made; no script is to catch it."""


@dataclass(slots=True)
class Witness:
    """Follows one session.

    Args:
        folder: Where the records go, and the weights at the end.
        max_steps: The script ends after so many; None: when it does by itself.
    """

    folder: Path
    max_steps: int | None = None
    _writer: WitnessWriter | None = None
    _session: Session | None = None
    _model: torch.nn.Module | None = None
    _optimizer: torch.optim.Optimizer | None = None
    _loaders: list[ShareLoader] = field(default_factory=list)
    _plan: str = ""

    def met(self, session: Session) -> None:
        """A session was made; the first one of a process is followed."""
        if self._session is not None:
            return
        self._session = session
        name = f"{session.device_id.replace(':', '-').replace('/', '-')}-{os.getpid()}"
        self._writer = WitnessWriter(self.folder, name)
        self._write(
            Hello(
                at_s=time.time(),
                pid=os.getpid(),
                rank=session.rank,
                device_id=session.device_id,
            )
        )

    def trains(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """It was given a model."""
        self._model, self._optimizer = model, optimizer

    def reads(self, loader: ShareLoader) -> None:
        """It was given a loader."""
        self._loaders.append(loader)

    def begins(self, batch: Any) -> None:  # Any: the user's batch
        """It begins a step, or begins it again with another share."""
        loader = self._loader_of(batch)
        if loader is None or self._session is None:
            return
        current = loader.current
        self._plan = plan_code(self._session)
        self._write(
            Work(
                at_s=time.time(),
                step=self._session.step_index,
                plan=self._plan,
                epoch=current.epoch,
                step_in_epoch=current.step_in_epoch,
                start=current.start,
                stop=current.stop,
                count=current.global_count,
                num_tail=current.tail_stop - current.tail_start,
                samples=current.sample_indices[current.start : current.stop],
                epoch_steps=len(loader),
            )
        )

    def committed(self, loss: float | None) -> None:
        """It has a step more."""
        session = self._session
        assert session is not None
        has_loss = loss is not None and math.isfinite(loss)
        self._write(
            Commit(
                at_s=time.time(),
                step=session.step_index,
                plan=self._plan,
                loss=loss if has_loss else None,
                digest=self.digest(),
            )
        )
        if session.step_index == self.max_steps:
            raise EnoughSteps

    def restored(self) -> None:
        """It has loaded a state."""
        assert self._session is not None
        self._write(Restore(at_s=time.time(), step=self._session.step_index))

    def ends(self, error: BaseException | None) -> None:
        """The script has ended."""
        session = self._session
        if session is None:
            return
        digest = self.digest()
        if digest is not None and session.step_index:
            self._save_weights()
        is_stop = isinstance(error, TrainingStopped)
        is_end = error is None or isinstance(error, EnoughSteps)
        self._write(
            Goodbye(
                at_s=time.time(),
                step=session.step_index,
                digest=digest,
                why="finished" if is_end else "stopped" if is_stop else "failed",
                message="" if is_end else f"{type(error).__name__}: {error}",
            )
        )

    def digest(self) -> str | None:
        """Code of weights and optimizer state; None where this device is left out."""
        session = self._session
        if session is None or self._model is None or self._optimizer is None:
            return None
        plan = session.current_plan
        if plan is not None and session.device_id in plan.left_out:
            return None
        return state_digest(self._model, self._optimizer)

    def _write(self, record: Hello | Work | Commit | Restore | Goodbye) -> None:
        assert self._writer is not None
        self._writer.write(record)

    def _loader_of(self, batch: Any) -> ShareLoader | None:  # Any: the user's batch
        for loader in self._loaders:
            if loader.last_batch is batch:
                return loader
        return None

    def _save_weights(self) -> None:
        """All weights as float64, which numpy reads whatever their type was."""
        assert self._model is not None
        assert self._session is not None
        weights = {
            name: parameter.detach().to("cpu", torch.float64).contiguous().clone()
            for name, parameter in self._model.named_parameters()
        }
        device = self._session.device_id.replace(":", "-").replace("/", "-")
        save_file(weights, self.folder / f"{device}-{os.getpid()}.safetensors")


def state_digest(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Code of all parameters and of the optimizer's tensors, bit for bit.

    Buffers are left out: running statistics are each device's own between saves.
    """
    code = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for name, parameter in model.named_parameters():
        code.update(name.encode())
        code.update(_bytes_of(parameter))
        state = optimizer.state.get(parameter, {})
        for key in sorted(map(str, state)):
            value = state[key]
            code.update(key.encode())
            is_tensor = isinstance(value, torch.Tensor)
            code.update(_bytes_of(value) if is_tensor else repr(value).encode())
    return code.hexdigest()


def plan_code(session: Session) -> str:
    """Code of who computes how much by the plan in force."""
    plan = session.current_plan
    if plan is None:
        return ""
    shares = [(r.device_id, r.share) for stage in plan.stages for r in stage.replicas]
    return hashlib.blake2b(repr(shares).encode(), digest_size=4).hexdigest()


def _bytes_of(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().to("cpu").contiguous().flatten()
    return flat.view(torch.uint8).numpy().tobytes()
