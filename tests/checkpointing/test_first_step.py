"""The first step, before layers are compiled, keeps no more than stock; the steps after it keep what the plan says."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compile_material import Counting
from offload_material import LAYERS
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from trainer_material import assert_same_log, train
from transformers import TrainerCallback

from fastpack_trl import FastSFTTrainer
from fastpack_trl.checkpointing.trace import SavedBytes
from fastpack_trl.compile import kind as kinds
from fastpack_trl.compile.layers import compiled_layers
from fastpack_trl.step import merge_accumulation
from fastpack_trl.step.accumulation import Merging
from fastpack_trl.testing import tiny_model


class Kept(TrainerCallback):
    """Counts the bytes that autograd saves in each step, parameters aside; what is checkpointed saves its input."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._saved = SavedBytes({p.untyped_storage().data_ptr() for p in model.parameters()}, set())
        self._hooks = saved_tensors_hooks(self._saved.pack, lambda tensor: tensor)
        self._hooks.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._hooks.__exit__(None, None, None)
        self.steps.append(self._saved.total)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Let `auto` compile on the CPU, in no time; return the paths of each layer that is timed."""
    seen: list[list[str]] = []
    times = kinds.median_times

    def watched(paths: Any, hidden: Tensor, layer: Any) -> dict[str, float]:
        seen.append([*paths, f"checkpointed: {layer.gradient_checkpointing}"])
        return times(paths, hidden, layer) | ({"compiled": 0.0} if "compiled" in paths else {})

    monkeypatch.setattr("fastpack_trl.compile.layer_compile.why_not", lambda run: "")
    monkeypatch.setattr(kinds, "COMPILE_SECONDS", 0.0)
    monkeypatch.setattr(kinds, "median_times", watched)
    defaults: Any = compiled_layers.__wrapped__.__kwdefaults__  # type: ignore[attr-defined]
    monkeypatch.setitem(defaults, "_backend", Counting(differentiate=True))
    return seen


def run(
    folder: Path, *, dropout: float = 0.0, attention: str | None = None, accumulate: int = 1, **fast: Any
) -> tuple[Any, list[int]]:
    kept, model = Kept(), tiny_model("llama", num_hidden_layers=LAYERS, attention_dropout=dropout)
    if attention is not None:
        model.set_attn_implementation(attention)
    trainer = train(
        FastSFTTrainer, folder, model=model, fast={"layer_compile": "auto", **fast}, packing=True,
        gradient_checkpointing=True, eval_strategy="no", max_steps=4,
        gradient_accumulation_steps=accumulate, trainer={"callbacks": [kept]},
    )  # fmt: skip
    return trainer, kept.steps


def test_before_layers_are_compiled_they_keep_their_inputs_alone(tmp_path: Path, timed: list[list[str]]) -> None:
    planned, kept = run(tmp_path / "auto", activation_memory_gib=1.0)
    assert planned.fastpack_report["activation_memory"].path == "keep"
    assert planned.fastpack_report["layer_compile"].path == "compiled"
    # What is compared are layers as the plan has them.
    assert timed == [["eager", "checkpointed: False"], ["eager", "compiled", "checkpointed: False"]]
    asked, everything = run(tmp_path / "keep", activation_memory="keep")
    stock, inputs = run(tmp_path / "checkpoint", activation_memory="checkpoint")
    assert kept[0] == inputs[0] < everything[0] / 2
    assert kept[1:] == everything[1:]
    for other in (asked, stock):
        assert_same_log(planned, other)


class Measured(Merging):
    """As on a device, whose memory is measured; this one's has no end."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.memory: Any = SimpleNamespace(tokens=math.inf)


@pytest.mark.parametrize("why", ["nothing is compiled", "merged rows are measured"])
def test_a_first_step_that_says_what_later_ones_take_keeps_what_they_keep(
    tmp_path: Path, timed: list[list[str]], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast: dict[str, Any] = {"layer_compile": "off"} if why == "nothing is compiled" else {}
    if not fast:
        monkeypatch.setattr(merge_accumulation, "Merging", Measured)
        fast = {"merge_accumulation": "on", "accumulate": 2}
    _, kept = run(tmp_path / "auto", activation_memory_gib=1.0, **fast)
    _, everything = run(tmp_path / "keep", activation_memory="keep", **fast)
    assert kept == everything


def test_with_dropout_the_first_step_draws_the_same_numbers(tmp_path: Path, timed: list[list[str]]) -> None:
    options: dict[str, Any] = {"dropout": 0.1, "attention": "eager"}
    planned, kept = run(tmp_path / "auto", activation_memory_gib=1.0, **options)
    asked, everything = run(tmp_path / "keep", activation_memory="keep", **options)
    assert kept[0] < everything[0] / 2
    for mine, theirs in zip(planned.model.parameters(), asked.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.cuda
def test_cuda_the_first_step_needs_less_than_one_that_keeps_all(
    tmp_path: Path, inductor: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Peaks(TrainerCallback):
        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.steps.append(torch.cuda.max_memory_allocated() - self.before)

    monkeypatch.setattr(kinds, "COMPILE_SECONDS", 0.0)
    found = {}
    for memory in ("auto", "keep"):
        peaks = Peaks()
        trainer = train(
            FastSFTTrainer, tmp_path / memory, model=tiny_model("qwen3", num_hidden_layers=8), packing=True,
            gradient_checkpointing=True, eval_strategy="no", max_steps=3, max_length=512, use_cpu=False, bf16=True,
            fast={"activation_memory": memory, "cuda_graph": "off"}, trainer={"callbacks": [peaks]},
        )  # fmt: skip
        assert trainer.fastpack_report["activation_memory"].path == "keep"
        assert "compiled in" in trainer.fastpack_report["layer_compile"].reason
        found[memory] = peaks.steps
    assert found["auto"][0] < found["keep"][0]
