"""Trainings over racks that exist only on paper: all ranks are on loopback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import geartrain as gt
from geartrain.collectives import exchange_hub
from geartrain.collectives.codecs.error_feedback import state_pieces
from geartrain.collectives.job_network import JobNetwork, RankFacts
from geartrain.parallel import ranks
from geartrain.planner import Plan
from geartrain.planner.exchange.schedule import CodecProfile
from small_models import Samples, plan_of
from topologies import make_racks

BATCH = 24
NUM_SAMPLES = 10 * BATCH + 7
_INPUTS, _CLASSES, _HIDDEN = 32, 8, 384
NUM_PARAMETERS = _HIDDEN * (_INPUTS + 1) + _CLASSES * (_HIDDEN + 1)


class Classifier(nn.Module):
    """Large enough that its gradient is cut into two chunks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(_INPUTS, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, _CLASSES)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(x)
        return output


@dataclass(frozen=True, kw_only=True)
class Training:
    """What to train over which racks."""

    racks: tuple[int, ...] = (1, 1)
    """Ranks in each; every rank counts as a host."""
    compression: str | None = "int8"
    num_steps: int = 6
    plans: dict[int, Plan] = field(default_factory=dict)
    """From that many steps on; equal shares at first where none is given for step 0."""
    save_at: dict[int, Path] = field(default_factory=dict)
    load_from: Path | None = None
    options: dict[str, Any] = field(default_factory=dict)
    poisoned: tuple[int, int] | None = None
    """Step and rank whose inputs hold a NaN."""
    observe: Callable[[gt.Session], Any] | None = None
    """Called before each step."""
    timeout_s: float | None = None
    num_samples: int = NUM_SAMPLES

    def parts(self) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, Any]]:
        """Model, optimizer, and further arguments of setup."""
        torch.manual_seed(3)
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        return model, optimizer, {"loss_fn": cross_entropy, **self.options}


@dataclass(frozen=True, kw_only=True)
class Report:
    """How it went on one rank."""

    losses: list[float]
    parameters: torch.Tensor
    held_out_loss: float
    residuals: dict[str, torch.Tensor]
    """What this rank owed in the end."""
    seen: list[Any]


def set_up(
    rank: int, world_size: int, training: Training
) -> tuple[gt.Session, Any, nn.Module]:
    """A session, its loader, and its model."""
    del rank
    pretend(training.racks)
    if training.timeout_s is not None:
        gt.session._DEFAULT_TIMEOUT_S = training.timeout_s
    session = gt.Session(plan=training.plans.get(0) or equal_plan(world_size))
    return session, *set_up_on(session, training)


def set_up_on(session: gt.Session, training: Training) -> tuple[Any, nn.Module]:
    """The loader and the model of a session."""
    model, optimizer, options = training.parts()
    session.setup(model, optimizer, compression=training.compression, **options)
    data = samples(training.num_samples)
    loader = session.setup_dataloader(data, global_batch_size=BATCH)
    if training.load_from is not None:
        session.load(training.load_from)
    return loader, model


def train(rank: int, world_size: int, training: Training) -> Report:
    """For run_ranks."""
    pretend(training.racks)
    session = gt.Session(plan=training.plans.get(0) or equal_plan(world_size))
    return run_steps(session, training, rank)


def run_steps(session: gt.Session, training: Training, rank: int) -> Report:
    """Train on this rank."""
    loader, model = set_up_on(session, training)
    losses: list[float] = []
    seen: list[Any] = []
    while session.step_index < training.num_steps:
        for batch in loader:
            if training.observe is not None:
                seen.append(training.observe(session))
            if training.poisoned == (session.step_index, rank):
                batch[0][0, 0] = float("nan")
            losses.append(session.step(batch))
            if session.step_index in training.plans:
                session.apply_plan(training.plans[session.step_index])
            if session.step_index in training.save_at:
                session.save(training.save_at[session.step_index])
            if session.step_index == training.num_steps:
                break
    owed = held(session)
    session.close()
    return Report(
        losses=losses,
        parameters=torch.cat([p.detach().flatten() for p in model.parameters()]),
        held_out_loss=held_out_loss(model),
        residuals=owed,
        seen=seen,
    )


def held(session: gt.Session) -> dict[str, torch.Tensor]:
    """What this rank owes now."""
    assert session._trainer is not None
    return session._trainer.residuals._held()


def whole(states: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """All that is owed, by element of the flat gradient."""
    total = torch.zeros(NUM_PARAMETERS, dtype=torch.float64)
    for state in states:
        for piece in state_pieces(state):
            total[piece.start : piece.stop] += state[piece.name][0]
    return total


def equal_plan(world_size: int) -> Plan:
    share = BATCH // world_size
    return plan_of([share] * world_size, [share] * world_size)


def cross_entropy(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.cross_entropy(output, batch[1], reduction="none")


def samples(count: int = NUM_SAMPLES, seed: int = 1) -> Samples:
    """Clouds around one centre a class, which overlap."""
    centres = torch.randn(_CLASSES, _INPUTS, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, _CLASSES, (count,), generator=generator)
    noise = 2.5 * torch.randn(count, _INPUTS, generator=generator)
    return Samples(centres[targets] + noise, targets)


def held_out_loss(model: nn.Module) -> float:
    data = samples(2000, seed=2)
    with torch.no_grad():
        return float(F.cross_entropy(model(data.inputs), data.targets))


def pretend(racks: Sequence[int]) -> None:
    """Let sessions of this process take its ranks for hosts in racks."""
    topology = make_racks(racks)
    facts = tuple(
        RankFacts(
            host_id=host.tier_id,
            address="127.0.0.1",
            interface="lo",
            device_kind="cpu",
            collective_backends=("gloo",),
            core_fraction=None,
        )
        for host in topology.hosts
    )
    network = JobNetwork(topology=topology, ranks=facts)
    mock.patch.object(ranks, "find_network", return_value=network).start()
    # Measured speeds, and so the schedules made of them, differ from run to run.
    mock.patch.object(exchange_hub, "measure_codec", _nominal_codec).start()


def _nominal_codec(name: str) -> CodecProfile:
    return CodecProfile(
        name=name, bytes_fraction=0.25, encode_bytes_per_s=1e9, decode_bytes_per_s=1e9
    )
