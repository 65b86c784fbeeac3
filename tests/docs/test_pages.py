"""What the pages show is what the files say."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import pytest

from run_command import EXAMPLES, REPOSITORY

HOW_TO = REPOSITORY / "docs" / "how-to"
FLEET_LOOP = "plain_loop_geartrain.py"
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
PAGES = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")])


def diff_lines(old_name: str, num_context_lines: int) -> list[str]:
    old, new = ((EXAMPLES / name).read_text() for name in (old_name, FLEET_LOOP))
    return list(
        difflib.unified_diff(
            old.splitlines(),
            new.splitlines(),
            old_name,
            FLEET_LOOP,
            lineterm="",
            n=num_context_lines,
        )
    )


@pytest.mark.parametrize(
    ("page", "old_name"),
    [("from-plain-pytorch.md", "plain_loop.py"), ("from-ddp.md", "ddp_loop.py")],
)
def test_page_shows_the_real_difference(page: str, old_name: str) -> None:
    shown = (HOW_TO / page).read_text().partition("```diff\n")[2].partition("\n```")[0]

    assert shown == "\n".join(diff_lines(old_name, num_context_lines=2))


def test_plain_loop_needs_five_new_lines() -> None:
    header, changes = 3, diff_lines("plain_loop.py", num_context_lines=0)
    added = [line for line in changes[header:] if line.startswith("+") and line != "+"]

    assert len(added) == 5


def test_readme_shows_lines_of_the_fleet_loop() -> None:
    readme = (REPOSITORY / "README.md").read_text()
    shown = readme.partition("```python\n")[2].partition("```")[0]

    assert shown
    assert shown in (EXAMPLES / FLEET_LOOP).read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_to_files_lead_somewhere(page: Path) -> None:
    targets = [t for t in LINK.findall(page.read_text()) if "://" not in t]

    missing = [target for target in targets if not (page.parent / target).exists()]

    assert not missing
