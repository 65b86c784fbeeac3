"""A plan: who computes what in a step."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgspec

from geartrain.errors import ConfigError
from geartrain.planner.exchange.schedule import ScheduleBook


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One device's copy of a stage and its part of every global batch."""

    device_id: str
    share: int
    """Samples of each global batch; 0 still takes part in the exchange."""
    micro_batch_size: int
    num_micro_batches: int
    """ceil(share / micro_batch_size); more for a plan with uniform micro-batches."""
    predicted_compute_s: float = 0.0
    predicted_memory_bytes: int = 0

    def __post_init__(self) -> None:
        if self.share < 0:
            msg = f"{self.device_id}: share={self.share} must be >= 0"
            raise ConfigError(msg)
        if self.share and (self.micro_batch_size < 1 or self.num_micro_batches < 1):
            msg = (
                f"{self.device_id}: share={self.share} needs micro_batch_size and "
                f"num_micro_batches >= 1, got {self.micro_batch_size} x "
                f"{self.num_micro_batches}"
            )
            raise ConfigError(msg)
        if self.micro_batch_size * self.num_micro_batches < self.share:
            msg = (
                f"{self.device_id}: {self.num_micro_batches} micro-batches of "
                f"{self.micro_batch_size} hold fewer samples than share={self.share}"
            )
            raise ConfigError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Consecutive layers and the replicas that compute them."""

    stage_index: int
    replicas: tuple[Replica, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Who computes what, and what that was predicted to take."""

    global_batch_size: int
    stages: tuple[Stage, ...]
    left_out: tuple[str, ...] = ()
    """Devices that compute nothing and are not part of the exchange."""
    tail_samples: int = 0
    uniform_micro_batches: bool = False
    predicted_step_s: float = 0.0
    predicted_exchange_s: float = 0.0
    """What of the exchange no backward pass hides."""
    predicted_whole_exchange_s: float = 0.0
    """The whole exchange, its hidden part included."""
    bound_step_s: float = 0.0
    """global_batch_size / sum of the devices' best samples per second."""
    imbalance_fraction: float = 0.0
    """Predicted (slowest - mean compute) / slowest compute."""
    exchange: ScheduleBook | None = None
    """How the replicas exchange gradients. Given with a pinned plan it is carried out as
    it stands, so that sums come out equal to the bit; None has it planned anew."""
    schema_version: int = 1

    def __post_init__(self) -> None:
        self._check_exchange()
        for stage in self.stages:
            total = sum(replica.share for replica in stage.replicas) + self.tail_samples
            if total != self.global_batch_size:
                msg = (
                    f"stage {stage.stage_index}: shares and tail add up to {total}, "
                    f"expected global_batch_size={self.global_batch_size}"
                )
                raise ConfigError(msg)
            ids = [replica.device_id for replica in stage.replicas]
            if len(set(ids)) != len(ids) or set(ids) & set(self.left_out):
                msg = f"stage {stage.stage_index}: a device is listed twice in {ids}"
                raise ConfigError(msg)
        if not self.stages or not self.stages[0].replicas:
            msg = "a plan needs a stage with at least one replica"
            raise ConfigError(msg)

    def _check_exchange(self) -> None:
        if self.exchange is None or not self.stages:
            return
        num_replicas = len(self.stages[0].replicas)
        for schedule in self.exchange.schedules:
            if schedule.num_members != num_replicas:
                msg = (
                    f"the plan's exchange is for {schedule.num_members} members but it "
                    f"has {num_replicas} replicas; take the exchange out of the plan to "
                    "have it planned anew"
                )
                raise ConfigError(msg)

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """Replicas of the first stage: the devices that take samples."""
        return self.stages[0].replicas

    @property
    def fingerprint(self) -> str:
        """Equal for plans that assign the same work, whatever was predicted."""
        work = [
            [
                (r.device_id, r.share, r.micro_batch_size, r.num_micro_batches)
                for r in s.replicas
            ]
            for s in self.stages
        ]
        key = (self.global_batch_size, work, self.tail_samples, self.uniform_micro_batches)
        return hashlib.sha256(msgspec.json.encode(key)).hexdigest()[:16]

    def replica_of(self, device_id: str) -> Replica | None:
        """This device's replica; None where it is left out."""
        for replica in self.replicas:
            if replica.device_id == device_id:
                return replica
        return None
