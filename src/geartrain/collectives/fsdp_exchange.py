"""geartrain's exchange for users who keep FSDP2: shards inside a host, sums across hosts.

    mesh = init_device_mesh("cuda", (4, 8), mesh_dim_names=("hosts", "local"))
    fully_shard(model, mesh=mesh["local"])
    exchange = geartrain.collectives.fsdp_hooks(model)

Parameters are gathered inside the host only. Each rank's gradient shard is then summed
with the same shard of the other hosts, by geartrain's exchange, while backward goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from geartrain.collectives.process_exchange import (
    DEFAULT_TIMEOUT_S,
    ExchangeChoices,
    ProcessExchange,
    join_exchange,
)
from geartrain.collectives.torch_collective import apply_weight_
from geartrain.errors import CommunicationError, ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from geartrain.collectives.exchange.scheduled_collective import ScheduledCollective
    from geartrain.collectives.protocol import Pending
    from geartrain.topology.profile import Topology

logger = logging.getLogger(__name__)

_NEEDED = (
    "set_custom_reduce_scatter",
    "set_all_reduce_hook",
    "set_gradient_divide_factor",
    "set_force_sum_reduction_for_comms",
)


def fsdp_hooks(
    model: torch.nn.Module,
    *,
    compression: str | None = None,
    topology: Topology | str | Path | None = None,
    weighted: bool = False,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> FsdpExchange:
    """Sum the gradient shards of an FSDP2 model over hosts by geartrain; all ranks call it.

    Args:
        model: After ``fully_shard`` with a mesh of one dimension, that of one host's (or
            rack's) ranks. The other hosts have meshes of the same size.
        compression: None exchanges exactly; ``auto`` or a codec's name codes what passes
            slow links, never what is summed inside a mesh.
        topology: The links between hosts, or the path of a ``fleet.json`` with them, as
            rank 0 knows them; None measures them.
        weighted: Whether ``set_weight`` will say how many samples each rank has; else the
            plain mean over ranks is taken, as FSDP does.
        timeout_s: Outer limit of every wait for a peer.

    Raises:
        ConfigError: If this torch or this model can't have the hooks, or the meshes of
            the ranks don't fit each other.
        CommunicationError: If a rank does not come in time.
    """
    modules = _sharded_modules(model)
    parameter = next(p for p in model.parameters() if isinstance(p, DTensor))
    mesh = _mesh_ranks(parameter)
    exchange = join_exchange(
        parameter.to_local().device,
        ExchangeChoices(compression=compression, weighted=weighted),
        topology=topology,
        timeout_s=timeout_s,
    )
    try:
        meshes = exchange.rendezvous.gather("mesh", list(mesh), list[int])
        replicas = find_replicas(meshes, exchange.rendezvous.rank)
        state = FsdpExchange(exchange, parameter, replicas, weighted=weighted)
        for index, module in enumerate(modules):
            state.attach(module, index)
    except BaseException:
        exchange.close()
        raise
    return state


def find_replicas(meshes: Sequence[Sequence[int]], rank: int) -> tuple[int, ...]:
    """The ranks that hold the same shard as this one, itself included.

    Args:
        meshes: The ranks of each rank's mesh, in order; shape (world_size, mesh_size).
        rank: This one.

    Raises:
        ConfigError: If meshes differ in size, or overlap without being equal.

    >>> find_replicas([[0, 1], [0, 1], [2, 3], [2, 3]], 3)
    (1, 3)
    """
    distinct = sorted({tuple(mesh) for mesh in meshes})
    members = sorted(r for mesh in distinct for r in mesh)
    if members != list(range(len(meshes))) or len({len(m) for m in distinct}) > 1:
        msg = (
            f"the ranks' meshes are {distinct}; expected disjoint ones of equal size that "
            "hold all ranks, such as init_device_mesh(kind, (hosts, local))['local']"
        )
        raise ConfigError(msg)
    place = list(meshes[rank]).index(rank)
    return tuple(mesh[place] for mesh in distinct)


class FsdpExchange:
    """The exchange of an FSDP2 model's gradients; made by ``fsdp_hooks``.

    Args:
        exchange: Among all ranks.
        parameter: One of the model's.
        replicas: The ranks with the same shard.
        weighted: See ``fsdp_hooks``.
    """

    def __init__(
        self,
        exchange: ProcessExchange,
        parameter: DTensor,
        replicas: tuple[int, ...],
        *,
        weighted: bool,
    ) -> None:
        self._exchange = exchange
        self._device = parameter.to_local().device
        self._weighted = weighted
        self._part = 1.0 / exchange.rendezvous.world_size
        self._replicas = replicas
        self._slow: ScheduledCollective | None = None
        if len(replicas) > 1:
            self._slow = exchange.open(replicas, "shards")
        else:
            logger.warning(
                "the mesh holds all ranks, so nothing is left to sum outside it; shard "
                "inside a host to keep parameters off slow links"
            )
        self._world: ScheduledCollective | None = None
        if weighted and exchange.rendezvous.world_size > 1:
            self._world = exchange.open(purpose="weights")
        self._under_way: list[Pending] = []

    @property
    def collective(self) -> ScheduledCollective | None:
        """Sums this rank's shards over hosts; None where nobody else has them."""
        return self._slow

    def set_weight(self, num_samples: float) -> None:
        """Agree on the samples of the next backward passes; all ranks call it.

        Args:
            num_samples: Of this rank; 0 leaves its gradients out, whatever they hold.

        Raises:
            ConfigError: If ``fsdp_hooks`` was not told so, or the number is negative.
            CommunicationError: If a rank does not come in time.
        """
        if not self._weighted:
            msg = "set_weight() needs fsdp_hooks(model, weighted=True) on all ranks"
            raise ConfigError(msg)
        if not 0.0 <= num_samples < float("inf"):
            msg = f"num_samples={num_samples} must be >= 0"
            raise ConfigError(msg)
        total = torch.tensor([float(num_samples)], device=self._device)
        if self._world is not None:
            self._world.all_reduce(total).wait()
        self._part = float(num_samples) / (float(total) or 1.0)

    def close(self) -> None:
        """End the exchange on this rank; the model can't be trained on afterwards."""
        self._exchange.close()

    # -- called by FSDP -----------------------------------------------------------------

    def attach(
        self,
        module: Any,  # Any: torch's FSDPModule, of whichever version
        index: int,
    ) -> None:
        """Register the hooks of one sharded module.

        Raises:
            ConfigError: If it has several groups of parameters.
        """
        # Weights and means are the hooks' work: FSDP must only add.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(enable=True)
        own = tuple(p for p in _own_parameters(module) if p.requires_grad)
        try:
            module.set_custom_reduce_scatter(_WeightedReduceScatter(self))
            module.set_all_reduce_hook(_ShardSum(self, f"shard{index}", own))
        except ValueError as error:
            msg = f"FSDP takes no hook here: {error}; shard all its parameters on one mesh"
            raise ConfigError(msg) from error

    def weigh_(self, tensor: torch.Tensor) -> None:
        """Multiply this rank's gradients by its part of the mean."""
        apply_weight_(tensor, self._part)

    def sum_(self, shard: torch.Tensor, key: str, *, may_come_later: bool) -> None:
        """Add up a shard over hosts.

        Args:
            shard: Replaced by the sum.
            key: Names it across steps.
            may_come_later: Whether it is only looked at after backward.

        Raises:
            CommunicationError: If a peer was lost or late.
        """
        if self._exchange.is_closed:
            msg = "the exchange of this FSDP model was closed; build the model anew"
            raise CommunicationError(msg)
        if self._slow is None:
            return
        pending = self._slow.all_reduce(shard, key=key)
        if not may_come_later:
            pending.wait()
            return
        if not self._under_way:
            engine = torch.autograd.Variable._execution_engine  # noqa: SLF001 - no public way
            engine.queue_callback(self._wait)
        self._under_way.append(pending)

    def _wait(self) -> None:
        """At the end of backward: all shards must have come."""
        under_way, self._under_way = self._under_way, []
        for pending in under_way:
            pending.wait()


@dataclass(eq=False, slots=True)
class _WeightedReduceScatter:
    """FSDP's ``ReduceScatter``: this rank's weight first, then the library's own."""

    exchange: FsdpExchange

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for inputs and outputs."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,  # Any: torch's ReduceOp, a sum as asked for
        async_op: bool = False,
    ) -> Any:  # Any: torch's Work or None
        """Add up inside the mesh and keep the own shard."""
        self.exchange.weigh_(input_tensor)
        return dist.reduce_scatter_tensor(
            output_tensor, input_tensor, op=op, group=group, async_op=async_op
        )


@dataclass(eq=False, slots=True)
class _ShardSum:
    """FSDP's all-reduce hook of one module."""

    exchange: FsdpExchange
    key: str
    parameters: tuple[torch.nn.Parameter, ...]

    def __call__(self, shard: torch.Tensor) -> None:
        """Add up the shard over hosts, beside backward where nobody reads it before."""
        # A module whose unused parameters send nothing has another shard then.
        key = f"{self.key}/{shard.numel()}"
        self.exchange.sum_(shard, key, may_come_later=self._may_come_later(shard))

    def _may_come_later(self, shard: torch.Tensor) -> bool:
        """Whether FSDP only makes views of the shard, and copies nothing of it.

        It copies where gradients accumulate, change their dtype or are kept on the host.
        """
        return len(self.parameters) > 0 and all(
            p.grad is None
            and p.dtype == shard.dtype
            and p.device == shard.device
            and not getattr(p, "_post_accumulate_grad_hooks", None)
            for p in self.parameters
        )


def _sharded_modules(model: torch.nn.Module) -> list[Any]:  # Any: see attach
    try:
        from torch.distributed.fsdp import FSDPModule  # noqa: PLC0415 - may be absent
    except ImportError as error:
        msg = f"torch {torch.__version__} has no FSDP2; use a torch from 2.11 on"
        raise ConfigError(msg) from error
    missing = [name for name in _NEEDED if not hasattr(FSDPModule, name)]
    if missing:
        msg = (
            f"FSDP2 of torch {torch.__version__} lacks {', '.join(missing)}; use a torch "
            "from 2.11 on, or DistributedDataParallel with ddp_hook()"
        )
        raise ConfigError(msg)
    modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
    if not modules:
        msg = (
            f"fsdp_hooks() got a {type(model).__name__} without sharded modules; call "
            "fully_shard(model, mesh=...) first"
        )
        raise ConfigError(msg)
    return modules


def _own_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Those that this sharded module communicates: of it and its unsharded children."""
    own = list(module.parameters(recurse=False))
    for child in module.children():
        if not hasattr(child, _NEEDED[0]):
            own += _own_parameters(child)
    return own


def _mesh_ranks(parameter: DTensor) -> tuple[int, ...]:
    mesh = parameter.device_mesh
    if mesh.ndim != 1:
        msg = (
            f"the model is sharded on a mesh of {mesh.ndim} dimensions, so FSDP would sum "
            "over hosts itself; shard on the inner one only: fully_shard(model, "
            "mesh=mesh['local'])"
        )
        raise ConfigError(msg)
    return tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
