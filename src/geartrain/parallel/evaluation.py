"""Exact metrics over uneven shares: sums and counts, each sample once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from geartrain.data.batch_split import batch_size_of, slice_batch
from geartrain.data.loader import ShareLoader
from geartrain.errors import ConfigError
from geartrain.parallel.loss_terms import Count
from geartrain.parallel.micro_batches import split_share

if TYPE_CHECKING:
    from geartrain.parallel.process_group import RankGroups
    from geartrain.parallel.trainer import Trainer

MetricFunction = Callable[[Any, Any], Mapping[str, tuple[Any, Count]]]
"""``metric_fn(output, batch)`` returns names and pairs (sum, count)."""

_MOST_SAMPLES_AT_ONCE = 32
"""Without a plan yet, a forward pass without gradients takes at most these."""


@torch.no_grad()
def evaluate(
    trainer: Trainer, loader: ShareLoader, metric_fn: MetricFunction
) -> dict[str, float]:
    """Average metrics over a loader's dataset; see ``Session.evaluate``.

    Raises:
        ConfigError: If metric_fn returns something else than pairs (sum, count).
    """
    given: object = loader
    if not isinstance(given, ShareLoader):
        msg = (
            f"evaluate() got a {type(given).__name__}, of which every device would see "
            "all samples; give it a loader from session.setup_dataloader(...)"
        )
        raise ConfigError(msg)
    return trainer.together(lambda: _evaluate(trainer, loader, metric_fn))


def _evaluate(
    trainer: Trainer, loader: ShareLoader, metric_fn: MetricFunction
) -> dict[str, float]:
    totals: dict[str, list[float]] = {}
    were_training = [(module, module.training) for module in trainer.model.modules()]
    trainer.sync_buffers()
    trainer.model.eval()
    trainer.is_evaluating = True
    try:
        for share in loader.evaluation_pass():
            _add_share(trainer, share, metric_fn, totals)
    finally:
        trainer.is_evaluating = False
        for module, was_training in were_training:  # a part may be kept in eval mode
            module.training = was_training
    return _means(_gather(trainer.place.groups, totals))


def reduce_metric(groups: RankGroups, value_sum: float, count: float) -> float:
    """Mean of a value over all ranks, from each one's sum and count.

    Raises:
        ConfigError: If the counts add up to 0.
    """
    own = {"value": [float(value_sum), float(count)]}
    return _means(_gather(groups, own))["value"]


def _gather(
    groups: RankGroups, totals: dict[str, list[float]]
) -> list[dict[str, list[float]]]:
    """Collect all ranks' sums and counts; as text, since JSON has no nan."""
    texts = {name: [repr(number) for number in pair] for name, pair in totals.items()}
    gathered = groups.rendezvous.gather("metrics", texts, dict[str, list[str]])
    return [
        {name: [float(text) for text in pair] for name, pair in part.items()}
        for part in gathered
    ]


def _add_share(
    trainer: Trainer,
    share: Any,  # the user's batch
    metric_fn: MetricFunction,
    totals: dict[str, list[float]],
) -> None:
    size = trainer.evaluation_micro_batch_size() or _MOST_SAMPLES_AT_ONCE
    for start, stop in split_share(batch_size_of(share), size):
        part = slice_batch(share, start, stop)
        with trainer.calls.autocast():
            metrics = metric_fn(trainer.calls.forward(part), part)
        for name, pair in _check_metrics(metrics).items():
            total = totals.setdefault(name, [0.0, 0.0])
            total[0] += float(pair[0])
            total[1] += float(pair[1])


def _check_metrics(metrics: object) -> Mapping[str, tuple[Any, Count]]:
    seen = type(metrics).__name__
    if isinstance(metrics, Mapping):
        strange = [
            f"{name!r} as {type(pair).__name__}"
            for name, pair in metrics.items()
            if not (isinstance(pair, tuple) and len(pair) == 2)  # noqa: PLR2004 - a pair
        ]
        if not strange:
            return metrics
        seen = ", ".join(strange)
    msg = (
        f"metric_fn returned {seen}; expected a mapping of names to "
        "pairs (sum, count), such as {'accuracy': (num_right, num_samples)}"
    )
    raise ConfigError(msg)


def _means(parts: list[dict[str, list[float]]]) -> dict[str, float]:
    names = sorted({name for part in parts for name in part})
    means = {}
    for name in names:
        sums = [part[name] for part in parts if name in part]
        count = sum(count for _, count in sums)
        if count == 0:
            msg = f"metric {name!r} has count 0 over all devices; nothing was evaluated"
            raise ConfigError(msg)
        means[name] = sum(value for value, _ in sums) / count
    return means
