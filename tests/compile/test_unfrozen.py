"""Parameters frozen or unfrozen after their layers were compiled: from then on gradients are those of eager layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compile_material import Counting, compile_with, compiled, make, one_step, row
from trainer_material import build, make_dataset
from transformers import TrainerCallback
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.testing import assert_gradients_close, tiny_model

SETTING = "skip_tensor_guards_with_matching_dict_tags"
"""Of torch: what a graph was traced with is compared with the parameter itself only where this is off (2.11)."""


class Freezes(TrainerCallback):
    """Freezes every second parameter when training begins, gives them back later; notes which have a gradient."""

    def __init__(self, until: int, *, again: int = 0) -> None:
        self.until, self.again = until, again
        self.chosen: list[torch.nn.Parameter] = []
        self.seen: list[list[str]] = []
        self.norms: list[float] = []

    def switch(self, value: bool) -> None:
        for parameter in self.chosen:
            parameter.requires_grad_(value)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.chosen = [parameter for parameter in model.parameters() if parameter.requires_grad][::2]
        self.switch(False)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.seen.append([name for name, one in model.named_parameters() if one.grad is not None])
        chosen = [one.grad.float().norm() for one in self.chosen if one.grad is not None]
        self.norms.append(float(torch.stack(chosen).norm()) if chosen else 0.0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.until:
            self.switch(True)
        elif state.global_step == self.again:
            self.switch(False)


def test_graphs_compare_the_parameters_themselves_whatever_torch_would() -> None:
    settings: list[bool] = []

    def backend(graph: Any, inputs: Any) -> Any:
        settings.append(getattr(torch._dynamo.config, SETTING))
        return graph.forward

    for outside in (True, False):
        with torch._dynamo.config.patch({SETTING: outside}):
            with compiled(make("llama"), backend):
                pass
            model = make("llama")
            with compiled(model, backend) as layers:
                one_step(model, *row(0))
            assert layers.path == "compiled", layers.reason
            assert getattr(torch._dynamo.config, SETTING) == outside
    assert settings == [False] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "lora", "checkpointing"), [(1, False, True), (2, False, False), (2, True, False)],
    ids=["one-checkpointing", "two", "two-lora"],
)  # fmt: skip
def test_what_is_frozen_and_unfrozen_between_steps_has_the_gradients_of_eager(
    layers: int, lora: bool, checkpointing: bool
) -> None:
    """One layer, and two that freeze differently: each graph then meets the same modules in every step."""
    model = make("olmo2", lora=lora, checkpointing=checkpointing, num_hidden_layers=layers)
    chosen = [parameter for parameter in model.parameters() if parameter.requires_grad][::2]
    graphs = Counting(differentiate=True)
    with compiled(model, graphs) as found:
        steps = []
        for trains in (False, False, True, True, False, True):
            for parameter in chosen:
                parameter.requires_grad_(trains)
            steps.append((trains, one_step(model, *row(len(steps)))))
    assert found.path == "compiled", found.reason
    for number, (trains, (loss, gradients)) in enumerate(steps):
        for parameter in chosen:
            parameter.requires_grad_(trains)
        with packed_attention(model):
            expected, exact = one_step(model, *row(number))
        assert loss == pytest.approx(expected, rel=1e-5)
        assert_gradients_close(gradients, exact, rtol=1e-4, atol_of_all=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_callback_unfreezes_parameters_of_compiled_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lora: bool
) -> None:
    compile_with(Counting(differentiate=True), monkeypatch)
    ours, stock = (trained(cls, tmp_path / cls.__name__, lora=lora) for cls in (FastSFTTrainer, SFTTrainer))
    assert ours.seen == stock.seen
    assert len(set(map(tuple, stock.seen))) == 2
    assert ours.norms == pytest.approx(stock.norms, rel=1e-3)


@pytest.mark.cuda
@pytest.mark.parametrize("until", [2, 8])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_cuda_a_callback_unfreezes_parameters_of_compiled_and_captured_layers(
    tmp_path: Path, inductor: None, lora: bool, checkpointing: bool, until: int
) -> None:
    """Before anything is recorded, and after."""
    options = {
        "lora": lora, "until": until, "gradient_checkpointing": checkpointing, "use_cpu": False, "bf16": True,
        "data": make_dataset("text", 300), "max_steps": 14,
    }  # fmt: skip
    ours, stock = (trained(cls, tmp_path / cls.__name__, **options) for cls in (FastSFTTrainer, SFTTrainer))
    assert ours.seen == stock.seen
    assert ours.norms == pytest.approx(stock.norms, rel=0.15)  # bf16
    assert ours.report["layer_compile"].path == "inductor", ours.report["layer_compile"]
    assert ours.report["cuda_graph"].path == "captured", ours.report["cuda_graph"]


def trained(cls: type[SFTTrainer], folder: Path, *, lora: bool, until: int = 2, **more: Any) -> Any:
    """Train a model whose every second parameter is unfrozen after some steps, and frozen again before the last."""
    from peft import LoraConfig

    options = {"packing": True, "max_steps": 7, "eval_strategy": "no", "gradient_checkpointing": False, **more}
    watcher = Freezes(until, again=options["max_steps"] - 2)
    given: dict[str, Any] = {"callbacks": [watcher], "eval_dataset": make_dataset("text", 8, seed=7)}
    if lora:
        given["peft_config"] = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    torch.manual_seed(0)
    fast = {"layer_compile": "on", **({} if options.get("use_cpu", True) else {"cuda_graph": "on"})}
    model = tiny_model("olmo2")
    trainer = build(cls, folder, model=model, fast=fast if cls is FastSFTTrainer else None, trainer=given, **options)
    trainer.train()
    watcher.report = getattr(trainer, "fastpack_report", None)
    return watcher
