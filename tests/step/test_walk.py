"""A packed micro-batch passes few files, which `docs/architecture.md` names in order."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from peft import LoraConfig
from trainer_material import build
from transformers import TrainerCallback

import fastpack_trl
from fastpack_trl import FastSFTTrainer

PACKAGE = Path(fastpack_trl.__file__).parent
ARCHITECTURE = (Path(__file__).parents[2] / "docs/architecture.md").read_text(encoding="utf-8")


def file_of(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else ""


class Walk(TrainerCallback):
    """Notes, in the second step, the files that are open one inside of another when a function is called.

    Attributes:
        nested: files by the name of the function, outermost first, from the loader or `training_step` on.
        inside: files that a LoRA layer calls into.
    """

    def __init__(self) -> None:
        self.nested: dict[str, list[str]] = {}
        self.inside: set[str] = set()
        self._layer: FrameType | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        sys.setprofile(self._note if state.global_step == 1 else None)

    def _note(self, frame: FrameType, event: str, arg: Any) -> None:
        name, file = frame.f_code.co_name, file_of(frame)
        if frame is self._layer and event == "return":
            self._layer = None
        if not file or event != "call":
            return
        if (name, file) == ("forward", "lora/linear.py"):
            self._layer = frame
        if self._layer is not None:
            self.inside.add(file)
        opened, outer = list[str](), frame
        while outer is not None and name not in self.nested:
            if outside := file_of(outer):
                opened.append(outside)
                if outer.f_code.co_name in ("training_step", "torch_call"):
                    self.nested[name] = [*dict.fromkeys(opened[::-1])]
            outer = outer.f_back  # type: ignore[assignment]


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    noted, lora = Walk(), LoraConfig(r=4, target_modules="all-linear")
    given = {"callbacks": [noted], "peft_config": lora}
    options = {"packing": True, "max_steps": 2, "eval_strategy": "no", "per_device_train_batch_size": 1}
    try:
        build(FastSFTTrainer, tmp_path_factory.mktemp("walk"), fast={}, trainer=given, **options).train()
    finally:
        sys.setprofile(None)
    return noted


def test_a_micro_batch_passes_nine_files_from_the_loader_to_the_attention_call(walk: Walk) -> None:
    stops = [*walk.nested["torch_call"], "packing/packed_inputs.py", *walk.nested["attend"]]
    assert stops[2] == "trainer.py"
    assert stops[-1] == "attention/per_document.py"
    assert len(set(stops)) <= 9, stops
    places = [ARCHITECTURE.find(stop.rpartition("/")[2]) for stop in stops]
    assert min(places) > 0
    assert places == sorted(places), "the page names them in this order"


def test_the_head_and_a_lora_layer_take_six_files(walk: Walk) -> None:
    assert walk.nested["head_loss"][-1] == "step/head.py"
    assert len(walk.nested["head_loss"]) <= 6, walk.nested["head_loss"]
    assert "lora/projection.py" in walk.inside
    assert len(walk.inside) <= 6, walk.inside
