"""docs/architecture.md says which files one reads to understand a part, and no part needs many."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fastpack_trl"

TOPICS = {
    "loss head": ("step/step_loss.py", 6),
    "FP8 base": ("lora/frozen_base.py", 5),
    "capture": ("capture/graphs.py", 6),
    "capture of preference steps": ("capture/rows.py", 6),
    "activation plan": ("checkpointing/activation_memory.py", 6),
}
"""Part -> the file where it begins, and the most files that one has to read. The aim is 6."""


def imported(path: Path) -> set[Path]:
    """Return the files of the package that a file imports, at its top or in a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fastpack_trl."):
            for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                found.add(ROOT / f"{str(name).replace('.', '/')}.py")
    return {file for file in found if file.is_file()}


def files_to_read(entry: str) -> list[str]:
    """Return the files that `entry` needs, in turn, of its own room and of the kernels.

    What other rooms do is read in their docstrings, and what a Triton kernel computes in its torch twin.
    """
    rooms = {entry.partition("/")[0], "kernels"}
    ahead, needed = [PACKAGE / entry], {entry}
    while ahead:
        for file in imported(ahead.pop()):
            name = file.relative_to(PACKAGE).as_posix()
            if name.partition("/")[0] in rooms and not file.stem.endswith("_triton") and name not in needed:
                needed.add(name)
                ahead.append(file)
    return sorted(needed)


@pytest.mark.parametrize("topic", TOPICS)
def test_the_page_lists_the_files_to_read(topic: str) -> None:
    entry, most = TOPICS[topic]
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| {topic} \| (.*) \|$", page, re.MULTILINE)
    needed = files_to_read(entry)
    assert row is not None
    assert sorted(re.findall(r"`([^`]+)`", row[1])) == needed, f"it should list {', '.join(f'`{n}`' for n in needed)}"
    assert len(needed) <= most
