"""The lines that the page about versions shows work."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from run_command import REPOSITORY

PAGE = REPOSITORY / "docs" / "explanation" / "checkpoints.md"
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)


def objects(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    schedule.step()
    return {"model": model, "optimizer": optimizer, "schedule": schedule}


def test_the_lines_of_the_page_save_and_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    saved, other = objects(seed=1), objects(seed=2)
    weight = saved["model"].weight.detach().clone()

    exec(BLOCKS[0], saved)
    exec(BLOCKS[1], other)

    assert len(BLOCKS) == 2
    assert torch.equal(saved["model"].weight, weight)
    assert torch.equal(other["model"].weight, weight)
