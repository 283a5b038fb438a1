"""docs/architecture.md, troubleshooting.md, hardware.md, models.md, cli.md and contributing/ are true."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import hardware_doc
import pytest
import torch
from pages import ROOT
from reasons import everywhere, given
from trainer_material import assert_same_log, train
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.config import Settings
from fastpack_trl.features import FEATURES, Feature
from fastpack_trl.recipe.gpus import GPUS
from fastpack_trl.trainers import featured as wiring

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


TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
REASONS = re.findall(r"^- (`.+?`): (.+)$", TROUBLES, re.MULTILINE)
COMMONEST = re.findall(r"^1\. `(.+?)`: ", TROUBLES, re.MULTILINE)

NO_REASONS = {
    "not run", "asked for", "proof of stock", "split again", "a parameter",  # paths, and parts of a sentence
    "truncated tokens", "padded tokens per token",
    "up to ...", "unknown (streamed or prepared elsewhere)",
}  # fmt: skip
"""Sentences of those functions that are no fallback."""


STATES_ITS_FIX = re.compile(r"[:;,] (set|load|give|start|train|call|remove|pip install) |would be fast|='on' \w+s$")


def pattern(text: str) -> re.Pattern[str]:
    """Return what matches a reason as printed, its ``...`` filled in."""
    return re.compile(re.escape(text).replace(r"\.\.\.", ".+"))


def is_common(text: str) -> bool:
    """Whether a reason is one of the ten lines at the top of the page."""
    return len(text) > 12 and any(pattern(text).search(line) for line in COMMONEST)


def listed() -> list[str]:
    return [reason for cell, _ in REASONS for reason in re.findall(r"`([^`]+)`", cell)]


def test_every_reason_of_the_code_is_on_the_page() -> None:
    missing = {text: where for text, where in given().items() if text not in {*listed(), *NO_REASONS}}
    missing = {text: where for text, where in missing.items() if not (STATES_ITS_FIX.search(text) or is_common(text))}
    assert not missing, "say in docs/troubleshooting.md why, and what to do"


def test_every_line_of_the_page_is_still_said_by_the_code() -> None:
    said = everywhere()
    assert len(listed()) > 100
    assert not [reason for reason in listed() if reason not in said]
    assert set(given()) >= NO_REASONS


def test_every_feature_has_its_section_and_every_row_a_remedy() -> None:
    sections = set(re.findall(r"^## (\w+)$", TROUBLES, re.MULTILINE))
    features = {feature.install.__name__ for feature in FEATURES if feature.falls_back}
    assert sections == features | {"fastpack", "batches", "packed_attention", "verify_packing"}
    assert all(len(remedy.split()) >= 2 for _, remedy in REASONS)
    assert len(REASONS) == sum(line.startswith("- `") for line in TROUBLES.splitlines())


def test_the_ten_commonest_lines_are_printed_by_the_code() -> None:
    assert len(COMMONEST) == 10
    reasons = [text for text in given() if len(text) > 12]
    assert not [line for line in COMMONEST if not any(pattern(text).search(line) for text in reasons)]


@pytest.mark.parametrize(
    "table",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in ("rows", "doctor"))) for name in hardware_doc.PAGES],
)
def test_tables_are_what_the_rules_of_the_features_say(table: str) -> None:
    text = (hardware_doc.DOCS / hardware_doc.PAGES[table]).read_text(encoding="utf-8")
    assert hardware_doc.page_with(table, text) == text, f"run: python {hardware_doc.__file__} {table}"


def test_every_gpu_that_doctor_knows_has_a_column() -> None:
    assert sum(map(len, hardware_doc.kinds().values())) == len(GPUS)
    head = re.search(r".*\| feature \|.*", (hardware_doc.DOCS / "hardware.md").read_text(encoding="utf-8"))
    assert head
    assert all(name in head[0] for name in GPUS)


@pytest.fixture
def deterministic(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the feature of the guide, in the list of features."""
    guide = ROOT / "docs" / "contributing" / "adding-a-feature.md"
    (source,) = re.findall(r"```python\n(.*?)```", guide.read_text(encoding="utf-8"), re.DOTALL)
    module = ModuleType("fastpack_trl.step.deterministic")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source, str(guide), "exec"), vars(module))
    monkeypatch.setattr(Settings, "deterministic", "auto", raising=False)
    monkeypatch.setattr(wiring, "FEATURES", (*FEATURES, Feature(module.deterministic, "any")))
    return module.deterministic


def test_the_feature_of_the_guide_trains_as_stock_and_leaves_nothing(tmp_path: Path, deterministic: Any) -> None:
    seen = []
    options: dict[str, Any] = {"packing": True, "max_steps": 3}
    stock = train(SFTTrainer, tmp_path / "stock", **options)

    class Watched(FastSFTTrainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            seen.append(torch.are_deterministic_algorithms_enabled())
            return super().training_step(*args, **kwargs)

    ours = train(Watched, tmp_path / "ours", **options)
    assert_same_log(ours, stock, rtol=2e-5, atol=1e-5)
    line = ours.fastpack_report[deterministic.__name__]
    assert (line.status, line.path, line.reason) == ("on", "torch", "on cpu; slower")
    assert seen == [True] * 3
    assert not torch.are_deterministic_algorithms_enabled()
