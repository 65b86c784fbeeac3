"""Whether every sample went into exactly one committed step of its epoch. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from geartrain.bench.chaos.evidence import Evidence
from geartrain.bench.chaos.witness_log import Commit, Statement, Work


@dataclass(slots=True, kw_only=True)
class SampleFindings:
    """What was found."""

    why_not: str = ""
    """Why nothing could be said; empty where it could."""
    faults: list[str] = field(default_factory=list)
    num_steps: int = 0
    num_samples: int = 0
    num_whole_epochs: int = 0
    num_with_lost_members: int = 0
    """Steps that hold work of a member that did not live to see them committed."""


def find_sample_faults(evidence: Evidence) -> SampleFindings:
    """Follow every committed step back to the shares that were worked on for it.

    A step may be begun several times, by other shares each time. Those that count are
    the shares of the plan under which it was committed, also of members that died between
    their part and the commit.
    """
    findings = SampleFindings()
    lives = evidence.lives()
    works = [_works_by_step(tuple(life.statements)) for life in lives]
    if not any(works):
        findings.why_not = "the script changes its batches, so that shares are not known"
        return findings
    counts: dict[int, Counter[int]] = {}
    batches: list[tuple[int, Work]] = []
    for step, commits in evidence.commits_by_step().items():
        life = max(n for n, life in enumerate(lives) if commits[0][0] in life.statements)
        shares = _shares_of(step, commits, works[life].get(step - 1, []), findings)
        if not shares:
            continue
        findings.num_steps += 1
        batches.append((step, shares[0]))
        for work in shares:
            counts.setdefault(work.epoch, Counter()).update(work.samples)
    findings.num_samples = sum(counter.total() for counter in counts.values())
    _check_order(batches, findings)
    _check_epochs(counts, batches, findings)
    return findings


def _works_by_step(statements: tuple[Statement, ...]) -> dict[int, list[tuple[str, Work]]]:
    """Who began which share of the step after so many: the last under each plan."""
    found: dict[int, dict[tuple[str, str], Work]] = {}
    for statement in statements:
        for work in statement.works:
            found.setdefault(work.step, {})[statement.name, work.plan] = work
    return {
        step: [(name, work) for (name, _), work in works.items()]
        for step, works in found.items()
    }


def _shares_of(
    step: int,
    commits: list[tuple[Statement, Commit]],
    works: list[tuple[str, Work]],
    findings: SampleFindings,
) -> list[Work]:
    plans = {commit.plan for _, commit in commits}
    if len(plans) > 1:
        findings.faults.append(
            f"step {step} was committed under {len(plans)} plans at once"
        )
        return []
    (plan,) = plans
    committers = {statement.name for statement, _ in commits}
    planned = [(name, work) for name, work in works if work.plan == plan]
    own = [work for name, work in planned if name in committers]
    rest = [work for name, work in planned if name not in committers and work.samples]
    shares = own
    if _tiling_fault(own) and rest:
        shares = [*own, *rest]
        findings.num_with_lost_members += 1
    fault = _tiling_fault(shares)
    if fault:
        findings.faults.append(f"step {step}: {fault}")
        return []
    return shares


def _tiling_fault(shares: list[Work]) -> str:
    """What is wrong with shares that should cover a global batch once; "" if nothing."""
    if not shares:
        return "nobody wrote down that it worked on it"
    batches = {(work.epoch, work.step_in_epoch, work.count) for work in shares}
    if len(batches) > 1:
        return f"members worked on different batches: {sorted(batches)}"
    position = 0
    for work in sorted(shares, key=lambda work: (work.start, work.stop)):
        if work.start == work.stop:
            continue
        if work.start < position:
            return f"positions {work.start}..{position} were computed twice"
        if work.start > position:
            return f"positions {position}..{work.start} were computed by nobody"
        position = work.stop
    end = shares[0].count - shares[0].num_tail
    return "" if position == end else f"positions {position}..{end} were computed by nobody"


def _check_order(batches: list[tuple[int, Work]], findings: SampleFindings) -> None:
    """Each batch follows the one before, in its epoch or as the first of the next one."""
    for (before, last), (step, work) in pairwise(batches):
        if step != before + 1:
            continue  # said already
        follows = (last.epoch, last.step_in_epoch + 1)
        if last.step_in_epoch + 1 == last.epoch_steps:
            follows = (last.epoch + 1, 0)
        if (work.epoch, work.step_in_epoch) != follows:
            findings.faults.append(
                f"step {step} took batch {work.step_in_epoch} of epoch {work.epoch}, "
                f"expected batch {follows[1]} of epoch {follows[0]}"
            )


def _check_epochs(
    counts: dict[int, Counter[int]],
    batches: list[tuple[int, Work]],
    findings: SampleFindings,
) -> None:
    for epoch, counter in sorted(counts.items()):
        twice = [sample for sample, number in counter.items() if number > 1]
        if twice:
            findings.faults.append(
                f"epoch {epoch}: {len(twice)} samples more than once, such as {twice[0]}"
            )
        taken = {work.step_in_epoch for _, work in batches if work.epoch == epoch}
        whole = next(w.epoch_steps for _, w in batches if w.epoch == epoch)
        findings.num_whole_epochs += len(taken) == whole
