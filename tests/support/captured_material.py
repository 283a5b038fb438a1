"""Runs of a few steps with the micro-step captured, and what callbacks do in their middle."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from trainer_material import assert_same_log, make_dataset, make_tokenizer, settings
from transformers import TrainerCallback
from trl import SFTTrainer

from fastpack_trl import FastSFTConfig, FastSFTTrainer
from fastpack_trl.testing import tiny_model

STEPS = 8
CAPTURED: dict[str, Any] = {"packed_attention": "varlen", "cuda_graph": "on"}


def build(
    cls: type[SFTTrainer], folder: Path, devices: Any, *, family: str = "qwen3", lora: bool = False, data: Any = "text",
    fast: dict[str, Any] | None = None, callbacks: Any = (), model: Any = None, trainer: Any = None, **more: Any,
) -> Any:  # fmt: skip
    options = {"packing": True, "max_steps": STEPS, "eval_strategy": "no", **more}
    args = settings(folder, **options)
    model = tiny_model(family) if model is None else model
    made = cls(
        model,
        args=FastSFTConfig(**args, **(CAPTURED | (fast or {}))),
        train_dataset=make_dataset(data) if isinstance(data, str) else data,
        eval_dataset=make_dataset("text", 8, seed=7),
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear") if lora else None,
        callbacks=list(callbacks),
        **(trainer or {}),
    )
    if issubclass(cls, FastSFTTrainer):
        devices.options["model"] = made.model
    return made


def both(folder: Path, devices: Any, **options: Any) -> tuple[Any, Any]:
    """The same run captured, and not."""
    ours = build(FastSFTTrainer, folder / "ours", devices, **options)
    ours.train()
    fast = {**(options.pop("fast", None) or {}), "cuda_graph": "off"}
    eager = build(FastSFTTrainer, folder / "eager", devices, fast=fast, **options)
    eager.train()
    return ours, eager


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def assert_same_run(ours: Any, eager: Any, rtol: float = 2e-5, atol: float = 2e-5) -> None:
    assert_same_log(ours, eager, rtol=rtol, atol=atol)
    expected = weights(eager)
    for name, weight in weights(ours).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}")


class At(TrainerCallback):
    """Does something once, at the beginning of a step."""

    def __init__(self, step: int, act: Callable[..., None]) -> None:
        self.step, self.act = step, act

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.act(**kwargs)


def freeze(model: Any, **_: Any) -> None:
    for parameter in model.get_decoder().layers[0].parameters():
        parameter.requires_grad_(False)


def swap_data(model: Any, **_: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def evaluate_mode(model: Any, **_: Any) -> None:
    model.eval()


def generate(model: Any, **_: Any) -> None:
    model.eval()
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)


def merge(model: Any, **_: Any) -> None:
    model.merge_adapter()
    model.unmerge_adapter()


def disable(model: Any, **_: Any) -> None:
    model.base_model.disable_adapter_layers()
    model.base_model.enable_adapter_layers()


def raise_the_rate(optimizer: Any, **_: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 5e-3


def edit_frozen(model: Any, **_: Any) -> None:
    with torch.no_grad():
        model.get_decoder().norm.weight.mul_(2.0)


def replace_forward(model: Any, **_: Any) -> None:
    norm = model.get_decoder().norm
    forward = norm.forward
    norm.forward = lambda hidden: forward(hidden) * 1.5


class Clock(TrainerCallback):
    """Time of the device passes with each step: so much where it ran eager, so much where it was replayed."""

    def __init__(self, devices: Any, eager: float, captured: float, noise: Iterable[float] = ()) -> None:
        self.devices, self.eager, self.captured, self.noise = devices, eager, captured, iter(noise)
        self.replays = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        device = self.devices.made[-1]
        replays = device.log.count("replay")
        device.now += (self.captured if replays > self.replays else self.eager) * next(self.noise, 1.0)
        self.replays = replays


CHANGES = (freeze, swap_data, replace_forward)
"""Those after which what was recorded is of another model."""
