"""What the benchmark's processes are told and what they tell. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

ADAM_BYTES = 12
"""Of a parameter: the weight and two moments, float32 each."""
LOG_MEMBERS = 4
"""Who share a log: each writes down a quarter of every reduced gradient."""
SAVED_BY, LOADED_BY = 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOrder:
    """How large a state, how often, and where; for ``stall`` and ``reshard``."""

    folder: str
    result: str
    """Where the answer goes: JSON."""
    dim: int
    """Of four square layers with a bias: a state of 48 times dim * (dim + 1) bytes."""
    num_rounds: int
    budget_s: float
    """``stall`` begins no further round after so long: other programs make steps slow."""
    steps_per_block: int
    batch_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StallRound:
    """One round: everything in turn. Seconds."""

    dcp_save_s: float
    copy_stall_s: float
    """Of a copy that training waits for."""
    shadow_stall_s: float
    """Of one in the shadow of the next step's forward and backward."""
    plain_steps_s: tuple[float, ...]
    shadow_steps_s: tuple[float, ...]
    """The first of them begins after a commit, with the copy."""
    send_s: float
    """Of the copy, to a peer on the same machine."""
    agents_processor_s: float
    """Of both agents: checksums, sending, receiving."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StallFound:
    """What copying into memory costs the trainer."""

    state_bytes: int
    rounds: tuple[StallRound, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardOrder:
    """One member's part of saving with two and loading with three."""

    state: StateOrder
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardFound:
    """Seconds of the slowest member, a pair a round."""

    state_bytes: int
    dcp_save_s: float
    save_s: float
    dcp_load_s: tuple[float, ...]
    load_s: tuple[float, ...]
    is_equal: bool
    """All bits, of both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOrder:
    """How long to train before gradients are logged."""

    result: str
    num_steps: int
    num_logged: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeLog:
    """Bytes of a logged step, as fractions of an Adam state: the mean over the steps."""

    all_fraction: float
    """Of all members together."""
    member_fraction: float
    """Of the member that logs most."""
    entropy_fraction: float
    """What a perfect code of single values would take: no coding reaches less that does
    not know how they depend on each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFound:
    """What the gradient log takes."""

    num_parameters: int
    float32: ExchangeLog
    int8: ExchangeLog
    is_exact: bool
    """Whether every logged step gave back the bits that were applied."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipOrder:
    """How many bytes to flip."""

    folder: str
    result: str
    seed: int
    every: int
    """One byte of so many; 1 flips every one."""
    num_in_large: int
    large_bytes: int
    num_dcp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipCount:
    """Flips of single bytes, one after the other."""

    num_flips: int
    num_found: int
    num_wrong: int
    """After which a load gave other bits than were saved, without a word."""
    unfound: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FlipsFound:
    """Which flips were found where."""

    store: FlipCount
    """Every byte of every file of a small store."""
    large: FlipCount
    """Some bytes of a large one."""
    memory: FlipCount
    """Every byte of a snapshot in an agent's memory."""
    log: FlipCount
    """Every byte of a logged step in an agent's memory."""
    dcp: FlipCount
    """Some bytes of what ``torch.distributed.checkpoint`` wrote."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KillOrder:
    """Some of the trials."""

    folder: str
    result: str
    num_trials: int
    """Saves that are killed."""
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillsFound:
    """Saves that were killed, and a few that ended before their kill came."""

    num_trials: int
    num_killed: int
    num_before: int
    """After which the version before loads."""
    num_new: int
    """After which the new one does: it had been published."""
    failures: tuple[str, ...]
