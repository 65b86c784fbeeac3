"""Sphinx configuration; every warning is an error in ``make docs``."""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.application import Sphinx

import geartrain
import geartrain.parallel.session_facts
import geartrain.session
from geartrain.data.fetch import CollateFn, MapDataset
from geartrain.data.loader import ShareLoader
from geartrain.planner import Plan

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "geartrain"
author = "the geartrain authors"
release = geartrain.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "click_help",
]
html_theme = "furo"
html_title = f"geartrain {release}"
exclude_patterns = ["_build"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
# These modules import names for type checkers only; autodoc looks them up.
vars(geartrain.parallel.session_facts).update(Plan=Plan)
vars(geartrain.session).update(
    CollateFn=CollateFn, MapDataset=MapDataset, Plan=Plan, ShareLoader=ShareLoader
)
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Source"]
# No inventory of another project is fetched, so that the build needs no network.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|numpy|np|collections|pathlib|typing|types|os)\..*"),
    ("py:.*", r"geartrain\.session\.OptimizerT"),  # a type variable
    ("py:.*", r"(Path|Tensor|Module|Optimizer|Callable|Mapping|Sequence|Iterator)"),
    ("py:.*", r"(geartrain\.topology\.fabric\.facts\.)?FabricFacts"),  # many small parts
    ("py:.*", r"geartrain\.data\.(loader\.LoaderConfig|sampler\.ShareView)"),  # internal
    ("py:class", r"geartrain\.checkpoint\.agent\.(recovery|messages)\..*"),  # internal
    ("py:class", r"(finish|shrink|stop|continue)"),  # values of a Literal with a docstring
    # Sphinx cuts a signature that holds "<factory>" at every comma.
    ("py:.*", r"(dict|tuple|list)\[\w+"),
]


def keep_colon(
    _app: Sphinx, what: str, _name: str, _obj: object, _options: object, lines: list[str]
) -> None:
    """Hide the colon from napoleon, which reads "a: b" as "type: text"."""
    if what in {"attribute", "property"}:
        lines.insert(0, "\\")  # an escaped line end: shown as nothing


def setup(app: Sphinx) -> None:
    """Run before napoleon, whose priority is 500."""
    app.connect("autodoc-process-docstring", keep_colon, priority=400)
