"""A picture of the links between hosts: racks as boxes with rates, and the matrix."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from geartrain.errors import ConfigError
from geartrain.topology.host_identity import name_in
from geartrain.topology.profile import Tier, Topology
from geartrain.units import format_bit_rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe-Ito, as in the charts of a report.
_NIC, _UPLINK, _SLOW, _BOX, _INK = "#0072B2", "#009E73", "#D55E00", "#F4F4F4", "#333333"
_ROOM_FOR_LABELS = 8
"""Hosts of a rack that fit side by side, each with its rates; more become a grid."""
_ROOM_FOR_NUMBERS = 12
"""Hosts whose matrix has room for a number in each cell."""
_ROOM_FOR_NAMES = 40
_SLOW_FRACTION = 0.6
"""Of the median of its kind; a link below that limits the others and is marked."""
_ALIKE_FRACTION = 0.1
"""Two directions that differ by less are one number."""
_FABRIC_Y, _RACK_Y, _HOST_Y = 2.6, 1.35, 0.0
_GRID_Y, _ROW = 0.75, 0.32
_COLUMN_INCHES, _GAP, _MAX_INCHES = 1.3, 0.6, 16.0


def draw_links(
    topology: Topology, file_format: Literal["png", "svg"], labels: Sequence[str] = ()
) -> bytes:
    """Draw hosts, racks and rates, and the matrix of what single flows reached.

    Args:
        topology: Measured links.
        file_format: Of the image returned.
        labels: Words that every result of these links must carry, such as "emulated".

    Raises:
        ConfigError: If matplotlib is not installed.
    """
    try:
        import matplotlib as mpl  # noqa: PLC0415 - an extra
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        msg = f"a picture needs matplotlib ({error}); pip install 'geartrain[report]'"
        raise ConfigError(msg) from error
    places = _place(topology)
    has_matrix = len(topology.hosts) > 1
    width = min(_MAX_INCHES, max(4.5, places.width * _COLUMN_INCHES))
    side = min(9.0, max(4.2, 0.62 * len(topology.hosts)))
    height = max(4.6, side + 0.4 if has_matrix else 4.6)
    with mpl.rc_context({"font.size": 9, "svg.hashsalt": topology.fingerprint}):
        total = width + (side + 1.2 if has_matrix else 0.0)
        figure = Figure(figsize=(total, height), layout="constrained")
        figure.suptitle(_literal(_title(topology, labels)))
        if has_matrix:
            ratios = [width, side + 1.2]
            graph, matrix = figure.subplots(1, 2, width_ratios=ratios)
            _draw_matrix(figure, matrix, topology)
        else:
            graph = figure.subplots()
        _draw_graph(graph, topology, places)
        buffer = io.BytesIO()
        figure.savefig(buffer, format=file_format, dpi=120, metadata=None)
    return buffer.getvalue()


def short_names(topology: Topology) -> dict[str, str]:
    """Names of hosts for people: without the hash where that leaves them distinct.

    Returns:
        From host id to name; where several hosts share a name, the address tells them
        apart, and else the whole id.
    """
    names = {host.tier_id: name_in(host.tier_id) for host in topology.hosts}
    counts = list(names.values())
    return {
        host.tier_id: names[host.tier_id]
        if counts.count(names[host.tier_id]) == 1
        else host.address or host.tier_id
        for host in topology.hosts
    }


def show_bit_rate(bytes_per_s: float | None) -> str:
    """Write a link's rate in bits, as network links are told.

    >>> show_bit_rate(62.5e6), show_bit_rate(None)
    ('500 Mbit/s', '?')
    """
    return "?" if bytes_per_s is None else format_bit_rate(bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Places:
    """Where everything is drawn, in columns."""

    hosts: dict[str, tuple[float, float]]
    boxes: dict[str, tuple[float, float, float]]
    """Left, right and lower edge of each rack."""
    width: float
    lowest: float


def _place(topology: Topology) -> _Places:
    hosts, boxes = {}, {}
    left, lowest = 0.0, _HOST_Y
    for rack in topology.racks:
        count = len(rack.member_ids)
        fits = count <= _ROOM_FOR_LABELS
        columns = count if fits else math.ceil(math.sqrt(count))
        top = _HOST_Y if fits else _GRID_Y
        for index, host_id in enumerate(rack.member_ids):
            row, column = divmod(index, columns)
            hosts[host_id] = (left + column + 0.5, top - _ROW * row)
            lowest = min(lowest, hosts[host_id][1])
        bottom = top - _ROW * ((count - 1) // columns) - 0.3
        boxes[rack.tier_id] = (left, left + columns, bottom)
        left += columns + _GAP
    return _Places(hosts=hosts, boxes=boxes, width=left - _GAP, lowest=lowest)


def _draw_graph(ax: Axes, topology: Topology, places: _Places) -> None:
    ax.set_axis_off()
    ax.set_xlim(-0.3, places.width + 0.3)
    ax.set_ylim(places.lowest - 0.6, _FABRIC_Y + 0.35)
    has_fabric = len(topology.racks) > 1
    middle = places.width / 2
    if has_fabric:
        _label(ax, middle, _FABRIC_Y, "fabric", box=True)
    names = short_names(topology)
    nic_median = _median(topology.hosts)
    uplink_median = _median(topology.racks)
    for rack in topology.racks:
        left, right, bottom = places.boxes[rack.tier_id]
        centre = (left + right) / 2
        _draw_box(ax, left, right, bottom)
        _label(ax, centre, _RACK_Y, rack.tier_id, box=True)
        if has_fabric:
            is_slow = _is_slow(rack, uplink_median)
            ends = ((centre, _RACK_Y + 0.14), (middle, _FABRIC_Y - 0.14))
            _edge(ax, ends, _rates(rack), _SLOW if is_slow else _UPLINK, at=0.35)
        fits = len(rack.member_ids) <= _ROOM_FOR_LABELS
        if not fits:
            _write_range(ax, centre, [topology.host(name) for name in rack.member_ids])
        for host_id in rack.member_ids:
            x, y = places.hosts[host_id]
            host = topology.host(host_id)
            colour = _SLOW if _is_slow(host, nic_median) else _NIC
            if fits:
                ends = ((x, y + 0.14), (centre, _RACK_Y - 0.14))
                _edge(ax, ends, _rates(host), colour, at=0.25)
            _draw_host(ax, x, y, names[host_id], colour)


def _draw_host(ax: Axes, x: float, y: float, name: str, colour: str) -> None:
    ax.text(
        x,
        y,
        _literal(name),
        ha="center",
        va="center",
        fontsize=8,
        color=_INK,
        bbox={"boxstyle": "round,pad=0.3", "facecolor": "white", "edgecolor": colour},
        zorder=3,
    )


def _write_range(ax: Axes, x: float, hosts: Sequence[Tier]) -> None:
    """Tell the rates of many hosts in one line, where there is no room for edges."""
    rates = [rate for rate in map(_least, hosts) if rate is not None]
    if rates:
        low, high = show_bit_rate(min(rates)), show_bit_rate(max(rates))
        text = f"NIC {low}" if low == high else f"NIC {low} to {high}"
        middle = (_RACK_Y + _GRID_Y) / 2
        ax.text(x, middle, text, ha="center", va="center", fontsize=7, color=_NIC)


def _draw_box(ax: Axes, left: float, right: float, bottom: float) -> None:
    from matplotlib.patches import FancyBboxPatch  # noqa: PLC0415 - an extra

    ax.add_patch(
        FancyBboxPatch(
            (left + 0.03, bottom),
            right - left - 0.06,
            _RACK_Y + 0.3 - bottom,
            boxstyle="round,pad=0.05",
            facecolor=_BOX,
            edgecolor="#BBBBBB",
            zorder=0,
        )
    )


def _label(ax: Axes, x: float, y: float, text: str, *, box: bool) -> None:
    frame = {"boxstyle": "round,pad=0.3", "facecolor": "#E8E8E8", "edgecolor": "#888888"}
    ax.text(
        x,
        y,
        _literal(text),
        ha="center",
        va="center",
        fontweight="bold",
        color=_INK,
        bbox=frame if box else None,
        zorder=3,
    )


def _edge(
    ax: Axes,
    ends: tuple[tuple[float, float], tuple[float, float]],
    text: str,
    colour: str,
    *,
    at: float,
) -> None:
    (x0, y0), (x1, y1) = ends
    ax.plot([x0, x1], [y0, y1], color=colour, linewidth=1.6, zorder=1)
    if text:
        ax.text(
            x0 + (x1 - x0) * at,
            y0 + (y1 - y0) * at,
            text,
            ha="center",
            va="center",
            fontsize=7,
            color=colour,
            bbox={"boxstyle": "square,pad=0.1", "facecolor": "white", "linewidth": 0},
            zorder=2,
        )


def _draw_matrix(figure: Figure, ax: Axes, topology: Topology) -> None:
    from matplotlib.colors import LogNorm  # noqa: PLC0415 - an extra

    order = [host_id for rack in topology.racks for host_id in rack.member_ids]
    rates = link_matrix(topology, order)
    ax.set_title("one flow, from row to column", loc="left")
    known = rates[np.isfinite(rates)]
    if not known.size:
        ax.text(0.5, 0.5, "not measured", ha="center", transform=ax.transAxes)
        ax.set_axis_off()
        return
    low, high = float(known.min()), float(known.max())
    norm = LogNorm(vmin=low / 1.2, vmax=high * 1.2)
    ax.set_facecolor("#D9D9D9")
    image = ax.imshow(np.ma.masked_invalid(rates), cmap="cividis", norm=norm)
    bar = figure.colorbar(image, ax=ax, shrink=0.8)
    ticks = np.geomspace(low, high, 4) if high > low else np.array([low])
    bar.set_ticks(ticks.tolist())
    bar.set_ticklabels([show_bit_rate(tick) for tick in ticks.tolist()])
    bar.ax.minorticks_off()
    _name_rows(ax, topology, order)
    for edge in _rack_edges(topology.racks):
        ax.axhline(edge - 0.5, color="white", linewidth=2)
        ax.axvline(edge - 0.5, color="white", linewidth=2)
    if len(order) <= _ROOM_FOR_NUMBERS:
        _write_numbers(ax, rates, math.sqrt(low * high))


def link_matrix(topology: Topology, order: Sequence[str]) -> NDArray[np.float64]:
    """Rates of single flows, bytes/s, shape (num_hosts, num_hosts); NaN where unknown.

    Args:
        topology: Measured links.
        order: Host ids of rows and columns.
    """
    index = {host_id: position for position, host_id in enumerate(order)}
    rates = np.full((len(order), len(order)), np.nan)
    for link in topology.links:
        if link.source_id in index and link.target_id in index:
            rates[index[link.source_id], index[link.target_id]] = link.bytes_per_s
    return rates


def _name_rows(ax: Axes, topology: Topology, order: Sequence[str]) -> None:
    names = short_names(topology)
    if len(order) > _ROOM_FOR_NAMES:
        ax.set_xticks([])
        ax.set_yticks([])
        return
    positions = list(range(len(order)))
    labels = [_literal(names[host_id]) for host_id in order]
    ax.set_xticks(positions, labels, rotation=45, ha="right", fontsize=7)
    ax.set_yticks(positions, labels, fontsize=7)


def _write_numbers(ax: Axes, rates: NDArray[np.float64], middle: float) -> None:
    for row, column in zip(*np.nonzero(np.isfinite(rates)), strict=True):
        value = float(rates[row, column])
        text = show_bit_rate(value).replace(" ", "\n")
        colour = "white" if value < middle else "black"
        ax.text(column, row, text, ha="center", va="center", fontsize=6, color=colour)


def _rack_edges(racks: Sequence[Tier]) -> Iterator[int]:
    """Positions in the matrix at which a rack ends."""
    ends = np.cumsum([0, *(len(rack.member_ids) for rack in racks)]).tolist()
    yield from (end for _, end in list(pairwise(ends))[:-1])


def _rates(tier: Tier) -> str:
    send, receive = tier.uplink_send_bytes_per_s, tier.uplink_receive_bytes_per_s
    known = [rate for rate in (send, receive) if rate is not None]
    if not known:
        return ""
    if send is None or receive is None:
        return show_bit_rate(known[0])
    if abs(send - receive) <= _ALIKE_FRACTION * max(send, receive):
        return show_bit_rate((send + receive) / 2)
    return f"out {show_bit_rate(send)}\nin {show_bit_rate(receive)}"


def _least(tier: Tier) -> float | None:
    rates = (tier.uplink_send_bytes_per_s, tier.uplink_receive_bytes_per_s)
    return min((rate for rate in rates if rate is not None), default=None)


def _median(tiers: Sequence[Tier]) -> float | None:
    rates = sorted(rate for rate in map(_least, tiers) if rate is not None)
    return rates[len(rates) // 2] if rates else None


def _is_slow(tier: Tier, median: float | None) -> bool:
    rate = _least(tier)
    return rate is not None and median is not None and rate < _SLOW_FRACTION * median


def _title(topology: Topology, labels: Sequence[str]) -> str:
    hosts, racks = len(topology.hosts), len(topology.racks)
    what = f"{hosts} host{'s' * (hosts > 1)} in {racks} rack{'s' * (racks > 1)}"
    return ", ".join((what, topology.source, *labels))


def _literal(text: str) -> str:
    return text.replace("$", r"\$")  # matplotlib would typeset what is between two
