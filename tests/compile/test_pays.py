"""Layers are compiled where the steps that are left can pay for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from compile_material import Counting, compile_with, compiled, make, one_step, row
from feature_material import without_reasons
from trainer_material import build, train
from transformers import TrainerCallback

from benchmarks.models import quantize
from fastpack_trl import FastSFTTrainer
from fastpack_trl.compile import kind as kinds
from fastpack_trl.measure.payback import StepsLeft
from fastpack_trl.moe.quantized import quantize_experts

AUTO = {"layer_compile": "auto", "fused_layers": "off"}
OPTIONS: dict[str, Any] = {"family": "llama", "packing": True, "gradient_checkpointing": False, "eval_strategy": "no"}


@pytest.mark.parametrize("wide", [False, True], ids=["launches", "matmuls"])
def test_long_runs_are_compiled_short_ones_told_when_it_would_pay(wide: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a step count; so does the size of a layer, where its matmuls take longer than their launches."""
    if wide:
        monkeypatch.setattr(kinds, "FLOPS_PER_SECOND", 1e8)

    def run(left: StepsLeft | None, longest: int = 20) -> Any:
        backend, model = Counting(), make("llama")
        with compiled(model, backend, left=None if left is None else lambda: left) as layers:
            for seed in range(2):
                one_step(model, *row(seed, longest=longest))
        assert (backend.graphs, layers.path, layers.unpaid) in ((1, "compiled", False), (0, "eager", True))
        return layers

    def least(longest: int) -> int:
        short = run(StepsLeft(1, 1), longest)
        (steps,) = re.findall(r"x 2 not compiled: 1 steps left, it pays off from ([\d,]+) on", short.reason)
        return int(steps.replace(",", ""))

    enough = least(20)
    assert (enough < 4000) == wide
    assert (least(60) < enough / 2) == wide
    assert run(StepsLeft(enough - 2, 1)).unpaid
    assert run(StepsLeft(enough + 2, 1)).path == "compiled"
    assert run(StepsLeft(enough // 4 + 2, 4)).path == "compiled"
    without = run(None)
    assert 0 < without.kinds[0].seconds < 60


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_weights_in_4_bits_count_as_the_values_they_stand_for(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a linear layer; stacks of experts count in neither form."""
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(kinds, "FLOPS_PER_SECOND", 1e8)
    costs = list[int]()
    for in_4_bits in (False, True):
        model = make(family)
        for parameter in model.model.layers.parameters():
            parameter.requires_grad_(False)
        if in_4_bits:
            quantize(model, "cpu") if family == "llama" else quantize_experts(model)
        with compiled(model, Counting(), left=lambda: StepsLeft(1, 1)) as layers:
            one_step(model, *row(0, longest=60))
        # Layers with stacks in 4 bits have a class each.
        layer = re.search(r"x (\d) not compiled: 1 steps left, it pays off from ([\d,]+) on", layers.reason)
        assert layer
        costs.append(int(layer[1]) * int(layer[2].replace(",", "")))
    assert costs[0] == pytest.approx(costs[1], abs=2)


class Noted(TrainerCallback):
    """Notes what is left, how many graphs there are and whether one may come, at the end of each step."""

    def __init__(self, backend: Counting | None = None) -> None:
        self.trainer: Any = None
        self.left: list[StepsLeft] = []
        self.backend, self.graphs, self.waits = backend or Counting(), list[int](), list[bool]()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.left.append(self.trainer.fastpack_run.steps_left())
        self.graphs.append(self.backend.graphs)
        self.waits.append(not self.trainer.fastpack_run.step.is_warmed_up)


def noted(folder: Path, resume: str | None = None, backend: Counting | None = None, **more: Any) -> Noted:
    note = Noted(backend)
    fast = {name: more.pop(name) for name in ("merge_accumulation", "layer_compile") if name in more}
    note.trainer = build(FastSFTTrainer, folder, fast=fast, trainer={"callbacks": [note]}, **OPTIONS | more)
    note.trainer.train(resume_from_checkpoint=resume)
    return note


def test_steps_left_are_those_of_this_run_and_rows_those_that_run(tmp_path: Path) -> None:
    saved = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "per_device_train_batch_size": 1}
    assert noted(tmp_path, **saved).left == [StepsLeft(steps, 1) for steps in (3, 2, 1, 0)]
    resumed = noted(tmp_path, str(tmp_path / "checkpoint-2"), **saved)
    assert resumed.left == [StepsLeft(steps, 1) for steps in (1, 0)]
    four = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    alone = noted(tmp_path, max_steps=-1, num_train_epochs=1, merge_accumulation="off", **four).left
    assert [found.steps for found in alone] == list(range(len(alone)))[::-1]
    assert {found.rows for found in alone[:-1]} == {4}  # the epoch's last step has two
    assert {found.rows for found in noted(tmp_path, merge_accumulation="on", max_steps=1, **four).left} == {1}


def test_auto_weighs_in_the_second_step_on_compiles_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device where `auto` compiles at all; the report says what is to come, also of a run that ends before."""
    backend = Counting(differentiate=True)
    without_reasons(monkeypatch, "layer_compile")
    compile_with(backend, monkeypatch)
    waits: dict[str, list[bool]] = {}

    def graphs_and_line(name: str, steps: int, setting: str = "auto") -> tuple[list[int], Any]:
        backend.graphs = 0
        made = noted(tmp_path / name, backend=backend, layer_compile=setting, max_steps=steps)
        waits[name] = made.waits
        return made.graphs, made.trainer.fastpack_report["layer_compile"]

    graphs, line = graphs_and_line("short", 3)
    assert (graphs, line.status, line.path) == ([0, 0, 0], "off", "eager")
    assert "not compiled: 2 steps left" in line.reason
    graphs, line = graphs_and_line("on", 3, "on")
    assert (graphs, line.status) == ([1, 1, 1], "on")
    monkeypatch.setattr(kinds, "COMPILE_SECONDS", 0.0)
    graphs, line = graphs_and_line("long", 3)
    assert graphs == [0, 1, 1], line
    assert "compiled in" in line.reason
    graphs, line = graphs_and_line("ends", 1)
    said = "LlamaDecoderLayer is compiled at its first packed row, after the first step"
    assert (graphs, line.path, line.reason) == ([0], "pending", said)
    assert (waits["on"], waits["long"]) == ([False] * 3, [True, False, False])


@pytest.mark.cuda
def test_cuda_a_short_run_is_not_compiled_and_a_long_one_is(tmp_path: Path, inductor: None) -> None:
    options: dict[str, Any] = {"packing": True, "eval_strategy": "no", "use_cpu": False, "bf16": True}
    short = train(FastSFTTrainer, tmp_path / "short", fast=AUTO, max_steps=3, **options)
    line = short.fastpack_report["layer_compile"]
    assert (line.status, line.path) == ("off", "eager"), line
    assert re.search("2 steps left, it pays off from", line.reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinds, "COMPILE_SECONDS", 0.0)
        long = train(FastSFTTrainer, tmp_path / "long", fast=AUTO, max_steps=2, **options)
    assert "compiled in" in long.fastpack_report["layer_compile"].reason
