"""Predicted time of the staged exchange: loads of links and processors, as a pipeline.

Per chunk the stages are: into the device group's sum, scatter in the rack, partial sums
over the slow hop, totals back over it, gather in the rack, out to the devices; a codec
adds encoding and decoding. All stages run at once on different chunks, so the time is
that of the slowest stage for all chunks, plus the other stages once (filling and
draining), and at least what the busiest link or processor has to do in all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from geartrain.planner.exchange.fabric import Fabric, FabricHost, FabricRack
from geartrain.planner.exchange.schedule import EXACT, CodecProfile, RackPart, StageTimes

MESSAGE_CPU_S = 50e-6
"""Processor time to start, wake up for and finish one message, both ways of one host."""
ADD_BYTES_PER_S = 3e9
"""Adding float32 in memory, one thread."""
FEWEST_CHUNKS, MOST_CHUNKS = 4, 32
"""Between 16 and 32 chunks gained 2 % more, below 4 the pipeline never fills: measured at
25 MB, 2 racks: 1 chunk 74 % of the bound, 4 84 %, 8 90 %, 16 90 %, 32 92 %."""
SMALLEST_CHUNK_BYTES = 64 * 1024
"""Below, starting the messages costs more than what they carry."""
_TURN_S = 0.03
"""What a message and its notice wait at a host that is held to a part of a core and
computes: it has used up its part when they come, and gets the next one 20 ms later. Nine
rings among four hosts took 1.2 to 1.9 s for it with a tenth of a core."""
_BUCKETS = 8
"""About so many a model's gradients are exchanged in."""
_TWO = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedLoads:
    """What one schedule loads, per byte of the tensor, and what limits it."""

    stages_s: tuple[float, ...]
    """Seconds per byte of each stage alone, in the order of the head of this file."""
    encode_s: float
    decode_s: float
    busiest_s: float
    """Seconds per byte of the busiest link or device path, over all stages."""
    cpu_s: float
    """Processor seconds per byte of the busiest host."""
    messages: int
    """Per chunk, sent and received by the busiest host."""
    latencies_s: tuple[float, ...]
    """One way, of each stage that sends anything."""
    core_fraction: float
    limit: str
    """What is busiest, for people."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Seconds of one exchange."""

    seconds: float
    stages: StageTimes
    num_chunks: int = 1
    limit: str = ""


def staged_loads(
    fabric: Fabric,
    parts: Sequence[RackPart],
    codec: CodecProfile | None,
    core_fraction: float = 1.0,
) -> StagedLoads:
    """Work out the loads of a staged exchange.

    Args:
        fabric: Racks and hosts, in the order of ``parts``.
        parts: Their shares, and the racks that use the codec.
        codec: Costs of that codec; None where all racks are exact.
        core_fraction: Processor cores of each host.
    """
    hops = slow_hop_loads(parts, codec.bytes_fraction if codec else 1.0)
    tally = _Tally()
    for rack, part, hop in zip(fabric.racks, parts, hops, strict=True):
        tally.add_rack(rack, part, hop, len(parts), codec)
    tally.add_device_groups(fabric.hosts)
    latencies = []
    if any(len(rack.hosts) > 1 for rack in fabric.racks):
        latencies += [fabric.rack_latency_s] * 2
    if len(parts) > 1:
        latencies += [fabric.fabric_latency_s] * (1 if len(parts) == _TWO else 2)
    return StagedLoads(
        stages_s=tuple(tally.stages_s),
        encode_s=tally.encode_s / min(1.0, core_fraction),
        decode_s=tally.decode_s / min(1.0, core_fraction),
        busiest_s=tally.busiest_s,
        cpu_s=tally.cpu_s / core_fraction,
        messages=_messages(fabric, parts),
        latencies_s=tuple(latencies),
        core_fraction=core_fraction,
        limit=tally.limit,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowHop:
    """Bytes over one rack's uplink per byte of the tensor."""

    partials_sent: float
    partials_received: float
    """Equals the totals that it sends back; as much again the other way round."""
    totals: bool
    """Whether totals travel back; two racks swap partial sums instead."""

    @property
    def each_way(self) -> float:
        """In each direction, both stages together."""
        return self.partials_sent + (self.partials_received if self.totals else 0.0)


def slow_hop_loads(parts: Sequence[RackPart], fraction: float) -> list[SlowHop]:
    """Bytes over each uplink: what goes to or comes from a coded rack is coded."""
    num_racks = len(parts)
    coded = [part.codec != EXACT for part in parts]
    if num_racks == 1:
        return [SlowHop(partials_sent=0.0, partials_received=0.0, totals=False)]
    if num_racks == _TWO:
        each = fraction if any(coded) else 1.0
        hop = SlowHop(partials_sent=each, partials_received=each, totals=False)
        return [hop, hop]
    num_coded = sum(coded)
    coded_share = sum(p.share for p, c in zip(parts, coded, strict=True) if c)
    hops = []
    for part, is_coded in zip(parts, coded, strict=True):
        x = part.share
        if is_coded:
            sent, others = fraction * (1 - x), fraction * (num_racks - 1)
        else:
            sent = fraction * coded_share + max(0.0, 1 - x - coded_share)
            others = fraction * num_coded + (num_racks - 1 - num_coded)
        hops.append(SlowHop(partials_sent=sent, partials_received=x * others, totals=True))
    return hops


def choose_num_chunks(loads: StagedLoads, num_bytes: int) -> int:
    """Chunks that balance filling the pipeline against starting each chunk.

    ``C = sqrt((time of the stages other than the slowest) / (k alpha))``, where ``k alpha``
    is what a chunk waits for messages one after the other; from 4 to 32, and none below
    ``SMALLEST_CHUNK_BYTES``. One or two where so many hosts exchange that the messages of
    more chunks would cost more than the pipeline saves; and where hosts have less than a
    core, for their messages then take time that computing needs.
    """
    stages = _all_stages_s(loads)
    hidden_s = (sum(stages) - max(stages)) * num_bytes
    start_s = sum(loads.latencies_s) + loads.messages * MESSAGE_CPU_S / loads.core_fraction
    wanted = math.sqrt(hidden_s / start_s) if start_s > 0 else MOST_CHUNKS
    chunks = min(MOST_CHUNKS, max(FEWEST_CHUNKS, round(wanted)))
    chunks = max(1, min(chunks, num_bytes // SMALLEST_CHUNK_BYTES))
    tried = sorted({1, min(2, chunks), min(4, chunks), chunks}, reverse=True)
    # More than with a core of its own; and filling is waited for after the last bucket
    # only, while the messages of all take processor time.
    scarce = _BUCKETS * max(0.0, 1 / loads.core_fraction - 1)
    taken_s = scarce * loads.messages * MESSAGE_CPU_S
    return min(
        tried,
        key=lambda count: predict_staged(loads, num_bytes, count).seconds + count * taken_s,
    )


def predict_staged(loads: StagedLoads, num_bytes: int, num_chunks: int) -> Prediction:
    """Predict the whole exchange and its parts."""
    stages = _all_stages_s(loads)
    longest = max(stages)
    filling_s = (sum(stages) - longest) * num_bytes / num_chunks
    message_cpu_s = loads.messages * MESSAGE_CPU_S / loads.core_fraction
    busiest_s = max(longest, loads.busiest_s) * num_bytes
    cpu_s = loads.cpu_s * num_bytes + num_chunks * message_cpu_s
    # Only the first chunk's: later ones are on their way while earlier ones are waited for.
    turns_s = len(loads.latencies_s) * turn_s(loads.core_fraction)
    latency_s = sum(loads.latencies_s) + turns_s + message_cpu_s
    group_in, scatter, out, back, gather, group_out = (
        stage * num_bytes for stage in loads.stages_s
    )
    return Prediction(
        seconds=max(busiest_s + filling_s, cpu_s) + latency_s,
        stages=StageTimes(
            device_group_s=group_in + group_out,
            rack_s=scatter + gather,
            slow_hop_s=out + back,
            codec_s=(loads.encode_s + loads.decode_s) * num_bytes,
            latency_s=latency_s,
        ),
        num_chunks=num_chunks,
        limit="the processor" if cpu_s > busiest_s else loads.limit,
    )


def turn_s(core_fraction: float) -> float:
    """How long a message waits for its receiver, of which less than a core is there."""
    return _TURN_S * max(0.0, 1 - core_fraction)


def device_group_s(host: FabricHost) -> tuple[float, float]:
    """Seconds per byte into the leader's sum and out again.

    Processes of a host write their part and add a slice of all (two passes), then read
    the sum; a device's tensor crosses to host memory and back.
    """
    several = len(host.members) > 1
    into = 2 / host.memory_bytes_per_s if several else 0.0
    out = 1 / host.memory_bytes_per_s if several else 0.0
    into += 1 / host.to_host_bytes_per_s if host.to_host_bytes_per_s else 0.0
    out += 1 / host.from_host_bytes_per_s if host.from_host_bytes_per_s else 0.0
    return into, out


class _Tally:
    """Keeps the largest of each."""

    def __init__(self) -> None:
        self.stages_s = [0.0] * 6
        self.encode_s = self.decode_s = self.cpu_s = self.busiest_s = 0.0
        self.limit = "nothing"

    def add_rack(
        self,
        rack: FabricRack,
        part: RackPart,
        hop: SlowHop,
        num_racks: int,
        codec: CodecProfile | None,
    ) -> None:
        sent, received = hop.partials_sent, hop.partials_received
        back = (received, sent) if hop.totals else (0.0, 0.0)
        up, down = 1 / rack.send_bytes_per_s, 1 / rack.receive_bytes_per_s
        self._stage(2, sent * up, received * down)
        self._stage(3, back[0] * up, back[1] * down)
        self._busy(hop.each_way * max(up, down), f"the uplink of {rack.rack_id}")
        uses = codec if part.codec != EXACT else None
        for host, share in zip(rack.hosts, part.host_shares, strict=True):
            self._add_host(host, share, len(rack.hosts), hop, back)
            self._add_cpu(share, len(rack.hosts), part.share, num_racks, uses)

    def add_device_groups(self, hosts: Sequence[FabricHost]) -> None:
        for host in hosts:
            into, out = device_group_s(host)
            self._stage(0, into)
            self._stage(5, out)
            # In and out are different copy engines for a device, one memory for processes.
            several = len(host.members) > 1
            self._busy(
                into + out if several else max(into, out), f"the devices of {host.host_id}"
            )

    def _add_host(
        self,
        host: FabricHost,
        share: float,
        num_hosts: int,
        hop: SlowHop,
        back: tuple[float, float],
    ) -> None:
        up, down = 1 / host.send_bytes_per_s, 1 / host.receive_bytes_per_s
        away, mine = (1 - share, share * (num_hosts - 1)) if num_hosts > 1 else (0.0, 0.0)
        self._stage(1, away * up, mine * down)
        self._stage(2, share * hop.partials_sent * up, share * hop.partials_received * down)
        self._stage(3, share * back[0] * up, share * back[1] * down)
        self._stage(4, mine * up, away * down)
        load = away + mine + share * hop.each_way
        self._busy(load * max(up, down), f"the link of {host.host_id}")

    def _add_cpu(
        self,
        share: float,
        num_hosts: int,
        rack_share: float,
        num_racks: int,
        codec: CodecProfile | None,
    ) -> None:
        adding = share * (num_hosts - 1)
        owned = share * (rack_share if num_racks > _TWO else 1.0)
        adding += owned * (num_racks - 1)
        cpu_s = adding / ADD_BYTES_PER_S
        if codec is not None:
            # Partial sums are encoded, totals too; owners decode all parts of a sum, their
            # own included, and everybody decodes the totals: the same bits everywhere.
            decoded = owned * num_racks + (share if num_racks > _TWO else 0.0)
            encoded = share + (owned if num_racks > _TWO else 0.0)
            encode_s = encoded / codec.encode_bytes_per_s
            decode_s = decoded / codec.decode_bytes_per_s
            self.encode_s = max(self.encode_s, encode_s)
            self.decode_s = max(self.decode_s, decode_s)
            cpu_s += encode_s + decode_s
        self.cpu_s = max(self.cpu_s, cpu_s)

    def _stage(self, index: int, *seconds: float) -> None:
        self.stages_s[index] = max(self.stages_s[index], *seconds)

    def _busy(self, seconds: float, name: str) -> None:
        if seconds > self.busiest_s:
            self.busiest_s, self.limit = seconds, name


def _all_stages_s(loads: StagedLoads) -> tuple[float, ...]:
    return (*loads.stages_s, loads.encode_s, loads.decode_s)


def _messages(fabric: Fabric, parts: Sequence[RackPart]) -> int:
    """Messages of one chunk that the busiest host sends and receives."""
    num_racks = len(parts)
    most_hosts = max(len(rack.hosts) for rack in fabric.racks)
    stages = 0 if num_racks == 1 else (1 if num_racks == _TWO else 2)
    busiest = 0
    for rack in fabric.racks:
        # A host of a small rack meets several of a large one.
        meets = math.ceil(most_hosts / len(rack.hosts)) if stages else 0
        inside = 4 * (len(rack.hosts) - 1)
        busiest = max(busiest, inside + 2 * stages * (num_racks - 1) * meets)
    return busiest
