"""Module hooks of the user in a training run: called when, as often and with the effect that they have in stock."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_material import make_row
from hook_material import REGISTER, REGISTER_GLOBAL
from lora_material import adapted
from moe_material import STACKS, moe_model
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from trainer_material import callback, train
from transformers import TrainerCallback
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer, apply_lora, apply_moe
from fastpack_trl.model.checkpoint_seam import checkpointable_layers
from fastpack_trl.testing import gradients, tiny_model

pytestmark = pytest.mark.usefixtures("varlen_on_the_cpu")

STEPS = 4

MODELS: dict[str, Callable[[], Any]] = {
    "dense": lambda: tiny_model("llama", num_hidden_layers=4),
    "lora": lambda: adapted("llama", num_hidden_layers=4, target_modules=["q_proj", "down_proj"]),
    "moe": lambda: moe_model("qwen3_moe", num_hidden_layers=4),
    "moe lora": lambda: adapted(MODELS["moe"](), target_modules=[], target_parameters=STACKS),
}
PARTS = {
    "dense": ["", "mlp", "mlp.act_fn", "self_attn.o_proj"],
    "lora": [
        "", "mlp", "mlp.down_proj", "mlp.down_proj.base_layer", "mlp.down_proj.lora_A.default",
        "mlp.down_proj.lora_B.default", "self_attn.q_proj.lora_dropout.default",
    ],
    "moe": ["", "mlp", "mlp.gate", "mlp.experts", "mlp.experts.act_fn"],
    "moe lora": ["mlp.experts.base_layer.base_layer.act_fn"],
}  # fmt: skip
"""Of a hooked layer; empty for the layer itself."""


def scaled(value: Any, factor: float) -> Any:
    """The first tensor of floating-point numbers, which gets a gradient, times `factor`."""
    if isinstance(value, Tensor):
        return value * factor
    return (value[0] * factor, *value[1:]) if isinstance(value, tuple) and isinstance(value[0], Tensor) else None


class Hooks(TrainerCallback):
    """Registers and removes hooks when steps begin, and records their calls: ``plan(self, model, step)``."""

    def __init__(self, plan: Callable[[Hooks, Any, int], None]) -> None:
        self.plan, self.step = plan, 0
        self.calls: list[tuple[int, str, str]] = []
        self.handles: dict[Any, list[RemovableHandle]] = {}
        self.names: dict[int, str] = {}

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.step = state.global_step
        self.names = {id(module): name for name, module in model.named_modules()}
        self.plan(self, model, self.step)

    def seen(self, kind: str, changes: bool, module: nn.Module, *given: Any) -> Any:
        name = self.names.get(id(module), type(module).__name__)
        self.calls.append((self.step, kind, name))
        if not changes or name.endswith(".gate"):  # routing stays, whatever the rounding
            return None
        return scaled(given[kind == "forward hook"], 1.125 if "forward" in kind else 0.75)

    def add(self, key: Any, modules: list[nn.Module]) -> None:
        kinds = REGISTER.items()
        self.handles[key] = [add(one, partial(self.seen, kind, True)) for one in modules for kind, add in kinds]

    def remove(self, key: Any) -> None:
        for handle in self.handles.pop(key, []):
            handle.remove()


def plan_of(kind: str, where: str) -> Callable[[Hooks, Any, int], None]:
    """Layer 0 has hooks from the start, layer 1 from the second step on, layer 2 in the first only, layer 3 none.

    Global hooks are there in the first and in the third step.
    """

    def on_modules(hooks: Hooks, model: Any, step: int) -> None:
        layers: Any = checkpointable_layers(model)
        for index, first in ((0, 0), (1, 1), (2, 0)):
            if step == first:
                hooks.add(index, [layers[index].get_submodule(part) for part in PARTS[kind]])
        if step == 1:
            hooks.remove(2)

    def on_all(hooks: Hooks, model: Any, step: int) -> None:
        hooks.remove("global")
        if step in (0, 2):
            hooks.handles["global"] = [
                register(partial(hooks.seen, f"global {kind}", False)) for kind, register in REGISTER_GLOBAL.items()
            ]

    return on_all if where == "global" else on_modules


def run(cls: type[SFTTrainer], folder: Path, kind: str, hooks: Hooks, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    moe, more = "moe" in kind, {"max_steps": STEPS, "eval_strategy": "no", "optim": "sgd", "learning_rate": 0.1}
    more |= {"model": MODELS[kind](), "packing": True, "max_length": 32, "gradient_checkpointing": kind == "dense"}
    more |= {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 1}
    more |= {"router_aux_loss_coef": 0.0 if moe else None}
    try:
        trainer = train(cls, folder, trainer={"callbacks": [hooks]}, **(more | options))
    finally:
        for key in list(hooks.handles):
            hooks.remove(key)
    weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}
    return trainer, weights


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Any]:
    @cache
    def get(kind: str, where: str) -> Any:
        hooks = Hooks(plan_of(kind, where))
        return (*run(SFTTrainer, tmp_path_factory.mktemp("stock"), kind, hooks), hooks.calls)

    return get


@pytest.mark.parametrize(
    ("kind", "where"), [*((kind, "modules") for kind in MODELS), ("dense", "global"), ("moe", "global")]
)
def test_hooks_come_and_go_as_in_stock(kind: str, where: str, tmp_path: Path, stock: Any) -> None:
    theirs, expected, calls = stock(kind, where)
    hooks = Hooks(plan_of(kind, where))
    fast = {"fused_layers": "on", "verify_packing": "off", "merge_accumulation": "on"}
    fast |= {"moe": "on"} if "moe" in kind else {}
    ours, weights = run(FastSFTTrainer, tmp_path, kind, hooks, fast=fast)
    for step in range(STEPS):
        mine, known = ([call[1:] for call in made if call[0] == step] for made in (hooks.calls, calls))
        assert mine == known, f"step {step}: {len(mine)} calls, {len(known)} in stock"
    losses, known_losses = ([log["loss"] for log in one.state.log_history if "loss" in log] for one in (ours, theirs))
    assert losses == pytest.approx(known_losses, rel=1e-4)
    torch.testing.assert_close(weights, expected, rtol=1e-3, atol=1e-5)
    assert "runs once per micro-batch" in ours.fastpack_report["merge_accumulation"].reason


@pytest.mark.parametrize(("error", "step"), [(RuntimeError, 0), (KeyboardInterrupt, 2)])
def test_what_a_hook_raises_ends_the_run_as_in_stock(error: Any, step: int, tmp_path: Path) -> None:
    """Also in the first row, which is when features decide."""
    calls: list[list[int]] = []

    def plan(hooks: Hooks, model: Any, now: int) -> None:
        def fail(*_args: Any) -> None:
            calls[-1].append(now)
            if len(calls[-1]) == 2:
                raise error("stop")

        if now == step:
            hooks.handles[0] = [checkpointable_layers(model)[0].get_submodule("mlp").register_forward_hook(fail)]

    fast = {"verify_packing": "off"}
    for cls, options in ((SFTTrainer, {}), (FastSFTTrainer, {"fast": fast})):
        calls.append([])
        with pytest.raises(error, match="stop"):
            run(cls, tmp_path, "dense", Hooks(plan), **options)
    assert calls[0] == calls[1] == [step, step]


REMOVED = {
    "lora": (lambda: adapted("llama"), apply_lora, "self_attn.q_proj.lora_A.default"),
    "moe": (lambda: moe_model("qwen3_moe"), apply_moe, "mlp.experts.act_fn"),
}


@pytest.mark.parametrize("kind", REMOVED)
def test_a_hook_that_goes_before_the_backward_pass_leaves_the_recompute_as_its_forward_was(kind: str) -> None:
    results, (ids, *_) = [], make_row()
    build, apply, part = REMOVED[kind]
    for fast in (False, True):
        model = build()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
        if fast:
            apply(model)
        seen: list[int] = []
        hooked = checkpointable_layers(model)[0].get_submodule(part)
        with hooked.register_forward_hook(lambda *_, seen=seen: seen.append(1)):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        results.append((loss.detach(), gradients(model), seen))
        assert seen == [1]
    torch.testing.assert_close(results[1][:2], results[0][:2], rtol=1e-3, atol=1e-4)


def test_looking_at_a_model_calls_no_hook(tmp_path: Path) -> None:
    """Reading the gates, planning the memory: no step runs."""
    seen: list[str] = []
    model = moe_model("qwen3_moe")
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: seen.append(name))
        module.register_full_backward_hook(lambda *_, name=name: seen.append(name))
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _, name=name: seen.append(name))

    def stop(*_: Any) -> None:
        raise KeyError

    fast = {"activation_memory_gib": 1.0, "moe": "on"}
    given = {"callbacks": [callback("on_train_begin", stop)()]}
    with pytest.raises(KeyError):
        train(FastSFTTrainer, tmp_path, model=model, fast=fast, packing=True, trainer=given)
    assert seen == []


def test_a_plan_that_keeps_activations_recomputes_layers_with_hooks(tmp_path: Path) -> None:
    """Stock's checkpointing calls a hook inside of a layer twice per row: in forward and in the recompute."""

    def plan(hooks: Hooks, model: Any, now: int) -> None:
        if now == 1:
            hooks.add(0, [checkpointable_layers(model)[1].get_submodule("mlp.act_fn")])
        if now == 3:
            hooks.remove(0)

    calls = []
    for cls, options in ((SFTTrainer, {}), (FastSFTTrainer, {"fast": {"activation_memory_gib": 1.0}})):
        hooks = Hooks(plan)
        trainer, _ = run(cls, tmp_path, "dense", hooks, **options)
        calls.append(hooks.calls)
    assert calls[1] == calls[0]
    assert sum(kind == "forward hook" for _, kind, _ in calls[0]) == 2 * 2 * 2
    assert trainer.fastpack_report["activation_memory"].path == "keep"
