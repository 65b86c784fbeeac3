"""Follows what the members of a run write down about themselves, while they run.

The reader of ``bench.chaos`` keeps whole statements for its checks; this one reads many
times a second beside the run that it measures, and keeps only when, who and which step.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from geartrain.bench.chaos.witness_log import SUFFIX, Commit, Hello, Record, Work
from geartrain.errors import ConfigError

_TICKS_PER_S = 100
"""USER_HZ, which every Linux has; a start is known to 10 ms."""
_START_FIELD = 19
"""Of /proc/PID/stat, counted from behind the name."""

_decoder = msgspec.json.Decoder(Record)


@dataclass(frozen=True, slots=True)
class Mark:
    """A step, and when a member began or had it (Unix time)."""

    step: int
    """Optimizer steps applied once it is made."""
    at_s: float


@dataclass(slots=True, kw_only=True)
class Member:
    """One process of the run."""

    name: str
    device_id: str
    process_id: int
    hello_at_s: float
    born_at_s: float
    """When its process was started; of the hello where that is not known any more."""
    begun: list[Mark] = field(default_factory=list)
    """Each beginning of a step; one that is made again is begun again."""
    commits: list[Mark] = field(default_factory=list)
    has_ended: bool = False
    """In order: it wrote a goodbye."""


class History:
    """All members that a run has had.

    Args:
        folder: Where they write.

    Attributes:
        members: In the order in which they were found.
        digests: Codes of the state after each step, with who has it.
    """

    def __init__(self, folder: Path) -> None:
        self.members: list[Member] = []
        self.digests: dict[int, dict[str, list[str]]] = {}
        self.first_at_s: dict[int, float] = {}
        """When each step was committed first, anywhere."""
        self._folder = folder
        self._offsets: dict[str, int] = {}
        self._by_name: dict[str, Member] = {}

    def poll(self) -> None:
        """Read what is new."""
        for path in sorted(self._folder.glob(f"*{SUFFIX}")):
            self._read(path)

    @property
    def last_step(self) -> int:
        """The furthest step that anybody has."""
        return max(self.first_at_s, default=0)

    def newest(self) -> dict[str, Member]:
        """Of each device the process that came last."""
        found: dict[str, Member] = {}
        for member in sorted(self.members, key=lambda m: m.hello_at_s):
            found[member.device_id] = member
        return found

    def step_times(self) -> list[Mark]:
        """All steps, with when each was committed first."""
        return [Mark(step, self.first_at_s[step]) for step in sorted(self.first_at_s)]

    def num_diverged(self) -> int:
        """Steps after which members held different states."""
        return sum(len(by_digest) > 1 for by_digest in self.digests.values())

    def _read(self, path: Path) -> None:
        with path.open("rb") as stream:
            stream.seek(self._offsets.get(path.name, 0))
            data = stream.read()
        *lines, torn = data.split(b"\n")
        self._offsets[path.name] = self._offsets.get(path.name, 0) + len(data) - len(torn)
        for line in lines:
            self._take(path, line)

    def _take(self, path: Path, line: bytes) -> None:
        try:
            record: Record = _decoder.decode(line)
        except msgspec.MsgspecError as error:
            shown = line[:80].decode(errors="replace")
            msg = f"{path} holds {shown!r}, which no witness writes: {error}"
            raise ConfigError(msg) from error
        if isinstance(record, Hello):
            self._greet(path.name, record)
            return
        member = self._by_name[path.name]
        if isinstance(record, Work):
            member.begun.append(Mark(record.step + 1, record.at_s))
        elif isinstance(record, Commit):
            self._commit(member, record)
        else:
            member.has_ended = True

    def _greet(self, name: str, hello: Hello) -> None:
        born_at_s = started_at_s(hello.pid)
        member = Member(
            name=name,
            device_id=hello.device_id,
            process_id=hello.pid,
            hello_at_s=hello.at_s,
            born_at_s=hello.at_s if born_at_s is None else min(born_at_s, hello.at_s),
        )
        self._by_name[name] = member
        self.members.append(member)

    def _commit(self, member: Member, record: Commit) -> None:
        member.commits.append(Mark(record.step, record.at_s))
        known_s = self.first_at_s.get(record.step, record.at_s)
        self.first_at_s[record.step] = min(known_s, record.at_s)
        if record.digest is not None:
            who = self.digests.setdefault(record.step, {}).setdefault(record.digest, [])
            who.append(member.name)


def started_at_s(process_id: int) -> float | None:
    """Unix time at which a process was started, to 10 ms; None where it has gone."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return None
    ticks = int(stat.rpartition(")")[2].split()[_START_FIELD])
    age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / _TICKS_PER_S
    return time.time() - age_s
