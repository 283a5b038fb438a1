"""Parameters frozen or unfrozen after their layers were compiled: from then on gradients are those of eager layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compile_material import Counting, compile_with
from peft import LoraConfig
from trainer_material import make_dataset, train
from transformers import TrainerCallback
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.testing import tiny_model

BOTH = (FastSFTTrainer, SFTTrainer)


class Freezes(TrainerCallback):
    """Freezes every second parameter as training begins, gives them back after a step, freezes them in the end."""

    def __init__(self, until: int, again: int) -> None:
        self.trains_after = {until: True, again: False}
        self.names: list[list[str]] = []
        self.norms: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.chosen = [parameter for parameter in model.parameters() if parameter.requires_grad][::2]
        self.switch(False)

    def switch(self, trains: bool) -> None:
        for parameter in self.chosen:
            parameter.requires_grad_(trains)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.names.append([name for name, one in model.named_parameters() if one.grad is not None])
        self.norms.append(sum(float(one.grad.float().norm()) for one in self.chosen if one.grad is not None))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step in self.trains_after:
            self.switch(self.trains_after[state.global_step])


def trained(cls: type[SFTTrainer], folder: Path, fast: dict[str, Any], lora: bool, until: int, **more: Any) -> Any:
    options = {"packing": True, "max_steps": 7, "eval_strategy": "no", "gradient_checkpointing": False, **more}
    watcher = Freezes(until, options["max_steps"] - 2)
    given: dict[str, Any] = {"callbacks": [watcher], "eval_dataset": make_dataset("text", 8, seed=7)}
    if lora:
        given["peft_config"] = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(0)
    ours = fast if cls is FastSFTTrainer else None
    trainer = train(cls, folder, model=tiny_model("olmo2"), fast=ours, trainer=given, **options)
    return watcher, trainer


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_callback_unfreezes_compiled_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: bool) -> None:
    compile_with(Counting(differentiate=True), monkeypatch)
    (ours, _), (stock, _) = (trained(cls, tmp_path, {"layer_compile": "on"}, lora, 2) for cls in BOTH)
    assert ours.names == stock.names
    assert ours.norms == pytest.approx(stock.norms, rel=1e-3)


@pytest.mark.cuda
@pytest.mark.parametrize("until", [2, 8], ids=["before-recording", "after"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_cuda_a_callback_unfreezes_parameters_of_compiled_and_captured_layers(
    tmp_path: Path, inductor: None, lora: bool, checkpointing: bool, until: int
) -> None:
    fast = {"layer_compile": "on", "cuda_graph": "on"}
    options = {
        "gradient_checkpointing": checkpointing, "use_cpu": False, "bf16": True, "data": make_dataset("text", 300),
        "max_steps": 14,
    }  # fmt: skip
    (ours, trainer), (stock, _) = (trained(cls, tmp_path, fast, lora, until, **options) for cls in BOTH)
    assert ours.names == stock.names
    assert ours.norms == pytest.approx(stock.norms, rel=0.15)  # bf16
    paths = [trainer.fastpack_report[feature].path for feature in fast]
    assert paths == ["inductor", "captured"], trainer.fastpack_report
