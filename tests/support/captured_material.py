"""Runs of a few steps with the micro-step captured, and what callbacks do in their middle."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trainer_material
from peft import LoraConfig
from replayed_graphs import TapeDevice
from trainer_material import assert_same_log, callback, make_dataset
from transformers import TrainerCallback
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention.varlen import Varlen
from fastpack_trl.features import cuda_graph

STEPS = 8
CAPTURED: dict[str, Any] = {"packed_attention": "varlen", "cuda_graph": "on"}


@contextlib.contextmanager
def capturing(**options: Any) -> Iterator[SimpleNamespace]:
    """Let runs on the CPU be captured, with attention's twin; `made` are their devices, `options` those of the next."""
    made: list[TapeDevice] = []
    pending = dict(options)

    def make(_device: torch.device) -> TapeDevice:
        made.append(TapeDevice(**pending))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Varlen, "refuses", lambda self, features: "")
        patch.setattr(cuda_graph, "unavailable", lambda device: "")
        patch.setattr(cuda_graph, "CudaGraphs", make)
        yield SimpleNamespace(made=made, options=pending)


def build(
    cls: type[SFTTrainer], folder: Path, devices: Any, *, family: str = "qwen3", lora: Any = False, data: Any = "text",
    fast: dict[str, Any] | None = None, callbacks: Any = (), model: Any = None, trainer: Any = None, **more: Any,
) -> Any:  # fmt: skip
    """A trainer in float32 on the CPU; `lora` may be a dict of options."""
    options = {"packing": True, "max_steps": STEPS, "eval_strategy": "no", **more}
    adapters = LoraConfig(r=4, target_modules="all-linear", **(lora if isinstance(lora, dict) else {}))
    given = {"eval_dataset": make_dataset("text", 8, seed=7), "callbacks": list(callbacks), **(trainer or {})}
    given |= {"peft_config": adapters} if lora else {}
    made = trainer_material.build(
        cls, folder, family=family, model=model, data=data, fast=CAPTURED | (fast or {}), trainer=given, **options
    )
    if issubclass(cls, FastSFTTrainer):
        devices.options["model"] = made.model
    return made


def both(folder: Path, devices: Any, **options: Any) -> tuple[Any, Any]:
    """The same run captured, and not."""
    ours, eager = (
        train(folder / setting, devices, **options | {"fast": {"cuda_graph": setting} | options.get("fast", {})})
        for setting in ("on", "off")
    )
    return ours, eager


def train(folder: Path, devices: Any, **options: Any) -> Any:
    """A run of `build`'s trainer."""
    made = build(FastSFTTrainer, folder, devices, **options)
    made.train()
    return made


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def assert_same_run(ours: Any, eager: Any, rtol: float = 2e-5, atol: float = 2e-5) -> None:
    assert_same_log(ours, eager, rtol=rtol, atol=atol)
    torch.testing.assert_close(weights(ours), weights(eager), rtol=1e-3, atol=2e-4)


def keeping(gradients: dict[str, torch.Tensor]) -> TrainerCallback:
    """A callback that leaves the gradients of the last step in a dict."""

    def keep(state: Any, model: Any) -> None:
        gradients.update((name, p.grad.clone()) for name, p in model.named_parameters() if p.grad is not None)

    return callback("on_pre_optimizer_step", keep)()


def distance(one: Any, other: Any) -> tuple[float, float]:
    """Largest difference of two runs: of the losses, and of the last gradients relative to the largest."""
    losses = max(abs(a - b) for a, b in zip(one[0], other[0], strict=True))
    scale = max(float(g.abs().max()) for g in other[1].values())
    return losses, max(float((one[1][name] - g).abs().max()) for name, g in other[1].items()) / scale


def assert_as_close_as_eager_runs(captured: tuple[Any, ...], eager: list[tuple[Any, ...]]) -> None:
    """Losses and last gradients of a captured run differ from those of eager ones as these from each other."""
    assert (captured[2].status, captured[2].path) == ("on", "captured"), captured[2]
    assert eager[0][2].path == "eager"
    assert captured[1].keys() == eager[0][1].keys()
    pairs = [distance(one, other) for one, other in combinations(eager, 2)]
    losses, gradients = (max(each) for each in zip(*pairs, strict=True))
    found = min(distance(captured, each) for each in eager)
    # Where eager runs agree bit for bit, so does the captured one but for the order of additions in flash.
    assert found[0] <= 2 * losses + 2e-3, (found, pairs)
    assert found[1] <= 2 * gradients + 2e-2, (found, pairs)


class At(TrainerCallback):
    """Does something once, at the beginning of a step; `act` may be a name of `ACTS`."""

    def __init__(self, step: int, act: str | Callable[..., object]) -> None:
        self.step, self.act = step, ACTS[act] if isinstance(act, str) else act

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.act(**kwargs)


def replace_forward(model: Any, **_: Any) -> None:
    norm = model.get_decoder().norm
    forward = norm.forward
    norm.forward = lambda hidden: forward(hidden) * 1.5


ACTS: dict[str, Callable[..., object]] = {
    "freeze": lambda model, **_: model.get_decoder().layers[0].requires_grad_(False),
    "unfreeze": lambda model, **_: model.requires_grad_(True),
    "swap data": lambda model, **_: [setattr(p, "data", p.data * 0.5) for p in model.parameters()],
    "replace forward": replace_forward,
    "evaluation mode": lambda model, **_: model.eval(),
    "generate": lambda model, **_: model.eval().generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False),
    "raise the rate": lambda optimizer, **_: [group.update(lr=5e-3) for group in optimizer.param_groups],
    "edit frozen": lambda model, **_: model.get_decoder().norm.weight.detach().mul_(2.0),
    "edit base": lambda model, **_: [one.mlp.up_proj.base_layer.weight.mul_(2.0) for one in model.get_decoder().layers],
    "merge": lambda model, **_: (model.merge_adapter(), model.unmerge_adapter()),
    "disable": lambda model, **_: (
        model.base_model.disable_adapter_layers(), model.base_model.enable_adapter_layers(),
    ),
}  # fmt: skip
CHANGES = ("freeze", "swap data", "replace forward")
"""Those after which what was recorded is of another model."""
