"""``geartrain checkpoint diff``."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import click
import msgspec

from geartrain.cli.checkpoint_place import Progress, open_version
from geartrain.cli.tables import print_table
from geartrain.cli.verb import Verb, json_option, print_json

if TYPE_CHECKING:  # it imports torch
    from geartrain.checkpoint.difference import StateDifference, TensorDifference


@click.command(cls=Verb)
@click.argument("first", metavar="A[@STEP]")
@click.argument("second", metavar="B[@STEP]")
@json_option
def diff(first: str, second: str, as_json: bool) -> None:
    """Compare two versions: tensors by value and byte, settings by name."""
    from geartrain.checkpoint.difference import (  # noqa: PLC0415 - torch
        StoredVersion,
        compare_versions,
    )

    sides = []
    for place in (first, second):
        store, version = open_version(place)
        sides.append(StoredVersion(stores=(store,), manifest=version.manifest))
    found = compare_versions(sides[0], sides[1], on_progress=Progress("tensors compared"))
    if as_json:
        print_json(_to_json(found))
    else:
        steps = sides[0].manifest.step, sides[1].manifest.step
        _print(found)
        _print_history(found, steps)


def _to_json(found: StateDifference) -> dict[str, Any]:  # Any: JSON
    document: dict[str, Any] = msgspec.to_builtins(found)
    for row in document["tensors"]:
        value = row["max_abs_difference"]
        if value is not None and not math.isfinite(value):
            row["max_abs_difference"] = str(value)  # JSON has no such numbers
    return document | {
        "is_equal": found.is_equal,
        "has_same_history": found.has_same_history,
    }


def _print(found: StateDifference) -> None:
    if found.tensors:
        head = ("tensor", "differs in", "max |a - b|", "changed bytes")
        print_table(head, map(_row, found.tensors), num_text_columns=2)
    for title, drifts in (("config", found.config), ("value", found.values)):
        for drift in drifts:
            click.echo(f"{title} {drift}")
    num_differing = len(found.tensors)
    click.echo(f"{num_differing} tensors differ, {found.num_equal} are equal")


def _print_history(found: StateDifference, steps: tuple[int, int]) -> None:
    first, second = (lineage[:12] for lineage in found.lineages)
    if found.has_same_history:
        what = "" if found.is_equal else ", so one of them was changed afterwards"
        click.echo(f"the same steps led to both (history {first}){what}")
    elif steps[0] == steps[1] and first and second:
        click.echo(
            f"both are of step {steps[0]}, by different histories: {first}, {second}"
        )


def _row(tensor: TensorDifference) -> tuple[str, ...]:
    largest = tensor.max_abs_difference
    if largest is None:
        return (tensor.name, tensor.what, "", "")
    changed = f"{tensor.changed_bytes} of {tensor.num_bytes}"
    return (tensor.name, tensor.what, f"{largest:.3g}", changed)
