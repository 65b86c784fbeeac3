"""Two histories never share a name."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from geartrain.elastic.lineage import first_lineage, next_lineage

digests = st.lists(st.binary(min_size=0, max_size=4), max_size=6)


def lineage_of(history: list[bytes], origin: str = "seed 0") -> str:
    lineage = first_lineage(origin)
    for step, digest in enumerate(history, start=1):
        lineage = next_lineage(lineage, step, digest)
    return lineage


@given(digests, digests)
def test_lineages_are_equal_just_where_the_histories_are(
    one: list[bytes], two: list[bytes]
) -> None:
    assert (lineage_of(one) == lineage_of(two)) == (one == two)


def test_origin_and_step_count() -> None:
    assert lineage_of([], "a") != lineage_of([], "b")
    assert first_lineage("a", 1) != first_lineage("a", 0)
    parent = first_lineage("a")
    assert next_lineage(parent, 1, b"x") != next_lineage(parent, 2, b"x")
