"""The picture of links shows every rack, host and rate."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest

from geartrain.errors import ConfigError
from geartrain.monitoring.link_charts import draw_links, link_matrix, short_names
from geartrain.topology.profile import Tier, Topology
from topologies import MEGABIT, make_racks


def texts_of(topology: Topology) -> set[str]:
    """What is written in the picture; matplotlib keeps each text in a comment."""
    picture = draw_links(topology, "svg").decode()
    return {text.strip() for text in re.findall(r"<!-- (.*?) -->", picture, re.DOTALL)}


def test_racks_hosts_and_rates_are_named() -> None:
    texts = texts_of(make_racks([2, 2]))

    assert {"rack0", "rack1", "fabric", "node0", "node3"} <= texts
    assert {"500 Mbit/s", "50 Mbit/s"} <= texts


def test_directions_that_differ_are_both_told() -> None:
    texts = texts_of(make_racks([2, 2], uplinks={1: (12 * MEGABIT, 50 * MEGABIT)}))

    assert {"out 12 Mbit/s", "in 50 Mbit/s"} <= texts


def test_one_rack_has_no_fabric() -> None:
    assert "fabric" not in texts_of(make_racks([3]))


def test_labels_stand_in_the_title() -> None:
    picture = draw_links(make_racks([2]), "svg", ("emulated",)).decode()

    assert "<!-- 2 hosts in 1 rack, measured, emulated -->" in picture


def test_slow_link_is_marked() -> None:
    slow = draw_links(make_racks([4], nics={2: (20 * MEGABIT,) * 2}), "svg").decode()

    assert "#d55e00" in slow
    assert "#d55e00" not in draw_links(make_racks([4]), "svg").decode()


@pytest.mark.parametrize("sizes", [[1], [1, 1], [3, 5], [16, 16, 16, 16]])
def test_any_shape_can_be_drawn(sizes: list[int]) -> None:
    assert draw_links(make_racks(sizes), "png").startswith(b"\x89PNG")


def test_picture_of_the_same_links_is_the_same() -> None:
    topology = make_racks([2, 2])

    without_date = [
        re.sub(rb"<dc:date>.*?</dc:date>", b"", draw_links(topology, "svg")) for _ in "ab"
    ]

    assert without_date[0] == without_date[1]


def test_matrix_has_unmeasured_pairs_empty() -> None:
    topology = make_racks([1, 1])
    order = [host.tier_id for host in topology.hosts]

    rates = link_matrix(topology, order)

    assert np.isnan(np.diag(rates)).all()
    assert rates[0, 1] == 50 * MEGABIT


def test_hosts_of_one_name_are_told_apart_by_address() -> None:
    hosts = tuple(
        Tier(
            kind="host",
            tier_id=f"vm-0000000{index}",
            member_ids=(),
            address=f"10.0.0.{index}",
        )
        for index in range(2)
    )
    rack = Tier(kind="rack", tier_id="r", member_ids=("vm-00000000", "vm-00000001"))

    names = short_names(Topology(tiers=(*hosts, rack)))

    assert names == {"vm-00000000": "10.0.0.0", "vm-00000001": "10.0.0.1"}


def test_without_matplotlib_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    with pytest.raises(ConfigError, match=r"geartrain\[report\]"):
        draw_links(make_racks([2]), "png")
