"""Module hooks of the user in a training run: called when, as often and with the effect that they have in stock."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_material import Counting
from lora_material import adapted
from moe_material import moe_model
from test_module_hooks import REGISTER, REGISTER_GLOBAL
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from trainer_material import train
from transformers import TrainerCallback
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.compile import feature
from fastpack_trl.compile.layers import compiled_layers, decoder_layers
from fastpack_trl.testing import tiny_model

STEPS = 4
BACKEND = Counting(differentiate=True)

MODELS: dict[str, Callable[[], Any]] = {
    "dense": lambda: tiny_model("llama", num_hidden_layers=4),
    "lora": lambda: adapted("llama", num_hidden_layers=4, target_modules=["q_proj", "down_proj"]),
    "moe": lambda: moe_model("qwen3_moe", num_hidden_layers=4),
}
PARTS = {
    "dense": ["", "mlp", "mlp.act_fn", "self_attn.o_proj"],
    "lora": [
        "", "mlp", "mlp.down_proj", "mlp.down_proj.base_layer", "mlp.down_proj.lora_A.default",
        "mlp.down_proj.lora_B.default", "self_attn.q_proj.lora_dropout.default",
    ],
    "moe": ["", "mlp", "mlp.gate", "mlp.experts", "mlp.experts.act_fn"],
}  # fmt: skip
"""Of a hooked layer; empty for the layer itself."""


def scaled(value: Any, factor: float) -> Any:
    """The first tensor of floating-point numbers, which gets a gradient, times `factor`."""
    if isinstance(value, Tensor):
        return value * factor
    return (value[0] * factor, *value[1:]) if isinstance(value, tuple) and isinstance(value[0], Tensor) else None


class Hooks(TrainerCallback):
    """Registers and removes hooks when steps begin, and writes down their calls.

    Args:
        plan: called when a step begins, with this, the model and the step.
    """

    def __init__(self, plan: Callable[[Hooks, Any, int], None]) -> None:
        self.plan = plan
        self.calls: list[tuple[int, str, str]] = []
        self.handles: dict[Any, list[RemovableHandle]] = {}
        self.names: dict[int, str] = {}
        self.step = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.step = state.global_step
        self.names = {id(module): name for name, module in model.named_modules()}
        self.plan(self, model, self.step)

    def seen(self, kind: str, changes: bool, module: nn.Module, *given: Any) -> Any:
        name = self.names.get(id(module), type(module).__name__)
        self.calls.append((self.step, kind, name))
        if not changes or name.endswith(".gate"):  # routing stays, whatever the rounding
            return None
        which = 1 if kind == "forward hook" else 0
        return scaled(given[which], 1.125 if "forward" in kind else 0.75)

    def add(self, key: Any, modules: list[nn.Module]) -> None:
        self.handles[key] = [
            register(module, partial(self.seen, kind, True))
            for module in modules
            for kind, register in REGISTER.items()
        ]

    def add_global(self) -> None:
        self.handles["global"] = [
            register(partial(self.seen, f"global {kind}", False)) for kind, register in REGISTER_GLOBAL.items()
        ]

    def remove(self, key: Any) -> None:
        for handle in self.handles.pop(key, []):
            handle.remove()


def on_modules(parts: list[str], hooks: Hooks, model: Any, step: int) -> None:
    """Layer 0 has hooks from the start, layer 1 from the second step on, layer 2 in the first only, layer 3 none."""
    layers: Any = decoder_layers(model)
    for index, first in ((0, 0), (1, 1), (2, 0)):
        if step == first:
            hooks.add(index, [layers[index].get_submodule(part) for part in parts])
    if step == 1:
        hooks.remove(2)


def on_all(hooks: Hooks, model: Any, step: int) -> None:
    """Global hooks from the start, in the first and in the third step."""
    hooks.remove("global")
    if step in (0, 2):
        hooks.add_global()


def plan_of(kind: str, where: str) -> Callable[[Hooks, Any, int], None]:
    return on_all if where == "global" else partial(on_modules, PARTS[kind])


def run(cls: type[SFTTrainer], folder: Path, kind: str, hooks: Hooks, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    more = {
        "model": MODELS[kind](), "max_steps": STEPS, "eval_strategy": "no", "optim": "sgd", "learning_rate": 0.1,
        "gradient_accumulation_steps": 2, "per_device_train_batch_size": 1, "packing": True, "max_length": 32,
        "gradient_checkpointing": kind == "dense", "router_aux_loss_coef": 0.0 if kind == "moe" else None,
    }  # fmt: skip
    try:
        trainer = train(cls, folder, trainer={"callbacks": [hooks]}, **(more | options))
    finally:
        for key in list(hooks.handles):
            hooks.remove(key)
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return trainer, weights


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feature, "compiled_layers", partial(compiled_layers, _backend=BACKEND))


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    known: dict[tuple[str, str], Any] = {}

    def get(kind: str, where: str) -> Any:
        if (kind, where) not in known:
            hooks = Hooks(plan_of(kind, where))
            known[kind, where] = (*run(SFTTrainer, tmp_path_factory.mktemp("stock"), kind, hooks), hooks.calls)
        return known[kind, where]

    return get


@pytest.mark.parametrize("compiled", ["off", "on"])
@pytest.mark.parametrize("where", ["modules", "global"])
@pytest.mark.parametrize("kind", MODELS)
def test_hooks_run_as_in_stock_whenever_they_come_and_go(
    kind: str, where: str, compiled: str, tmp_path: Path, stock: Any
) -> None:
    theirs, expected, calls = stock(kind, where)
    hooks = Hooks(plan_of(kind, where))
    fast = {"layer_compile": compiled, "verify_packing": "off", "merge_accumulation": "on", "moe": "on"}
    ours, weights = run(FastSFTTrainer, tmp_path, kind, hooks, fast=fast)
    for step in range(STEPS):
        mine, known = ([call[1:] for call in made if call[0] == step] for made in (hooks.calls, calls))
        assert mine == known, f"step {step}: {len(mine)} calls, {len(known)} in stock"
    losses, known_losses = ([log["loss"] for log in one.state.log_history if "loss" in log] for one in (ours, theirs))
    assert losses == pytest.approx(known_losses, rel=1e-4)
    for name, weight in expected.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-3, atol=1e-5)
    report = ours.fastpack_report
    assert "runs once per micro-batch" in report["merge_accumulation"].reason
    if compiled == "on":
        assert "compiled in" in report["layer_compile"].reason
        assert ("layers run eager for" in report["layer_compile"].reason) == (where == "modules")
