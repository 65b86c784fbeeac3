"""Runs a training script with a witness beside it.

``geartrain run ... witnessed_script.py FOLDER MAX_STEPS SCRIPT [ARGUMENTS]``; with 0 for
MAX_STEPS the script ends by itself.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from geartrain.bench.chaos.witness import EnoughSteps, Witness
from geartrain.bench.chaos.witness_hooks import watched

_NUM_OWN = 3


def main() -> None:
    """Run the script as if it had been started itself."""
    folder, max_steps, script = sys.argv[1 : 1 + _NUM_OWN]
    sys.argv = [script, *sys.argv[1 + _NUM_OWN :]]
    sys.path[0] = str(Path(script).resolve().parent)  # as python SCRIPT has it
    witness = Witness(Path(folder), int(max_steps) or None)
    try:
        with watched(witness):
            runpy.run_path(script, run_name="__main__")
    except EnoughSteps:
        return


if __name__ == "__main__":
    main()
