"""geartrain's exchange for users who keep DistributedDataParallel.

    model = DistributedDataParallel(model, bucket_cap_mb=4, gradient_as_bucket_view=True)
    exchange = geartrain.collectives.ddp_hook(model)

DDP hands over each bucket of gradients as soon as backward has filled it; the hook queues
it and returns. The threads of the exchange complete DDP's future while backward goes on.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket, Work
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from geartrain.collectives.exchange.bucket_size import choose_bucket_bytes
from geartrain.collectives.exchange_hub import uses_vendor_library
from geartrain.collectives.process_exchange import (
    DEFAULT_TIMEOUT_S,
    ExchangeChoices,
    ProcessExchange,
    join_exchange,
)
from geartrain.collectives.sample_weights import (
    NothingPending,
    Pending,
    SampleWeights,
    WeightFunction,
    checked_weight,
)
from geartrain.collectives.torch_collective import apply_weight_
from geartrain.errors import CommunicationError, ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from geartrain.collectives.exchange.scheduled_collective import ScheduledCollective
    from geartrain.topology.profile import Topology

_MIB = 2**20


def ddp_hook(
    model: torch.nn.Module,
    *,
    compression: str | None = None,
    topology: Topology | str | Path | None = None,
    weight: Callable[..., float] | float | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> DdpExchange:
    """Let a DDP model exchange its gradients by geartrain; all its ranks must call it.

    Where the ranks are on several hosts, the links between these are measured first.

    Args:
        model: Wrapped, with no other communication hook.
        compression: None exchanges exactly; ``auto`` or a codec's name codes what passes
            slow links. What a code loses is added in the next step.
        topology: The links between hosts, or the path of a ``fleet.json`` with them, as
            rank 0 knows them; None measures them.
        weight: None takes the plain mean over ranks, as DDP does. A function is called
            with the arguments of each forward pass and returns its number of samples; a
            number stands until ``set_weight``. Gradients are then averaged over samples.
        timeout_s: Outer limit of every wait for a peer.

    Returns:
        The exchange. It ends with the process, or by its ``close``.

    Raises:
        ConfigError: If the model is not DDP's, has a hook already, or ranks chose
            differently.
        CommunicationError: If a rank does not come in time.
    """
    if not isinstance(model, DistributedDataParallel):
        msg = (
            f"ddp_hook() got a {type(model).__name__}, expected DistributedDataParallel; "
            "wrap the model first"
        )
        raise ConfigError(msg)
    device = next(p.device for p in model.parameters() if p.requires_grad)
    choices = ExchangeChoices(compression=compression, weighted=weight is not None)
    exchange = join_exchange(
        device,
        choices,
        group=model.process_group,
        topology=topology,
        timeout_s=timeout_s,
    )
    try:
        state = DdpExchange(model, exchange, device, choices, weight)
        _register(model, state)
    except BaseException:
        exchange.close()
        raise
    return state


def _register(model: DistributedDataParallel, state: DdpExchange) -> None:
    try:
        # DDP looks at a named function's annotations, which are strings in this module.
        model.register_comm_hook(state, lambda state, bucket: state.send(bucket))
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        msg = f"DDP takes no further hook: {reason}; register geartrain's alone"
        raise ConfigError(msg) from error


@dataclass(slots=True)
class _Sent:
    """A bucket under way, and DDP's future of it."""

    buffer: torch.Tensor
    future: Future[torch.Tensor]
    nominal: float = 1.0
    total: torch.Tensor | None = None
    """Weights only: what was divided by, and what should have been."""
    pending: Pending | None = None
    _is_complete: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def correct(self) -> None:
        """Divide by the true total; once it has come, which it does before the bucket."""
        total = self.nominal if self.total is None else float(self.total)
        if total not in (0.0, self.nominal):
            self.buffer.mul_(self.nominal / total)

    def complete(self) -> None:
        """Let DDP go on; from whichever thread comes first."""
        with self._lock:
            if self._is_complete:
                return
            self._is_complete = True
        self.future.set_result(self.buffer)


class DdpExchange:
    """The exchange of a DDP model's gradients; made by ``ddp_hook``.

    Args:
        model: The DDP model.
        exchange: Among its ranks.
        device: Where its gradients are.
        choices: How they are exchanged.
        weight: See ``ddp_hook``.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        exchange: ProcessExchange,
        device: torch.device,
        choices: ExchangeChoices,
        weight: WeightFunction | float | None,
    ) -> None:
        self._exchange = exchange
        self._device = device
        self._group = model.process_group
        self._num_ranks = exchange.rendezvous.world_size
        self._is_lossy = choices.compression is not None
        self._weights = None if weight is None else SampleWeights(weight, device)
        self._collective: ScheduledCollective | None = None
        if self._num_ranks > 1 and not uses_vendor_library(exchange.network):
            self._collective = exchange.open()
        self._sent: list[_Sent] = []
        self._error: Exception | None = None
        self._layouts: dict[int, tuple[int, ...]] = {}
        self._gradient_bytes = sum(
            p.numel() * p.element_size() for p in model.parameters() if p.requires_grad
        )
        self._begun = model.register_forward_pre_hook(self._begin, with_kwargs=True)

    @property
    def collective(self) -> ScheduledCollective | None:
        """Carries the exchanges out; None for one rank, or where NCCL does it all."""
        return self._collective

    def set_weight(self, num_samples: float) -> None:
        """Say how many samples the next forward passes of this rank have.

        Args:
            num_samples: 0 leaves this rank's gradients out, whatever they hold.

        Raises:
            ConfigError: If ``ddp_hook`` was not told that ranks have weights.
        """
        if self._weights is None:
            msg = (
                "set_weight() needs weights on all ranks; register the hook with "
                "ddp_hook(model, weight=1)"
            )
            raise ConfigError(msg)
        self._weights.of_forward = checked_weight(num_samples)

    def bucket_cap_mb(self, backward_s: float) -> float:
        """What ``DistributedDataParallel(bucket_cap_mb=...)`` should be on these links.

        Args:
            backward_s: Duration of a backward pass.

        Returns:
            MiB; the same on all ranks if ``backward_s`` is.
        """
        collective = self._collective
        if collective is None:
            return 25.0  # torch's own choice
        size = choose_bucket_bytes(backward_s, collective.predict_s, self._gradient_bytes)
        return size / _MIB

    def end_step(self, *, applied: bool, scale_factor: float = 1.0) -> None:
        """Say what became of a step, where a loss scaler may skip it or change its scale.

        Needed with ``compression`` and a ``GradScaler`` only::

            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            factor = scaler.get_scale() / before
            exchange.end_step(applied=factor >= 1, scale_factor=factor)

        Args:
            applied: False if the step was skipped: what codes owed before it is owed
                again.
            scale_factor: What the loss scale was multiplied by.
        """
        opened = self._exchange.hub.opened(self._collective)
        for feedback in opened.feedback if opened is not None else ():
            feedback.end_step(applied=applied)
            if scale_factor != 1.0:
                feedback.scale_(scale_factor)

    def close(self) -> None:
        """End the exchange on this rank; the model can't be trained on afterwards."""
        self._begun.remove()
        self._exchange.close()

    # -- called by DDP ------------------------------------------------------------------

    def send(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Queue a bucket; never blocks (but for the first step's weights)."""
        if not self._sent:
            # Runs at the end of backward, before DDP takes the results: an exception that
            # a hook's future holds would reach the user as a RuntimeError.
            self._at_end(self._wait)
        sent = _Sent(bucket.buffer(), self._new_future())
        self._sent.append(sent)
        try:
            self._start(sent, bucket)
        except (CommunicationError, ConfigError) as error:
            self._error = self._error or error
            sent.complete()
        return sent.future

    def _begin(
        self,
        model: torch.nn.Module,
        args: tuple[Any, ...],  # Any: the model's own arguments
        kwargs: dict[str, Any],
    ) -> None:
        syncs = bool(getattr(model, "require_backward_grad_sync", True))
        if not torch.is_grad_enabled() or not syncs:
            return
        self._sent = []  # of a backward that ended in an error
        if self._weights is not None:
            self._weights.begin(args, kwargs, self._start_total)

    def _start(self, sent: _Sent, bucket: GradBucket) -> None:
        self._check(sent.buffer)
        part = 1.0 / self._num_ranks
        if self._weights is not None:
            part = self._weights.part()
            sent.nominal, sent.total = self._weights.nominal or 1.0, self._weights.total
        collective = self._collective
        if collective is not None:
            pending = collective.all_reduce(sent.buffer, part, key=self._key(bucket))
            sent.pending = pending
            pending.when_done(lambda error: self._done(sent, error))
            return
        apply_weight_(sent.buffer, part)
        if self._num_ranks == 1:
            self._done(sent, None)
            return
        sent.pending = work = self._library_sum(sent.buffer)
        # Runs with the library's stream as the current one, once the sum is queued there.
        work.get_future().then(lambda _: self._done(sent, None))

    def _start_total(self, total: torch.Tensor) -> Pending:
        if self._collective is not None:
            return self._collective.all_reduce(total)
        if self._num_ranks == 1:
            return NothingPending()
        return self._library_sum(total)

    def _library_sum(self, tensor: torch.Tensor) -> Work:
        work: Work = dist.all_reduce(tensor, group=self._group, async_op=True)
        return work

    def _done(self, sent: _Sent, error: CommunicationError | None) -> None:
        """A bucket came; called by a thread of the exchange, which must not raise."""
        try:
            if error is None:
                sent.correct()
        except Exception as failure:  # noqa: BLE001 - raised at the end of backward
            self._error = self._error or failure
        finally:
            sent.complete()

    def _wait(self) -> None:
        """See that all has come, with deadlines, and say so if it has not."""
        sent, self._sent = self._sent, []
        try:
            for one in sent:
                if one.pending is not None:
                    one.pending.wait()
            if self._weights is not None and self._error is None:
                self._weights.end()
        except (RuntimeError, CommunicationError, ConfigError) as error:
            self._error = self._error or error
        finally:
            for one in sent:
                if self._error is not None:
                    one.complete()
        if self._error is not None:
            # After DDP has ended its step, so that it can make another one.
            self._at_end(self._raise)

    def _raise(self) -> None:
        error, self._error = self._error, None
        if isinstance(error, ConfigError):
            raise error
        msg = f"{error}. Backward's gradients are no sums: drop them (zero_grad)"
        raise CommunicationError(msg) from error

    # -- inside -------------------------------------------------------------------------

    def _check(self, buffer: torch.Tensor) -> None:
        if self._exchange.is_closed:
            msg = "the exchange of this DDP model was closed; wrap the model anew"
            raise CommunicationError(msg)
        if buffer.layout != torch.strided:
            msg = (
                f"a gradient is {buffer.layout}, expected a dense one; make its module "
                "with sparse=False"
            )
            raise ConfigError(msg)

    def _key(self, bucket: GradBucket) -> str | None:
        """Names a bucket for what codes lose of it.

        DDP cuts buckets anew after its first step. A bucket travels exactly until it has
        come a second time with the same gradients.
        """
        if not self._is_lossy:
            return None
        index, sizes = bucket.index(), tuple(p.numel() for p in bucket.parameters())
        is_known = self._layouts.get(index) == sizes
        self._layouts[index] = sizes
        code = zlib.crc32(",".join(map(str, sizes)).encode())
        return f"bucket{index}/{code:08x}" if is_known else None

    def _new_future(self) -> Future[torch.Tensor]:
        if self._device.type == "cpu":
            return Future()
        return Future(devices=[self._device])

    def _at_end(self, callback: Callable[[], None]) -> None:
        """Call back at the end of the backward pass that is under way."""
        engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 - no public way
        engine.queue_callback(callback)
