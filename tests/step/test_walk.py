"""A packed micro-batch passes few files, which `docs/architecture.md` names in order; so do its parts."""

from __future__ import annotations

import re
import sys
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import captured_material
import pytest
from transformers import TrainerCallback

import fastpack_trl
from fastpack_trl import FastSFTTrainer

PACKAGE = Path(fastpack_trl.__file__).parent
ARCHITECTURE = (Path(__file__).parents[2] / "docs/architecture.md").read_text(encoding="utf-8")


@cache
def file_of(name: str) -> str:
    path = Path(name)
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else ""


class Walk(TrainerCallback):
    """Notes, while the run is prepared and in step `number`, which files call which.

    Attributes:
        nested: by the name of a function, the files that are open when it is called, outermost first, from the loader
            or `training_step` on.
        inside: by the name of a function of `INSIDE`, the files that it calls into, in the order of their first calls.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.nested: dict[str, list[str]] = {}
        self.inside: dict[str, dict[str, None]] = {name: {} for name, _ in INSIDE}
        self._open: dict[str, FrameType] = {}
        self._in_step = False

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step < self.number:
            sys.setprofile(None)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.number:  # the loader's next row is part of the walk
            self._in_step = True
            sys.setprofile(self.note)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        sys.setprofile(None)

    def note(self, frame: FrameType, event: str, arg: Any) -> None:
        name, file = frame.f_code.co_name, file_of(frame.f_code.co_filename)
        if event == "return" and self._open.get(name) is frame:
            del self._open[name]
        if not file or event != "call":
            return
        if (name, file) in INSIDE and self._in_step == (name == "forward"):
            self._open.setdefault(name, frame)
        for opened in self._open:
            self.inside[opened].setdefault(file)
        files, outer = list[str](), frame
        while self._in_step and outer is not None and name not in self.nested:
            if outside := file_of(outer.f_code.co_filename):
                files.append(outside)
                if outer.f_code.co_name in ("training_step", "torch_call"):
                    self.nested[name] = [*dict.fromkeys(files[::-1])]
            outer = outer.f_back  # type: ignore[assignment]


INSIDE = {("forward", "lora/linear.py"), ("plan_memory", "features/activation_memory.py")}


def walked(folder: Path, number: int = 1, **options: Any) -> Walk:
    """Train a few steps with adapters, noting the preparation and step `number`."""
    noted = Walk(number)
    options = {"per_device_train_batch_size": 1, "max_steps": number + 1, "callbacks": [noted], **options}
    with captured_material.capturing() as devices:
        trainer = captured_material.build(FastSFTTrainer, folder, devices, lora=True, **options)
        try:
            sys.setprofile(noted.note)
            trainer.train()
        finally:
            sys.setprofile(None)
    return noted


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    fast = {"packed_attention": "per_document", "cuda_graph": "off", "activation_memory_gib": 1.0}
    return walked(tmp_path_factory.mktemp("walk"), fast=fast, gradient_checkpointing=True)


def named(walk: str) -> list[str]:
    """Return the files that the page names for a walk, in order."""
    (line,) = re.findall(rf"^- {walk}: (.*)$", ARCHITECTURE, re.MULTILINE)
    return re.findall(r"`([^`]+)`", line)


def test_a_micro_batch_passes_nine_files_from_the_loader_to_the_attention_call(walk: Walk) -> None:
    stops = [*walk.nested["torch_call"], "packing/packed_inputs.py", *walk.nested["attend"]]
    assert stops[-1] == "attention/per_document.py"
    assert len(set(stops)) <= 9, stops
    assert named("attention call") == stops


def test_the_head_takes_six_files(walk: Walk) -> None:
    assert named("loss head") == walk.nested["head_loss"]
    assert walk.nested["head_loss"][-1] == "step/head.py"
    assert len(walk.nested["head_loss"]) <= 6


@pytest.mark.parametrize(
    ("name", "function", "rooms"),
    [("LoRA layer", "forward", ""), ("activation plan", "plan_memory", ("checkpointing/", "run/", "measure/"))],
)
def test_a_lora_layer_and_a_plan_take_seven_files(walk: Walk, name: str, function: str, rooms: Any) -> None:
    """A plan may try the layers themselves, whose files are not its own."""
    files = [file for file in walk.inside[function] if file.startswith(rooms)]
    assert named(name) == files, files
    assert 2 <= len(files) <= 7


def test_a_captured_step_takes_six_files_to_the_replay(tmp_path: Path) -> None:
    stops = walked(tmp_path, 6).nested["replay"]
    assert named("captured step") == stops
    assert stops[-1] == "capture/slot.py"
    assert len(stops) <= 6
