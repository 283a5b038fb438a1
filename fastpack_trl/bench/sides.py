"""The named sides of a comparison: TRL as installed, compiled or with metadata per layer, fastpack, single features."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers.utils

from fastpack_trl.bench.learner import learner_alone
from fastpack_trl.bench.rebuild import rebuild_per_layer
from fastpack_trl.bench.watch import GRADIENT_NORM, LOSS
from fastpack_trl.config import _CHOICES
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.recipe.methods import SFT, Method

STOCK, COMPILED, REBUILD, OURS, PLANNED = SIDES = "stock", "stock_compiled", "rebuild", "fastpack", "fastpack_plan"
SAME_CHECKPOINTS = {"activation_memory": "off", "checkpoint_offload": "off"}
"""Fields with which a side recomputes as `gradient_checkpointing` says, as TRL does."""
NO_FEATURES = "verify_packing", "moe_quantize_experts"
"""Fields that make no step faster by themselves: a check, another computation."""
NEEDS = {
    "sync_free": ("packed_attention",),
    "merge_accumulation": ("packed_attention", "sync_free"),
    "layer_compile": ("packed_attention",),
    "cuda_graph": ("packed_attention", "sync_free"),
}
"""Fields that a feature cannot run without."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side: its classes, its fields over those of the run, and a context around its training.

    Attributes:
        around: given the trainer; may yield a text that names the implementations that run.
        compares: the figure that the gate compares, `LOSS` or `GRADIENT_NORM`.
    """

    trainer_class: Any
    config_class: Any
    changes: Mapping[str, Any] = field(default_factory=dict)
    around: Callable[[Any], AbstractContextManager[Any]] = contextlib.nullcontext
    compares: str = LOSS


def side_of(name: str, method: Method = SFT, configured: Mapping[str, str] | None = None) -> Side:
    """Return a side of `SIDES`, or of `ablations`, for the trainers of a method.

    - ``stock``: TRL's trainer as installed and configured.
    - ``stock_compiled``: the same with the best flash-attn that is installed, Liger's kernels if they load, and decoder
      layers compiled through accelerate.
    - ``rebuild``: TRL's trainer with packing metadata and mask rebuilt in each layer.
    - ``fastpack``: ours, which recomputes what `gradient_checkpointing` says, as TRL.
    - ``fastpack_plan``: ours as configured, which recomputes only what the memory requires.
    - ``off``, or features such as ``packed_attention + sync_free``: ours with these features only, as `configured`.
    """
    stock, ours = Side(*method.of_trl), Side(*method.classes)
    has_liger = torch.cuda.is_available() and transformers.utils.is_liger_kernel_available()
    sides = {
        STOCK: stock,
        COMPILED: replace(stock, changes={"use_liger_kernel": True} if has_liger else {}, around=_tuned),
        REBUILD: replace(stock, around=lambda trainer: rebuild_per_layer(trainer.model)),
        OURS: replace(ours, changes=SAME_CHECKPOINTS),
        PLANNED: ours,
    }
    side = sides.get(name) or replace(ours, changes=_only(name.split(" + "), configured or {}))
    if not method.scores_rewards:
        return side

    @contextlib.contextmanager
    def around(trainer: Any) -> Iterator[Any]:
        with learner_alone(trainer), side.around(trainer) as path:
            yield path

    return replace(side, around=around, compares=GRADIENT_NORM)


def features() -> tuple[str, ...]:
    """Return the fields of `FastSFTConfig` that can be switched off one by one."""
    return tuple(name for name, choices in _CHOICES.items() if "off" in choices and name not in NO_FEATURES)


def ablations() -> list[str]:
    """Return the names of sides with all features off, and with each feature and what it needs."""
    return ["off", *(" + ".join((*NEEDS.get(name, ()), name)) for name in features())]


def _only(names: list[str], configured: Mapping[str, str]) -> dict[str, str]:
    """Return fields with only some features on, at their configured value, or ``auto`` if that is ``off``."""
    values = {name: configured.get(name, "auto") for name in names if name != "off"}
    on = {name: "auto" if value == "off" else value for name, value in values.items()}
    return {**dict.fromkeys(features(), "off"), **on, "verify_packing": "off"}


@contextlib.contextmanager
def _tuned(trainer: Any) -> Iterator[str]:
    attention = str(trainer.model.config.get_text_config()._attn_implementation)
    is_half = torch.cuda.is_available() and (trainer.args.bf16 or trainer.args.fp16)
    for version in (3, 2) if is_half and not attention.startswith("flash") else ():
        if getattr(transformers.utils, f"is_flash_attn_{version}_available", bool)():
            attention = f"flash_attention_{version}"
            trainer.model.set_attn_implementation(attention)
            break
    with compiled_regions(trainer):
        yield f"{attention}, {'Liger' if trainer.args.use_liger_kernel else 'no Liger'}, layers compiled by accelerate"


@contextlib.contextmanager
def compiled_regions(trainer: Any, backend: str = "inductor") -> Iterator[None]:
    """Compile the model that is prepared inside, as ``torch_compile=True`` with accelerate's regional compilation does.

    Not through the arguments: accelerate keeps them for the process, and the other sides would be compiled too.
    """
    from accelerate.utils import TorchDynamoPlugin

    accelerator = trainer.accelerator
    prepare = accelerator.prepare_model

    def compiling(*args: Any, **kwargs: Any) -> Any:
        plugin = TorchDynamoPlugin(backend=backend, use_regional_compilation=True)
        with patch_attribute(accelerator.state, "dynamo_plugin", plugin):
            return prepare(*args, **kwargs)

    with patch_attribute(accelerator, "prepare_model", compiling):
        yield
