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
from torch.autograd.graph import saved_tensors_hooks
from trainer_material import assert_same_log, build, train
from transformers import TrainerCallback

from fastpack_trl import FastSFTTrainer
from fastpack_trl.checkpointing import activation_memory as memory
from fastpack_trl.checkpointing.plan import SavedBytes, describe
from fastpack_trl.checkpointing.streams import HostStreams
from fastpack_trl.compile import kind as kinds
from fastpack_trl.compile.layers import compiled_layers
from fastpack_trl.step import merge_accumulation
from fastpack_trl.step.accumulation import Merging
from fastpack_trl.testing import tiny_model

pytestmark = pytest.mark.usefixtures("varlen_on_the_cpu")


class Kept(TrainerCallback):
    """Counts the bytes that autograd saves in each step, parameters aside; what is checkpointed saves its input."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._saved = SavedBytes({p.untyped_storage().data_ptr() for p in model.parameters()})
        self._hooks = saved_tensors_hooks(self._saved.pack, lambda tensor: tensor)
        self._hooks.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._hooks.__exit__(None, None, None)
        self.steps.append(self._saved.total)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let `auto` compile on the CPU, in no time; return whether the layers were checkpointed when they were weighed."""
    seen: list[bool] = []
    pays = kinds.LayerKind._pays

    def watched(kind: Any, eager: Any, call: Any) -> bool:
        seen.append(call.layer.gradient_checkpointing)
        return pays(kind, eager, call)

    monkeypatch.setattr("fastpack_trl.compile.layer_compile.why_not", lambda run: "")
    monkeypatch.setattr(kinds, "COMPILE_SECONDS", 0.0)
    monkeypatch.setattr(kinds.LayerKind, "_pays", watched)
    defaults: Any = compiled_layers.__wrapped__.__kwdefaults__  # type: ignore[attr-defined]
    monkeypatch.setitem(defaults, "_backend", Counting(differentiate=True))
    return seen


def run(folder: Path, *, accumulate: int = 1, **fast: Any) -> tuple[Any, list[int]]:
    kept, model = Kept(), tiny_model("llama", num_hidden_layers=LAYERS, attention_dropout=0.1)
    model.set_attn_implementation("eager")
    trainer = train(
        FastSFTTrainer, folder, model=model, fast={"layer_compile": "auto", **fast}, packing=True,
        gradient_checkpointing=True, eval_strategy="no", max_steps=4,
        gradient_accumulation_steps=accumulate, trainer={"callbacks": [kept]},
    )  # fmt: skip
    return trainer, kept.steps


@pytest.mark.slow
def test_before_layers_are_compiled_they_keep_their_inputs_alone(tmp_path: Path, timed: list[bool]) -> None:
    planned, kept = run(tmp_path / "auto", activation_memory_gib=1.0)
    assert planned.fastpack_report["activation_memory"].path == "keep"
    assert planned.fastpack_report["layer_compile"].path == "compiled"
    assert timed == [False], "weighed as the plan has them"
    asked, everything = run(tmp_path / "keep", activation_memory="keep")
    stock, inputs = run(tmp_path / "checkpoint", activation_memory="checkpoint")
    assert kept[0] == inputs[0] < everything[0] / 2
    assert kept[1:] == everything[1:]
    for other in (asked, stock):  # dropout draws the same numbers
        assert_same_log(planned, other)
        for mine, theirs in zip(planned.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(mine, theirs)


class Measured(Merging):
    """As on a device, whose memory is measured; this one's has no end."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.memory: Any = SimpleNamespace(tokens=math.inf)


@pytest.mark.slow
@pytest.mark.parametrize("why", ["nothing is compiled", "merged rows are measured"])
def test_a_first_step_that_says_what_later_ones_take_keeps_what_they_keep(
    tmp_path: Path, timed: list[bool], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast: dict[str, Any] = {"layer_compile": "off"} if why == "nothing is compiled" else {}
    if not fast:
        monkeypatch.setattr(merge_accumulation, "Merging", Measured)
        fast = {"merge_accumulation": "on", "accumulate": 2}
    _, kept = run(tmp_path / "auto", activation_memory_gib=1.0, **fast)
    _, everything = run(tmp_path / "keep", activation_memory="keep", **fast)
    assert kept == everything


@pytest.mark.parametrize("way", ["offload", "none"])
def test_out_of_memory_the_first_step_goes_deeper_than_what_is_installed(
    tmp_path: Path, timed: list[bool], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "offload":
        monkeypatch.setattr(memory, "offload_options", lambda run: {"streams": HostStreams, "min_bytes": 1})
        monkeypatch.setattr(memory, "offload_unavailable", lambda device: "")
    installed: list[str] = []
    full = [True]
    trainer = build(
        FastSFTTrainer, tmp_path, model=tiny_model("llama", num_hidden_layers=LAYERS), packing=True, max_steps=3,
        gradient_checkpointing=True, eval_strategy="no", fast={"activation_memory_gib": 1.0},
    )  # fmt: skip
    levels = memory.layer_levels

    def watched(layers: Any, each: Any, **options: Any) -> Any:
        installed.append(describe(each))
        return levels(layers, each, **options)

    backward = trainer.accelerator.backward

    def fail(*args: Any, **options: Any) -> None:
        if full:
            full.clear()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        backward(*args, **options)

    trainer.accelerator.backward = fail
    monkeypatch.setattr(memory, "layer_levels", watched)
    trainer.train()
    assert not full
    line = trainer.fastpack_report["activation_memory"]
    all_at = {level: f"{level} 0-{LAYERS - 1}" for level in ("keep", "checkpoint", "offload")}
    told = f"a step ran out of memory with {all_at['checkpoint']}; it was run again "
    kept, checkpointed, offloaded = all_at.values()
    expected = {
        "offload": ([checkpointed, offloaded], told + "with less", "offload"),
        "none": ([checkpointed, kept], "", "keep"),
    }
    each, said, path = expected[way]
    assert (installed, line.path) == (each, path)
    assert said in line.reason
    assert bool(said) == ("ran out of memory" in line.reason)
