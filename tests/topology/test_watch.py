"""A changed link is noticed within three exchanges; noise is not taken for one."""

import random

import pytest

from geartrain.errors import ConfigError
from geartrain.topology.watch import (
    LinkWatch,
    Observation,
    StageTime,
    observe,
    remeasured,
)


def exchange(rack: float = 1.0, slow_hop: float = 1.0) -> Observation:
    stages = (
        StageTime(
            stage="rack", tier_ids=("h0", "h1"), predicted_s=0.1, observed_s=0.1 * rack
        ),
        StageTime(
            stage="slow_hop",
            tier_ids=("r0", "r1"),
            predicted_s=0.5,
            observed_s=0.5 * slow_hop,
        ),
    )
    return Observation(predicted_s=0.5, observed_s=0.5 * max(rack, slow_hop), stages=stages)


def feed(
    watch: LinkWatch, *exchanges: Observation
) -> tuple[LinkWatch, list[tuple[str, ...]]]:
    suspects = []
    for one in exchanges:
        watch, decision = observe(watch, one)
        suspects.append(decision.suspect_ids)
    return watch, suspects


def test_three_slow_exchanges_name_the_links_of_the_slow_stage() -> None:
    _, suspects = feed(LinkWatch(), *[exchange(slow_hop=4.0)] * 3)
    assert suspects == [(), (), ("r0", "r1")]


def test_two_slow_exchanges_are_not_enough() -> None:
    series = [exchange(slow_hop=4.0), exchange(slow_hop=4.0), exchange()] * 5
    assert not any(feed(LinkWatch(), *series)[1])


def test_a_link_that_became_faster_is_noticed_too() -> None:
    _, suspects = feed(LinkWatch(), *[exchange(slow_hop=0.4)] * 3)
    assert suspects[-1] == ("r0", "r1")


def test_slow_and_fast_in_turn_do_not_add_up() -> None:
    series = [exchange(rack=1.5), exchange(rack=0.5)] * 10
    assert not any(feed(LinkWatch(), *series)[1])


@pytest.mark.parametrize("seed", range(10))
def test_noise_below_the_tolerance_never_triggers(seed: int) -> None:
    noise = random.Random(seed)
    series = [
        exchange(noise.uniform(0.86, 1.14), noise.uniform(0.86, 1.14)) for _ in range(500)
    ]
    assert not any(feed(LinkWatch(), *series)[1])


def test_a_wrong_prediction_is_measured_once_and_then_taken_as_usual() -> None:
    watch, suspects = feed(LinkWatch(), *[exchange(slow_hop=1.4)] * 3)
    assert suspects[-1]
    watch = remeasured(watch, changed=False)
    watch, suspects = feed(watch, *[exchange(slow_hop=1.4)] * 200)
    assert not any(suspects)
    _, suspects = feed(watch, *[exchange(slow_hop=4.0)] * 3)
    assert suspects[-1] == ("r0", "r1")


def test_a_link_that_recovers_is_noticed_after_the_plan_was_renewed() -> None:
    watch, _ = feed(LinkWatch(), *[exchange(slow_hop=4.0)] * 3)
    watch = remeasured(watch, changed=True)
    watch, suspects = feed(watch, *[exchange()] * 10)
    assert not any(suspects)
    _, suspects = feed(watch, *[exchange(slow_hop=0.25)] * 3)
    assert suspects[-1] == ("r0", "r1")


def test_whole_exchanges_without_stages_suspect_all_their_links() -> None:
    one = Observation(predicted_s=1.0, observed_s=1.3, tier_ids=("h0", "r0"))
    _, suspects = feed(LinkWatch(), one, one, one)
    assert suspects[-1] == ("h0", "r0")


def test_a_prediction_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="prediction > 0"):
        StageTime(stage="rack", tier_ids=(), predicted_s=0.0, observed_s=1.0)
