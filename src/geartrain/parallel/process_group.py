"""Join the other ranks: torch.distributed's groups, made and named in one place."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from geartrain.collectives.exchange.exit_guard import start_guarded
from geartrain.collectives.exchange.gloo_group import GlooGroup, build_group
from geartrain.collectives.exchange.polling_store import PollingStore
from geartrain.collectives.exchange.scheduled_collective import ScheduledCollective
from geartrain.collectives.lost_peers import lost_peers
from geartrain.collectives.rendezvous import Rendezvous
from geartrain.collectives.torch_collective import LocalCollective, TorchCollective
from geartrain.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    import torch
    from torch._C._distributed_c10d import Store

    from geartrain.collectives.exchange_hub import ExchangeHub
    from geartrain.collectives.job_network import JobNetwork
    from geartrain.collectives.protocol import Collective, Pending

INSIDE_MODEL = "batchnorm"
"""Purpose of a group that layers of the model use by torch.distributed's own calls."""
_LAST_WAIT_S = 2.0
_RELEASE_POLL_S = 0.1
_NOBODY = -1
_OWN_REFERENCES = 2
"""The variable, and the argument of the question."""


@dataclass(slots=True)
class RankGroups:
    """This rank among the others, and groups of some of them.

    Args:
        rank: This process.
        world_size: All processes.
        device_ids: The device of each rank.
        store: Shared key-value store; None for a single rank.
        timeout_s: Deadline of each wait.
    """

    rank: int
    world_size: int
    device_ids: tuple[str, ...]
    store: Store | None
    timeout_s: float
    owns_default_group: bool = False
    hub: ExchangeHub | None = None
    """Opens scheduled exchanges; None leaves sums to torch.distributed's own."""
    _groups: dict[tuple[str, tuple[int, ...]], TorchCollective] = field(
        default_factory=dict
    )
    _exchanges: dict[tuple[str, tuple[int, ...]], Collective] = field(default_factory=dict)
    _gloo_groups: dict[tuple[str, tuple[int, ...]], GlooGroup] = field(default_factory=dict)
    _interrupted: threading.Event = field(default_factory=threading.Event)
    _failures: int = 0
    members: tuple[int, ...] = ()
    """Ranks that take part, rising; all at first."""
    joins: bool = False
    """The others train already: this rank is alone until it takes part as well."""
    lead: int = 0
    """The rank that records, saves and prints for all: the lowest at first, and of those
    that have taken part longest when it is lost. Who comes later does not lead."""
    fresh: frozenset[int] = frozenset()
    """Ranks that take part but have not made a step: they are at no place of the script
    where the others could meet them, outside of steps."""
    generation: int = 0
    """How often the members have gathered anew, failed attempts included."""
    rendezvous: Rendezvous = field(init=False)
    _established: tuple[tuple[int, ...], Rendezvous] = field(init=False)

    def __post_init__(self) -> None:
        if self.joins:
            self.members, self.lead = (self.rank,), _NOBODY
        self.members = self.members or tuple(range(self.world_size))
        self.rendezvous = Rendezvous(
            store=None if self.joins else self.store,
            rank=0 if self.joins else self.rank,
            world_size=len(self.members),
            timeout_s=self.timeout_s,
            member_ids=tuple(self.device_ids[rank] for rank in self.members),
        )
        self._established = (self.members, self.rendezvous)

    @property
    def is_lead(self) -> bool:
        """Whether it is this rank; changes when those before it are lost."""
        return self.rank == self.lead

    @property
    def lead_index(self) -> int:
        """The lead's position among the members."""
        return self.members.index(self.lead)

    def collective(
        self, ranks: Sequence[int] | None = None, purpose: str = "gradients"
    ) -> Collective:
        """The collective of some ranks (all by default).

        All ranks must ask for the same groups in the same order, members or not.

        Args:
            ranks: The members.
            purpose: Collectives of one purpose keep their order among themselves only.
        """
        members = tuple(sorted(ranks)) if ranks is not None else self.members
        if len(members) == 1 or self.world_size == 1:
            return LocalCollective()
        if self.hub is None:
            return self._torch_collective(purpose, members)
        key = (purpose, members)
        if key not in self._exchanges:
            is_member = self.rank in members
            self._exchanges[key] = (
                self.hub.open(members, purpose) if is_member else _Elsewhere(len(members))
            )
        return self._exchanges[key]

    def drop_collective(self, ranks: Sequence[int], purpose: str = "gradients") -> None:
        """End a scheduled exchange that is not needed any more; its members call it."""
        dropped = self._exchanges.pop((purpose, tuple(sorted(ranks))), None)
        if self.hub is not None and isinstance(dropped, ScheduledCollective):
            self.hub.close(dropped)

    def relink(self, network: JobNetwork) -> None:
        """End all scheduled exchanges, since links changed; they open anew when asked for.

        All ranks must call it together.
        """
        assert self.hub is not None
        self.hub.network = network
        self.hub.close()
        self._exchanges.clear()

    def process_group(
        self, ranks: Sequence[int] | None = None, purpose: str = "gradients"
    ) -> dist.ProcessGroup | None:
        """The torch.distributed group of some ranks; None for a single member.

        All ranks must ask for the same groups in the same order, members or not. What
        runs inside a model needs a group (a purpose) of its own, since gradients are sent
        while its backward runs.

        Raises:
            CommunicationError: If a member was lost, or does not come in time.
        """
        members = tuple(sorted(ranks)) if ranks is not None else self.members
        if len(members) == 1 or self.world_size == 1:
            return None
        if self.hub is None or purpose == INSIDE_MODEL:
            return self._torch_collective(purpose, members).process_group
        if self.rank not in members:
            return None
        key = (purpose, members)
        if key not in self._gloo_groups:
            self._gloo_groups[key] = self._make_gloo_group(members, purpose)
        group: dist.ProcessGroup = self._gloo_groups[key].group
        return group

    def interrupt(self) -> None:
        """Wake whoever waits in these groups, here and on their members; any thread."""
        self._interrupted.set()
        for group in list(self._gloo_groups.values()):
            group.cut()

    def tell_last_wait(self, wait_s: float) -> None:
        """Say how long this rank's last exchange took, for ``collect_last_waits``."""
        if self.store is not None:
            with contextlib.suppress(RuntimeError, ConnectionError):
                self.store.set(f"last_wait/{self.rank}", str(wait_s))

    def collect_last_waits(self, wait_s: float) -> list[float]:
        """Tell the lead how long this rank's last exchange took, without a collective.

        Returns:
            On the lead the waits of all ranks; its own stands in for a rank that does
            not answer within 2 s. Elsewhere this rank's wait for all.
        """
        waits_s = [wait_s] * self.world_size
        if self.store is None:
            return waits_s
        self.tell_last_wait(wait_s)
        with contextlib.suppress(RuntimeError, ConnectionError):
            if self.is_lead:
                keys = {r: f"last_wait/{r}" for r in self.members}
                self.store.wait(list(keys.values()), timedelta(seconds=_LAST_WAIT_S))
                for r, key in keys.items():
                    waits_s[r] = float(self.store.get(key))
        return waits_s

    def leave(self) -> None:
        """Drop all groups and exchanges."""
        if self.hub is not None:
            self.hub.close()
        self._exchanges.clear()
        self._groups.clear()
        self._drop_gloo_groups()
        if self.owns_default_group and dist.is_initialized():
            dist.destroy_process_group()

    def regroup(
        self,
        ranks: tuple[int, ...],
        generation: int,
        hub: ExchangeHub,
        collective: Collective | None,
        joined: Collection[int] = (),
    ) -> None:
        """Go on among those that take part; groups and exchanges of before are dropped.

        Args:
            ranks: Those that take part, rising.
            generation: Larger than any before.
            hub: Of these ranks.
            collective: The exchange of them all that it has opened; None for one rank.
            joined: Of them, those that did not take part before.
        """
        assert self.store is not None
        before, interruption = self.hub, self.rendezvous.interruption
        self.members, self.generation, self.hub = ranks, generation, hub
        self.fresh = (self.fresh | frozenset(joined)) & frozenset(ranks)
        staying = [rank for rank in ranks if rank not in joined]
        if self.lead not in staying:
            self.lead = staying[0] if staying else ranks[0]
        self._groups.clear()
        self._drop_gloo_groups()
        self._interrupted = threading.Event()
        self._exchanges.clear()
        if collective is not None:
            self._exchanges["gradients", ranks] = collective
        self.rendezvous = self._meet(ranks, f"generation/{generation}", interruption)
        established = tuple(rank for rank in ranks if rank not in self.fresh)
        self._established = (established, self.rendezvous)
        if self.fresh and self.rank in established:
            prefix = f"generation/{generation}/established"
            meeting = self._meet(established, prefix, interruption)
            self._established = (established, meeting)
        if before is not None:
            before.close()

    @contextlib.contextmanager
    def among_established(self) -> Iterator[None]:
        """Inside, the members are those that have made a step together."""
        if not self.fresh:
            yield
            return
        everybody = self.members, self.rendezvous
        self.members, self.rendezvous = self._established
        try:
            yield
        finally:
            self.members, self.rendezvous = everybody

    def grow(self, device_ids: tuple[str, ...]) -> None:
        """There are more ranks than before; who takes part is said by ``regroup``."""
        self.device_ids, self.world_size = device_ids, len(device_ids)

    def _meet(
        self,
        ranks: tuple[int, ...],
        prefix: str,
        interruption: Callable[[], str | None] | None,
    ) -> Rendezvous:
        assert self.store is not None
        return Rendezvous(
            store=PrefixStore(prefix, self.store),
            rank=ranks.index(self.rank),
            world_size=len(ranks),
            timeout_s=self.timeout_s,
            member_ids=tuple(self.device_ids[r] for r in ranks),
            interruption=interruption,
        )

    def _torch_collective(self, purpose: str, members: tuple[int, ...]) -> TorchCollective:
        key = (purpose, members)
        if key not in self._groups:
            self._groups[key] = self._make(members, is_first=not self._groups)
        return self._groups[key]

    def _make(self, members: tuple[int, ...], *, is_first: bool) -> TorchCollective:
        group: dist.ProcessGroup | None
        if members == self.members and is_first:
            group = dist.group.WORLD
        else:
            timeout = timedelta(seconds=self.timeout_s)
            with lost_peers(f"making the group of ranks {members}"):
                group = dist.new_group(list(members), timeout=timeout)
        assert group is not None
        names = tuple(self.device_ids[r] for r in members)
        collective = TorchCollective(group, names, self.timeout_s)
        collective.find_missing = self._find_missing
        return collective

    def _make_gloo_group(self, members: tuple[int, ...], purpose: str) -> GlooGroup:
        """A group whose connections can be cut; torch.distributed knows nothing of it."""
        assert self.hub is not None
        assert self.store is not None
        ended = self._interrupted
        name = f"group/{purpose}/{'-'.join(map(str, members))}/"
        store = PollingStore(self.store, self.generation, ended, self.timeout_s, name)
        settings = self.hub.transport_settings(build_timeout_s=self.timeout_s)
        with lost_peers(f"making the group of ranks {members}"):
            group = build_group(store, members.index(self.rank), len(members), settings)
        if ended.is_set():
            group.cut()
        return group

    def _drop_gloo_groups(self) -> None:
        """Let the groups go, in threads: it may take until their last wait has ended."""
        groups, self._gloo_groups = self._gloo_groups, {}
        for group in groups.values():
            start_guarded(
                threading.Thread(
                    target=_release, args=(group,), name="release group", daemon=True
                )
            )

    def _find_missing(self) -> list[str]:
        self._failures += 1
        return self.rendezvous.find_missing(str(self._failures))


def _release(group: GlooGroup) -> None:
    """Drop a group once nobody else holds it.

    Whoever drops the last reference waits in Gloo until the group's last wait has ended.
    An error that ended the training's own wait keeps one, which it drops when it has been
    dealt with; that must not be the last.
    """
    held = group.group
    group.release()
    while sys.getrefcount(held) > _OWN_REFERENCES:
        time.sleep(_RELEASE_POLL_S)


@dataclass(frozen=True, slots=True)
class _Elsewhere:
    """Stands for an exchange among other ranks."""

    num_members: int

    def all_reduce(
        self, tensor: torch.Tensor, weight: float = 1.0, *, key: str | None = None
    ) -> Pending:
        """Refuse: this rank is no member.

        Raises:
            ConfigError: Always.
        """
        del tensor, weight, key
        msg = "this rank is no member of that exchange; ask for a plan that includes it"
        raise ConfigError(msg)

    def predict_s(self, num_bytes: int) -> float:  # noqa: ARG002 - protocol
        """Nothing is sent from here."""
        return 0.0
