"""What the benchmark found, case by case. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from geartrain.bench.comm.targets import Target

Value = str | float | int | bool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseResult:
    """One case. None stands for what has no meaning in it, or was not measured."""

    case: str
    seconds: float | None = None
    """geartrain's, of the slowest rank; the median over the rounds."""
    ratio_to_best_ring: float | None = None
    ratio_to_given_ring: float | None = None
    bound_fraction: float | None = None
    """The least time that is physically possible / the measured one."""
    uplink_bytes: dict[str, int] | None = None
    """By the kernel's counters: of each rack's uplink, in the busier direction."""
    figures: dict[str, Value] = field(default_factory=dict)
    """What else this case has to say."""
    failures: tuple[str, ...] = ()
    """Wrong sums, bytes that were not sent: whatever makes the times worthless."""
    skipped: str = ""
    """Why it was not measured."""
    targets: tuple[Target, ...] = ()

    def value(self, figure: str) -> float | None:
        """A figure by its name."""
        known = {f.name for f in fields(self)}
        found = getattr(self, figure) if figure in known else self.figures.get(figure)
        return float(found) if isinstance(found, int | float) else None

    @property
    def is_met(self) -> bool | None:
        """Whether it keeps all its targets; None where it has none or was skipped."""
        if self.skipped or not (self.targets or self.failures):
            return None
        kept = all(target.is_met(self.value(target.figure)) for target in self.targets)
        return kept and not self.failures

    def as_json(self) -> dict[str, object]:
        """One flat object; figures follow those that every case has."""
        return {
            "case": self.case,
            "seconds": self.seconds,
            "ratio_to_best_ring": self.ratio_to_best_ring,
            "ratio_to_given_ring": self.ratio_to_given_ring,
            "bound_fraction": self.bound_fraction,
            "uplink_bytes": self.uplink_bytes,
            **self.figures,
            "targets": {
                str(target): target.is_met(self.value(target.figure))
                for target in self.targets
            },
            "is_met": self.is_met,
            "failures": list(self.failures),
            "skipped": self.skipped or None,
        }


TABLE_HEAD = (
    "case",
    "target",
    "seconds",
    "/ best ring",
    "/ given ring",
    "of bound",
    "uplink MB",
    "",
)
NUM_TEXT_COLUMNS = 2


def table_rows(results: tuple[CaseResult, ...]) -> list[tuple[str, ...]]:
    """A row a case, for people."""
    return [_row(result) for result in results]


def _row(result: CaseResult) -> tuple[str, ...]:
    if result.skipped:
        return (result.case, "skipped", *("",) * 5, result.skipped)
    met = {None: "-", True: "met", False: "MISSED"}[result.is_met]
    missed = [
        f"{target.figure} is {_number(result.value(target.figure))}, target {target}"
        for target in result.targets
        if not target.is_met(result.value(target.figure))
    ]
    busiest = max(result.uplink_bytes.values()) / 1e6 if result.uplink_bytes else None
    return (
        result.case,
        "FAILED" if result.failures else met,
        _number(result.seconds, 3),
        _number(result.ratio_to_best_ring, 3),
        _number(result.ratio_to_given_ring, 3),
        "-" if result.bound_fraction is None else f"{result.bound_fraction:.1%}",
        _number(busiest, 2),
        "; ".join((*result.failures[:1], *missed, *_shown(result))),
    )


def _shown(result: CaseResult) -> list[str]:
    """Figures that no column has."""
    names = (
        "ratio_to_own_exact",
        "ratio_to_stock_hierarchy",
        "overlap_fraction",
        "steps_to_new_optimum",
        "steps_back",
        "algorithm",
        "num_chunks",
    )
    missed = {t.figure for t in result.targets if not t.is_met(result.value(t.figure))}
    return [
        f"{name} {_text(result.figures[name])}"
        for name in names
        if result.figures.get(name) is not None and name not in missed
    ]


def _text(value: Value) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
