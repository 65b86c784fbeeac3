"""Several processes of one host: shared memory against Gloo over loopback."""

from __future__ import annotations

import statistics

from geartrain.bench.comm.crew import Crew
from geartrain.bench.comm.judge import SchemeRound, wrong_results
from geartrain.bench.comm.labs import Say, describe_round, gather_round
from geartrain.bench.comm.messages import GIVEN_RING, OURS, Order
from geartrain.bench.comm.result import CaseResult
from geartrain.bench.comm.settings import FULL_BYTES, whole_values
from geartrain.bench.comm.targets import TARGETS

_NUM_PROCESSES = 4
_ROUNDS = 7
_TIMEOUT_S = 180.0


def measure_same_host(say: Say) -> CaseResult:
    """Measure on this host; needs no root.

    Raises:
        DeviceError: If a worker fails.
    """
    num_bytes = whole_values(FULL_BYTES, _NUM_PROCESSES)
    say(f"same_host: {_NUM_PROCESSES} processes, {num_bytes / 1e6:.1f} MB")
    rounds: list[SchemeRound] = []
    with Crew(range(_NUM_PROCESSES), None) as crew:
        found = crew.ask(Order(verb="join", schemes=(OURS,)), _TIMEOUT_S)[0]
        schemes = (GIVEN_RING, OURS)
        crew.ask(Order(verb="measure", schemes=schemes, num_bytes=num_bytes), _TIMEOUT_S)
        for index in range(_ROUNDS):
            for scheme in schemes if index % 2 == 0 else schemes[::-1]:
                order = Order(verb="measure", schemes=(scheme,), num_bytes=num_bytes)
                reports = crew.ask(order, _TIMEOUT_S)
                rounds.append(gather_round(scheme, reports))
                say(f"same_host, round {index + 1}: {describe_round(rounds[-1])}")
    ours = [r for r in rounds if r.scheme == OURS]
    gloo = [r for r in rounds if r.scheme == GIVEN_RING]
    seconds = statistics.median(r.seconds[0] for r in ours)
    gloo_s = statistics.median(r.seconds[0] for r in gloo)
    return CaseResult(
        case="same_host",
        seconds=seconds,
        ratio_to_best_ring=seconds / gloo_s,
        figures={
            "num_bytes": num_bytes,
            "num_repeats": _ROUNDS,
            "num_hosts": found.num_hosts,
            "gloo_s": gloo_s,
            "cpu_s": statistics.median(r.cpu_s for r in ours),
            "gloo_cpu_s": statistics.median(r.cpu_s for r in gloo),
        },
        failures=tuple(text for r in rounds for text in wrong_results(r)),
        targets=TARGETS["same_host"],
    )
