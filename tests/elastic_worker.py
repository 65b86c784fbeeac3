"""A worker without torch: takes up epochs, votes, commits, and writes down each step.

``python elastic_worker.py NAME PLACE ADDRESS_FILE STEP_S``; each committed step is a line
``STEP LINEAGE EPOCH`` on stdout. It ends at the end of stdin.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

from geartrain.elastic.address_file import read_address
from geartrain.elastic.client import Client
from geartrain.elastic.control import ControlSettings
from geartrain.elastic.greeting import Credentials
from geartrain.elastic.link import Callbacks, Identity
from geartrain.elastic.messages import Heal, NewEpoch
from geartrain.elastic.outcome import Interrupted
from geartrain.elastic.view import HeldState
from running_coordinator import START, next_lineage

LIMIT_S = 60.0


def main() -> None:
    name, place, address_file, step_s = sys.argv[1:]

    def find_address() -> tuple[str, int]:
        found = read_address(Path(address_file))
        return found.host, found.port

    def on_heal(heal: Heal) -> None:
        if any(t.receiver == name for t in heal.transfers):
            client.healed(heal.step, heal.lineage)  # the lineage is all of the state

    client = Client(
        Identity(
            member_id=name,
            incarnation=f"{name}-{os.getpid()}",
            host_id="h",
            place=int(place),
        ),
        ControlSettings(credentials=Credentials(run_id="test"), find_address=find_address),
        Callbacks(on_interruption=lambda _: None, on_heal=on_heal),
    )
    client.start(HeldState(step=0, lineage=START))
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    epoch = 0
    while True:
        found = client.next_epoch(epoch, LIMIT_S)
        epoch = found.epoch
        _train(client, found, float(step_s))


def _train(client: Client, epoch: NewEpoch, step_s: float) -> None:
    if (client.held.step, client.held.lineage) != (epoch.step, epoch.lineage):
        client.healed(epoch.step, epoch.lineage)
    client.ready(epoch.epoch)
    while client.interruption(epoch.epoch) is None:
        started_at_s = time.monotonic()
        threading.Event().wait(step_s)
        held = client.held
        client.vote(epoch.epoch, held.step + 1, next_lineage(held.lineage, held.step + 1))
        outcome = client.wait_commit(epoch.epoch, held.step + 1, LIMIT_S)
        if isinstance(outcome, Interrupted):
            return
        sys.stdout.write(f"{outcome.step} {outcome.lineage} {epoch.epoch}\n")
        sys.stdout.flush()
        client.note_step(time.monotonic() - started_at_s)


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
