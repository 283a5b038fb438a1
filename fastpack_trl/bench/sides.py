"""The named sides of a comparison: TRL as installed, or compiled, and fastpack."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers.utils

from fastpack_trl.bench.learner import learner_alone
from fastpack_trl.bench.watch import GRADIENT_NORM, LOSS
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.recipe.methods import SFT, Method

STOCK, COMPILED, OURS, PLANNED = SIDES = "stock", "stock_compiled", "fastpack", "fastpack_plan"
SAME_CHECKPOINTS = {"activation_memory": "off", "checkpoint_offload": "off"}
"""Fields with which a side recomputes as `gradient_checkpointing` says, as TRL does."""


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


def side_of(name: str, method: Method = SFT) -> Side:
    """Return a side of `SIDES` for the trainers of a method.

    - ``stock``: TRL's trainer as installed and configured.
    - ``stock_compiled``: the same with the best flash-attn that is installed, Liger's kernels if they load, and decoder
      layers compiled through accelerate.
    - ``fastpack``: ours, which recomputes what `gradient_checkpointing` says, as TRL.
    - ``fastpack_plan``: ours as configured, which recomputes only what the memory requires.
    """
    classes = method.of_trl if name in (STOCK, COMPILED) else method.classes
    has_liger = torch.cuda.is_available() and transformers.utils.is_liger_kernel_available()
    fields: Mapping[str, Mapping[str, Any]] = {
        OURS: SAME_CHECKPOINTS,
        COMPILED: {"use_liger_kernel": True} if has_liger else {},
    }

    @contextlib.contextmanager
    def around(trainer: Any) -> Iterator[Any]:
        with (
            learner_alone(trainer) if method.scores_rewards else contextlib.nullcontext(),
            _compiled(trainer) if name == COMPILED else contextlib.nullcontext() as path,
        ):
            yield path

    return Side(*classes, fields.get(name, {}), around, GRADIENT_NORM if method.scores_rewards else LOSS)


@contextlib.contextmanager
def _compiled(trainer: Any) -> Iterator[str]:
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
def compiled_regions(trainer: Any) -> Iterator[None]:
    """Compile the model that is prepared inside, as ``torch_compile=True`` with accelerate's regional compilation does.

    Not through the arguments: accelerate keeps them for the process, and the other sides would be compiled too.
    """
    from accelerate.utils import TorchDynamoPlugin

    accelerator = trainer.accelerator
    prepare = accelerator.prepare_model

    def compiling(*args: Any, **kwargs: Any) -> Any:
        plugin = TorchDynamoPlugin(backend="inductor", use_regional_compilation=True)
        with patch_attribute(accelerator.state, "dynamo_plugin", plugin):
            return prepare(*args, **kwargs)

    with patch_attribute(accelerator, "prepare_model", compiling):
        yield
