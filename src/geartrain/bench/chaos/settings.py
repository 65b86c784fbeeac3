"""What is asked of a chaos run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from geartrain.errors import ConfigError

DEFAULT_DEVICES = "emulated:0.25,0.25,0.2,0.2,0.15,0.15"
BUILT_IN_SCRIPT = Path(__file__).with_name("exact_training.py")
BUILT_IN_SAVED = "saved"
"""Where the built-in script saves, below the run directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """One run of ``geartrain chaos``."""

    script: Path | None = None
    """None: the built-in training, whose weights are compared bit for bit."""
    arguments: tuple[str, ...] = ()
    devices: str = DEFAULT_DEVICES
    seed: int = 0
    duration_s: float = 60.0
    faults_per_s: float = 0.5
    kinds: tuple[str, ...] = ()
    """Empty: all that are possible."""
    links: str | None = None
    trace: Path | None = None
    """Faults from a file instead of the seed."""
    speed: float = 1.0
    """How many seconds of the trace pass in one."""
    min_left: int = 2
    """Devices that are never taken away."""
    saved: str | None = None
    """Where the script saves its state, below the run directory."""
    max_pause_s: float | None = None
    """Instead of every kind's own limit."""
    tolerance: float = 1e-3
    """Of the weights, where bits may differ."""
    deterministic: bool = False
    oversubscribe: bool = False
    with_reference: bool = True
    disk_bytes: int = 64 * 2**20
    """Size of the disk that is filled by ``disk_full``."""
    output: Path | None = None
    """Folder for all that is written; None: a new one below ``runs``."""

    def __post_init__(self) -> None:
        if self.script is not None and not self.script.is_file():
            msg = f"no script at {self.script}; name a Python file that exists"
            raise ConfigError(msg)
        if self.max_pause_s is not None and not self.max_pause_s > 0:
            msg = f"max_pause_s={self.max_pause_s} must be > 0"
            raise ConfigError(msg)
        if not (self.tolerance > 0 and math.isfinite(self.tolerance)):
            msg = f"tolerance={self.tolerance} must be > 0 and finite; 1e-3 is usual"
            raise ConfigError(msg)
        if self.trace is None and self.speed != 1.0:
            msg = f"speed={self.speed:g} compresses a trace; name one with --trace"
            raise ConfigError(msg)
        if self.output is not None and self.output.exists() and any(self.output.iterdir()):
            msg = f"{self.output} is not empty; choose another --output or remove it"
            raise ConfigError(msg)

    @property
    def is_built_in(self) -> bool:
        """Whether the built-in training is run."""
        return self.script is None

    @property
    def script_path(self) -> Path:
        """The script that is run."""
        return BUILT_IN_SCRIPT if self.script is None else self.script

    @property
    def saved_place(self) -> str | None:
        """Where the script saves, if that is known."""
        return BUILT_IN_SAVED if self.is_built_in else self.saved

    def arguments_for(self, run_dir: Path) -> tuple[str, ...]:
        """What the script is given."""
        if not self.is_built_in:
            return self.arguments
        where = ("--save-every", "20", "--save-to", str(run_dir / BUILT_IN_SAVED))
        return ("--seed", str(self.seed), *where, *self.arguments)

    @property
    def reference_arguments(self) -> tuple[str, ...]:
        """What the script is given where it trains undisturbed, on one device."""
        if not self.is_built_in:
            return self.arguments
        # Sleeping changes nothing; nor does saving, which needs a place.
        return ("--seed", str(self.seed), *self.arguments, "--sample-s", "0")
