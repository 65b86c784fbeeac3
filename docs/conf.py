"""Sphinx configuration; every warning is an error in ``make docs``."""

from __future__ import annotations

import sys
from pathlib import Path

import geartrain

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
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Source"]
# No inventory of another project is fetched, so that the build needs no network.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|numpy|np|collections|pathlib|typing|types|os)\..*"),
    (
        "py:.*",
        r"(Path|Tensor|Module|Optimizer|Callable|Mapping|Sequence|Iterator|Literal.*)",
    ),
]
