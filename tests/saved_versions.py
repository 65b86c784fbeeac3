"""Small states, and versions of them in a store."""

import torch

from geartrain.checkpoint.chunks import ObjectStore
from geartrain.checkpoint.manifest import StateManifest
from geartrain.checkpoint.pieces import StateFacts, assemble_manifest, store_pieces
from geartrain.checkpoint.state_tensors import held_pieces, take_apart
from geartrain.checkpoint.versions import publish_version


def trained_components(seed: int = 0) -> dict[str, object]:
    """A model and an AdamW that has made one step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def save_version(
    store: ObjectStore,
    components: dict[str, object],
    *,
    step: int = 1,
    kind: str = "full",
    config: dict[str, object] | None = None,
    lineage: str | None = None,
) -> str:
    """Write a version, made at second ``step``.

    Returns:
        Its name.
    """
    return publish_version(
        store, stored_manifest(store, components, step, kind, config, lineage)
    )


def stored_manifest(
    store: ObjectStore,
    components: dict[str, object],
    step: int = 1,
    kind: str = "full",
    config: dict[str, object] | None = None,
    lineage: str | None = None,
) -> StateManifest:
    """Write the chunks of a version, and return what would be published."""
    named = take_apart(components)
    part = store_pieces(store, named.facts, held_pieces(named.tensors))
    facts = StateFacts(
        step=step,
        lineage=f"lineage-{step}" if lineage is None else lineage,
        created_at_s=float(step),
        tensors=named.facts,
        kind=kind,  # type: ignore[arg-type]  # a Literal
        structure=named.structure,
        extras={"sample_index": 10 * step},
        config=config or {},
    )
    return assemble_manifest(facts, [part])
