"""``geartrain run`` for this benchmark: devices come back after a fixed, short wait.

``python -m geartrain.bench.elastic.launched FLEET RUN_DIR SCRIPT [ARGUMENTS]``. What a
user's run does about a device that fails again and again, waiting twice as long each time
and leaving it out in the end, would only keep the benchmark waiting. All else is as by
default.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from geartrain.devices.probe import resolve_fleet
from geartrain.errors import GeartrainError
from geartrain.launch import LaunchSettings, create_run_directory, launch
from geartrain.launch.respawn import RespawnSettings
from geartrain.launch.settings import SilentObserver

PRELOAD = ("torch", "geartrain.session")
"""As ``geartrain run`` has it."""
_WAIT_S = 0.2
_NEVER = 1_000_000
_NUM_OWN = 3


class _Notices(SilentObserver):
    """Shows what the launcher has to say; the log of a run that went wrong tells why."""

    def on_notice(self, text: str) -> None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def main() -> None:
    """Run the script; the last line printed is JSON, as with ``--json``."""
    fleet_spec, run_dir, script = sys.argv[1 : 1 + _NUM_OWN]
    try:
        result = launch(
            LaunchSettings(
                fleet=resolve_fleet(fleet_spec, probe=False),
                run_dir=create_run_directory(Path(script), Path(run_dir)),
                script=Path(script),
                arguments=tuple(sys.argv[1 + _NUM_OWN :]),
                preload=PRELOAD,
                respawn=RespawnSettings(
                    first_wait_s=_WAIT_S, max_wait_s=_WAIT_S, max_device_failures=_NEVER
                ),
            ),
            _Notices(),
        )
    except GeartrainError as error:
        _print({"message": str(error)})
        sys.exit(1)
    _print({"outcome": result.outcome, "message": f"{result.message} {result.details}"})
    sys.exit(result.exit_code)


def _print(document: dict[str, str]) -> None:
    sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
