"""What all tests share: the path of helpers, hypothesis profiles, and the root marker."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# Last, so that a room's folder of tests never shadows an installed package.
sys.path.append(str(Path(__file__).parent))

settings.register_profile("local", deadline=None, max_examples=25)
settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.geteuid() == 0:
        return
    skip = pytest.mark.skip(reason="needs root: it makes cgroups or namespaces")
    for item in items:
        if item.get_closest_marker("root") is not None:
            item.add_marker(skip)
