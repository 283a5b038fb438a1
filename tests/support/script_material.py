"""Scripts run in a folder of their own, as they are and with their import of the trainer changed."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from side_by_side import assert_equal

STOCK = "from trl import SFTConfig, SFTTrainer\n"
OURS = "from trl import SFTConfig\nfrom fastpack_trl import FastSFTTrainer as SFTTrainer\n"

FP32 = 1e-5
BF16 = 2**-7  # eight bits of mantissa, and a product over other rows


def with_ours(source: str) -> str:
    """Return the script with its one import of the trainer changed."""
    assert source.count(STOCK) == 1
    return source.replace(STOCK, OURS)


def run(source: str, folder: Path, material: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a script in a folder of its own that names what is in `material`; return the trainer it leaves behind."""
    folder.mkdir()
    for path in material.iterdir():
        (folder / path.name).symlink_to(path)
    script = folder / "train.py"
    script.write_text(source, encoding="utf-8")
    torch.manual_seed(0)  # of adapters that a script makes before its trainer
    with monkeypatch.context() as patch:
        patch.chdir(folder)
        return runpy.run_path(str(script), run_name="__main__")["trainer"]


def files(folder: Path) -> list[str]:
    """Return the paths that the script has written."""
    return sorted(str(path.relative_to(folder)) for path in (folder / "out").rglob("*"))


def assert_same_figures(ours: list[dict[str, float]], stock: list[dict[str, float]], rtol: float) -> None:
    """Check the logs of two runs, row by row."""
    assert len(ours) >= 4
    assert_equal(ours, stock, rtol, rtol / 5)
