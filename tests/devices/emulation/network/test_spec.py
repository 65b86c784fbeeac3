"""How networks are written, and which ones are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geartrain.devices.emulation.network import (
    ExtraNic,
    LinkRate,
    NetworkSpec,
    parse_link_rate,
    parse_links,
)
from geartrain.errors import ConfigError

FAST = LinkRate.both_ways(500e6 / 8)
SLOW = LinkRate.both_ways(12e6 / 8)


def test_one_rate_is_that_of_every_host_of_one_rack() -> None:
    assert parse_links("500Mbit", 3) == NetworkSpec(racks=((FAST, FAST, FAST),))


def test_rates_in_a_list_are_the_hosts() -> None:
    assert parse_links("500Mbit,12Mbit", 2) == NetworkSpec(racks=((FAST, SLOW),))


def test_racks_may_be_of_equal_size() -> None:
    spec = parse_links("2x2:500Mbit:12Mbit")

    assert spec == NetworkSpec(racks=((FAST, FAST), (FAST, FAST)), uplinks=(SLOW, SLOW))


def test_racks_may_differ_in_size_uplinks_and_hosts() -> None:
    spec = parse_links("1+2:500Mbit,500Mbit,12Mbit:500Mbit,12Mbit")

    assert spec == NetworkSpec(racks=((FAST,), (FAST, SLOW)), uplinks=(FAST, SLOW))
    assert [spec.rack_of(index) for index in range(3)] == [0, 1, 1]


def test_directions_may_differ() -> None:
    assert parse_link_rate("500Mbit~12Mbit") == LinkRate(
        send_bytes_per_s=500e6 / 8, receive_bytes_per_s=12e6 / 8
    )


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_rates_read_back_as_they_were_written(send_kbit: int, receive_kbit: int) -> None:
    send, receive = send_kbit * 125.0, receive_kbit * 125.0
    rate = LinkRate(send_bytes_per_s=send, receive_bytes_per_s=receive)

    again = parse_link_rate(str(rate))

    assert again.send_bytes_per_s == pytest.approx(send)
    assert again.receive_bytes_per_s == pytest.approx(receive)


@pytest.mark.parametrize(
    ("text", "num_hosts", "complaint"),
    [
        ("50Mbit", None, "do not say how many hosts"),
        ("50Mbit,50Mbit", 3, "describe 2 hosts, but there are 3"),
        ("2x4:500Mbit:50Mbit", 2, "describe 8 hosts, but there are 2"),
        ("2x4:500Mbit", None, "have no uplinks"),
        ("2x4:500Mbit,50Mbit:50Mbit", None, "2 rates for 8 hosts"),
        ("2x4:500Mbit:1Mbit,2Mbit,3Mbit", None, "3 rates for 2 racks"),
        ("two:500Mbit:50Mbit", None, "is not like 2x4 or 3"),
        ("0x4:500Mbit:50Mbit", None, "each rack needs a host"),
        ("100x100:500Mbit:50Mbit", None, "4094 at most"),
        ("50MB", 2, "is not a data rate"),
        ("0Mbit", 2, "must be > 0"),
        ("fast", 2, "is not a data rate"),
    ],
)
def test_what_is_no_network_is_refused_with_a_reason(
    text: str, num_hosts: int | None, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_links(text, num_hosts)


def test_network_that_cannot_be_is_refused() -> None:
    rack = (FAST,)
    with pytest.raises(ConfigError, match="needs a host"):
        NetworkSpec(racks=(rack, ()))
    with pytest.raises(ConfigError, match="1 uplinks for 2 racks"):
        NetworkSpec(racks=(rack, rack), uplinks=(SLOW,))
    with pytest.raises(ConfigError, match="mtu_bytes=500"):
        NetworkSpec(racks=(rack,), mtu_bytes=500)
    with pytest.raises(ConfigError, match="a name twice"):
        NetworkSpec(racks=(rack,), extra_nics=(ExtraNic(), ExtraNic()))
    with pytest.raises(ConfigError, match="other than lo and eth0"):
        ExtraNic(name="eth0")
    with pytest.raises(ConfigError, match="no host -2"):
        NetworkSpec(racks=(rack,)).rack_of(-2)


def test_links_are_told_in_a_few_words() -> None:
    assert str(parse_links("3+5:500Mbit:50Mbit")) == "3+5 of 500Mbit, uplinks 50Mbit"
    assert str(parse_links("50Mbit,12Mbit")) == "2 of 50Mbit,12Mbit"
