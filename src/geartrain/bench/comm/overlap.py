"""How much of the exchange hides behind backward, in plain DDP with geartrain's hook."""

from __future__ import annotations

from geartrain.bench.comm.crew import Crew
from geartrain.bench.comm.judge import wrong_results
from geartrain.bench.comm.labs import Say, gather_round
from geartrain.bench.comm.messages import OURS, Order
from geartrain.bench.comm.result import CaseResult
from geartrain.bench.comm.targets import TARGETS
from geartrain.devices.emulation.network import NetworkLab, parse_links
from geartrain.units import format_seconds

RATE = "100Mbit"
_NUM_HOSTS = 2
_ROUNDS = 5
_TIMEOUT_S = 300.0


def overlap_fraction(
    compute_s: float, backward_s: float, exchange_s: float, step_s: float
) -> float:
    """The part of what could be hidden that is hidden.

    Args:
        compute_s: Forward and backward, without any exchange.
        backward_s: Of it, what an exchange can run beside.
        exchange_s: Of all gradients, with nothing beside it.
        step_s: Of a whole step.

    >>> overlap_fraction(1.0, 0.6, 0.5, 1.1)
    0.8
    """
    return round((compute_s + exchange_s - step_s) / min(backward_s, exchange_s), 9)


def measure_overlap(say: Say) -> CaseResult:
    """Train over a link, all parts of a step in turn.

    Raises:
        DeviceError: If the lab can't be made or a worker fails.
    """
    spec = parse_links(RATE, _NUM_HOSTS)
    say(f"overlap: {_NUM_HOSTS} hosts at {RATE}, plain DDP and ddp_hook(model)")
    with NetworkLab(spec) as lab, Crew(range(_NUM_HOSTS), lab) as crew:
        reports = crew.ask(Order(verb="overlap", repeats=_ROUNDS), _TIMEOUT_S)
    names = list(reports[0].figures)
    slowest = {name: max(r.figures[name] for r in reports) for name in names}
    compute_s, exchange_s = slowest["compute_s"], slowest["exchange_s"]
    backward_s = compute_s - slowest["forward_s"]
    say(
        f"overlap: compute {format_seconds(compute_s)}, exchange "
        f"{format_seconds(exchange_s)}, step {format_seconds(slowest['step_s'])}"
    )
    return CaseResult(
        case="overlap",
        seconds=slowest["step_s"],
        figures={
            "links": RATE,
            "num_repeats": _ROUNDS,
            "overlap_fraction": overlap_fraction(
                compute_s, backward_s, exchange_s, slowest["step_s"]
            ),
            "default_cap_overlap_fraction": overlap_fraction(
                compute_s, backward_s, exchange_s, slowest["default_cap_step_s"]
            ),
            "ddp_overlap_fraction": overlap_fraction(
                compute_s, backward_s, exchange_s, slowest["ddp_step_s"]
            ),
            **slowest,
        },
        failures=tuple(wrong_results(gather_round(OURS, reports))),
        targets=TARGETS["overlap"],
    )
