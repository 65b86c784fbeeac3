"""What a launcher tells a worker: one JSON file a rank. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from geartrain.errors import ConfigError
from geartrain.parallel.save_spec import PeerMemorySpec, ResumeSpec, SaveSpec

WORKER_SPEC_VARIABLE = "GEARTRAIN_WORKER_SPEC"
"""Environment variable with the path of the worker's spec file."""

STOP_SIGNAL_NAME = "SIGUSR1"
"""Sent to every worker to ask for a stop at the next step boundary."""

STOPPED_EXIT_CODE = 75
"""Exit status of a worker that saved its state and stopped when asked to."""

LEFT_EXIT_CODE = 76
"""Exit status of a worker that left in order, while the others go on."""


OnLoss = Literal["finish", "shrink", "stop", "continue"]
"""finish: make the interrupted step with the same global batch. shrink: make it without the
samples of whoever was lost. stop: end. continue: as finish, which it was called before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSpec:
    """How a worker reaches the run's coordinator; see ``elastic.process``."""

    address_file: str
    """Where the coordinator says where it listens; it may come back elsewhere."""
    run_id: str
    token_file: str | None = None
    """Mode 0600; None on loopback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """One worker's place in the run."""

    rank: int
    world_size: int
    fleet_path: str
    """A ``Fleet`` document; rank i works its device i."""
    run_dir: str
    store_host: str = "127.0.0.1"
    store_port: int = 0
    """Port of the rendezvous store, served by the launcher's own process."""
    interface: str | None = None
    """The network card to use; None: the launcher doesn't say."""
    address: str | None = None
    """This worker's address on that card."""
    mode: Literal["train", "plan"] = "train"
    """plan: measure and plan, write ``plan.json`` and ``model.json``, and end."""
    plan_path: str | None = None
    """A pinned plan: it is carried out as it stands and never corrected."""
    deterministic: bool = False
    timeout_s: float = 300.0
    """Deadline of every wait for peers outside a step."""
    replan_threshold: float = 0.15
    """Change of a device's rate that triggers a re-plan."""
    tail_fraction: float = 0.0
    """Part of the global batch left to whoever is free at the end of a step."""
    on_loss: OnLoss = "stop"
    """What those that are left do where another worker was lost."""
    min_devices: int = 1
    """With fewer left the run ends."""
    saves: SaveSpec | None = None
    """What is saved while the training goes on; None: nothing."""
    resume: ResumeSpec | None = None
    """Where it goes on from; None: it begins."""
    memory: PeerMemorySpec | None = None
    """The agent that keeps states in its node's memory; None: there is none."""
    coordinator: CoordinatorSpec | None = None
    """Who decides on membership and commits; None: the ranks among themselves."""
    incarnation: str = ""
    """``RANK.N``: the Nth process of this rank in this run, from 0; unique in the run."""
    joins: bool = False
    """The run is under way: take the state from a member, and enter at a step boundary."""
    torch_threads: int | None = 1
    """Intra-op threads; None keeps torch's default."""
    schema_version: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            msg = f"rank={self.rank} must lie in 0..{self.world_size - 1}"
            raise ConfigError(msg)
        if not self.incarnation:
            object.__setattr__(self, "incarnation", f"{self.rank}.0")


@dataclass(frozen=True, slots=True, kw_only=True)
class GoingOn:
    """Says, in the run directory, that a lost worker does not end the run by now.

    Before ``setup()`` is done, and after the session was closed, it does.
    """

    FILE_NAME: ClassVar[str] = "survivors.json"

    schema_version: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLoss:
    """A worker that the others go on without, by who leads them."""

    rank: int
    device_id: str
    at_s: float
    step: int
    reason: str
    incarnation: str = ""
    is_failure: bool = True
    """False for who left in order."""
    schema_version: int = 1

    @staticmethod
    def file_name(incarnation: str) -> str:
        """Its name in the run directory: ``lost-RANK.N.json``."""
        return f"lost-{incarnation}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailure:
    """How a worker's script failed, in ``failure-RANK.json`` of the run directory."""

    rank: int
    device_id: str
    at_s: float
    error: str
    """``Type: message``."""
    traceback: str
    secondary: bool
    """True where it only lost its peers: another rank's failure is the cause."""
    out_of_memory: bool = False
    schema_version: int = 1
