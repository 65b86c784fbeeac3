"""``geartrain checkpoint``: look at, check, prune, compare and export versions."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import click
import msgspec

from geartrain.checkpoint.chunks import OBJECTS, ObjectStore, object_name
from geartrain.checkpoint.collect_garbage import MIN_AGE_S
from geartrain.checkpoint.prune import PruneReport, prune_store
from geartrain.checkpoint.retention import RetentionPolicy
from geartrain.checkpoint.verify import Damage, VerifyReport, verify_store
from geartrain.checkpoint.versions import Version, list_versions, read_version
from geartrain.cli.checkpoint_diff import diff
from geartrain.cli.checkpoint_export import export_version, import_state
from geartrain.cli.checkpoint_place import Progress, open_place
from geartrain.cli.tables import print_table
from geartrain.cli.verb import Verb, json_option, print_json
from geartrain.errors import CheckpointError
from geartrain.units import format_bytes

_MANY_RANGES = 3


@click.group()
def checkpoint() -> None:
    """List, verify, export, prune and compare saved versions.

    PLACE is a directory, or a URL that fsspec knows: s3://bucket/run. PLACE@STEP names
    the version of a step where one is wanted, the latest one otherwise.
    """


@checkpoint.command("list", cls=Verb)
@click.argument("place", metavar="PLACE")
@json_option
def list_verb(place: str, as_json: bool) -> None:
    """List the versions in a store, and whether all their chunks are there."""
    store = open_place(place)
    sizes = {found.name: found.num_bytes for found in store.list_objects(OBJECTS)}
    versions, damaged = _read_versions(store)
    latest = store.read_pointer()
    rows = [_facts(version, sizes, latest) for version in versions]
    if as_json:
        print_json(
            {
                "place": store.label,
                "latest": latest,
                "stored_bytes": sum(sizes.values()),
                "versions": rows,
                "damaged": damaged,
            }
        )
        return
    head = ("step", "kind", "saved at", "state", "", "history", "tensors", "size", "chunks")
    print_table(head, map(_show_row, rows), num_text_columns=6)
    for name, problem in damaged.items():
        click.echo(f"damaged: {name}: {problem}")
    click.echo(f"{store.label} holds {format_bytes(sum(sizes.values()))} in chunks")


@checkpoint.command(cls=Verb)
@click.argument("place", metavar="PLACE")
@click.option(
    "--repair",
    "repair_from",
    metavar="FROM",
    multiple=True,
    help="Another place that holds the same versions; undamaged copies are taken from "
    "there. May be given several times.",
)
@json_option
@click.pass_context
def verify(
    context: click.Context, place: str, repair_from: Sequence[str], as_json: bool
) -> None:
    """Read every byte of a store and name what is damaged; ends with 1 if anything is."""
    store = open_place(place)
    others = [open_place(other) for other in repair_from]
    report = verify_store(store, repair_from=others, on_progress=Progress("chunks read"))
    if as_json:
        print_json(
            msgspec.to_builtins(report)
            | {"place": store.label, "is_sound": report.is_sound}
        )
    else:
        _print_report(store, report)
    if not report.is_sound:
        context.exit(1)


@checkpoint.command(cls=Verb)
@click.argument("place", metavar="PLACE")
@click.option("--keep-last", default=3, show_default=True, help="Of each kind.")
@click.option(
    "--keep-every", type=int, metavar="STEPS", help="Also keep multiples of this step."
)
@click.option(
    "--min-age",
    default=MIN_AGE_S,
    show_default=True,
    metavar="SECONDS",
    help="Younger chunks stay: they may belong to a version in the making.",
)
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@json_option
def prune(  # noqa: PLR0913, PLR0917 - click hands options over one by one
    place: str,
    keep_last: int,
    keep_every: int | None,
    min_age: float,
    dry_run: bool,
    as_json: bool,
) -> None:
    """Remove old versions, and the chunks that no version left needs."""
    policy = RetentionPolicy(keep_last=keep_last, keep_every_steps=keep_every)
    store = open_place(place)
    report = prune_store(store, policy, dry_run=dry_run, min_age_s=min_age)
    if as_json:
        print_json(msgspec.to_builtins(report) | {"place": store.label})
    else:
        _print_pruned(report)


checkpoint.add_command(export_version)
checkpoint.add_command(import_state)
checkpoint.add_command(diff)


def _read_versions(store: ObjectStore) -> tuple[list[Version], dict[str, str]]:
    versions, damaged = [], {}
    for name in list_versions(store):
        try:
            versions.append(read_version((store,), name))
        except CheckpointError as error:
            damaged[name] = str(error)
    versions.sort(key=lambda one: (one.manifest.created_at_s, one.manifest.step))
    return versions, damaged


def _facts(
    version: Version, sizes: dict[str, int], latest: str | None
) -> dict[str, Any]:  # Any: JSON
    manifest = version.manifest
    num_missing = sum(
        sizes.get(object_name(chunk_id)) != facts.num_bytes
        for chunk_id, facts in manifest.chunks.items()
    )
    return {
        "name": version.name,
        "step": manifest.step,
        "kind": manifest.kind,
        "created_at_s": manifest.created_at_s,
        "lineage": manifest.lineage,
        "num_tensors": len(manifest.tensors),
        "num_bytes": manifest.num_bytes,
        "num_chunks": len(manifest.chunks),
        "num_missing_chunks": num_missing,
        "is_latest": version.name == latest,
    }


def _show_row(row: dict[str, Any]) -> tuple[str, ...]:  # Any: see _facts
    saved_at = datetime.fromtimestamp(row["created_at_s"], UTC)
    missing = row["num_missing_chunks"]
    return (
        str(row["step"]),
        row["kind"],
        f"{saved_at:%Y-%m-%d %H:%M:%S} UTC",
        f"{missing} chunks missing" if missing else "whole",
        "latest" if row["is_latest"] else "",
        row["lineage"][:12],
        str(row["num_tensors"]),
        format_bytes(row["num_bytes"]),
        str(row["num_chunks"]),
    )


def _print_report(store: ObjectStore, report: VerifyReport) -> None:
    for damage in report.damages:
        click.echo(_describe(damage))
    read = f"{report.num_chunks} chunks, {format_bytes(report.num_bytes)}"
    num_left = sum(not damage.is_repaired for damage in report.damages)
    num_repaired = len(report.damages) - num_left
    found = f"{num_left} damaged" if num_left else "all as it was saved"
    if num_repaired:
        found += f", {num_repaired} repaired"
    click.echo(f"{store.label}: {report.num_versions} versions, {read}: {found}")
    if num_left:
        click.echo("give another place that holds them: --repair PLACE")


def _describe(damage: Damage) -> str:
    word = "repaired" if damage.is_repaired else "damaged"
    line = f"{word}: {damage.name}: {damage.problem}"
    if damage.ranges:
        shown = ", ".join(map(str, damage.ranges[:_MANY_RANGES]))
        rest = len(damage.ranges) - _MANY_RANGES
        line += f"; holds {shown}" + (f" and {rest} more" if rest > 0 else "")
    if damage.versions:
        line += f"; needed by {', '.join(damage.versions)}"
    return line


def _print_pruned(report: PruneReport) -> None:
    for name in report.retention.kept:
        click.echo(f"kept     {name}  ({report.retention.reasons[name]})")
    verb = "would go" if report.was_dry_run else "removed "
    for name in report.retention.dropped:
        click.echo(f"{verb} {name}")
    would = "would free" if report.was_dry_run else "freed"
    click.echo(f"{would} {format_bytes(report.num_bytes)} in {report.num_objects} chunks")
    if report.num_young:
        click.echo(
            f"{report.num_young} chunks that nobody needs are younger than --min-age and "
            "go with a later prune"
        )
