"""``geartrain checkpoint export`` and ``import``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
import msgspec

from geartrain.checkpoint.durable_tier import open_store
from geartrain.cli.checkpoint_place import open_place, open_version
from geartrain.cli.fleet import show_progress
from geartrain.cli.verb import Verb, json_option, print_json
from geartrain.errors import ConfigError
from geartrain.units import format_bytes, parse_bytes

if TYPE_CHECKING:  # they import torch
    from geartrain.checkpoint.difference import StoredVersion
    from geartrain.checkpoint.export import ExportReport

Format = Literal["safetensors", "hf", "dcp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    kind: Format
    output: Path
    component: str
    config: Path | None
    max_shard: str


@click.command("export", cls=Verb)
@click.argument("place", metavar="PLACE[@STEP]")
@click.option(
    "--format",
    "kind",
    type=click.Choice(["safetensors", "hf", "dcp"]),
    default="safetensors",
    show_default=True,
    help="One weights file; a directory as Hugging Face lays models out; or the whole "
    "state for torch.distributed.checkpoint.",
)
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path))
@click.option("--component", default="model", show_default=True)
@click.option(
    "--hf-config",
    type=click.Path(path_type=Path, dir_okay=False),
    help="A config.json to put beside the weights (hf).",
)
@click.option("--max-shard-size", default="5GB", show_default=True, help="Of a file (hf).")
@click.option(
    "--also",
    multiple=True,
    metavar="PLACE",
    help="Where to turn for chunks that are damaged or missing.",
)
@json_option
def export_version(  # noqa: PLR0913, PLR0917 - click hands options over one by one
    place: str,
    kind: Format,
    output: Path,
    component: str,
    hf_config: Path | None,
    max_shard_size: str,
    also: Sequence[str],
    as_json: bool,
) -> None:
    """Write a version in a format that loads without geartrain."""
    if hf_config is not None and kind != "hf":
        msg = f"--hf-config says something of --format hf, not {kind}; leave it out"
        raise ConfigError(msg)
    wanted = _Wanted(
        kind=kind,
        output=output,
        component=component,
        config=hf_config,
        max_shard=max_shard_size,
    )
    store, version = open_version(place)
    others = [open_place(other) for other in also]
    manifest = version.manifest
    show_progress(f"exporting step {manifest.step}, {format_bytes(manifest.num_bytes)}")
    from geartrain.checkpoint.difference import StoredVersion  # noqa: PLC0415 - torch

    stored = StoredVersion(stores=(store, *others), manifest=manifest)
    report = _export(stored, wanted)
    if as_json:
        print_json(msgspec.to_builtins(report) | {"step": manifest.step})
        return
    for name in report.left_out:
        click.echo(f"left out: {name} is no tensor")
    click.echo(
        f"step {manifest.step} written to {report.path}: {report.num_tensors} "
        f"tensors, {format_bytes(report.num_bytes)}"
    )


@click.command("import", cls=Verb)
@click.argument("source", metavar="DIRECTORY", type=click.Path(path_type=Path))
@click.argument("place", metavar="PLACE")
@click.option("--step", type=click.IntRange(min=0), help="Steps applied to the state.")
@json_option
def import_state(source: Path, place: str, step: int | None, as_json: bool) -> None:
    """Take a distributed checkpoint of torch, or a snapshot, in as a version.

    Pickles in it are read as data; nothing in it is run.
    """
    from geartrain.checkpoint.take_in import read_foreign, take_in  # noqa: PLC0415 - torch

    store = open_store(place)
    components, known_step = read_foreign(source)
    applied = known_step if step is None else step
    if applied is None:
        msg = f"{source} does not say how many steps were applied; add --step N"
        raise ConfigError(msg)
    version = take_in(store, components, step=applied)
    facts = {
        "place": store.label,
        "name": version.name,
        "step": applied,
        "components": list(components),
        "num_tensors": len(version.manifest.tensors),
        "num_bytes": version.manifest.num_bytes,
    }
    if as_json:
        print_json(facts)
        return
    click.echo(
        f"step {applied} taken into {store.label}: {', '.join(components)}; "
        f"{len(version.manifest.tensors)} tensors, "
        f"{format_bytes(version.manifest.num_bytes)}"
    )


def _export(version: StoredVersion, wanted: _Wanted) -> ExportReport:
    if wanted.kind == "dcp":
        from geartrain.checkpoint.dcp_bridge import export_dcp  # noqa: PLC0415 - torch

        return export_dcp(version, wanted.output)
    from geartrain.checkpoint import export  # noqa: PLC0415 - torch

    if wanted.kind == "hf":
        return export.export_hf(
            version,
            wanted.output,
            component=wanted.component,
            config=wanted.config,
            max_shard_bytes=parse_bytes(wanted.max_shard),
        )
    return export.export_safetensors(version, wanted.output, component=wanted.component)
