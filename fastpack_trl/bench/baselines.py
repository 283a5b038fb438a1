"""The named sides of a comparison of trainers: stock as installed, stock tuned, the per-layer rebuild, and fastpack."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import transformers.utils

from fastpack_trl.bench.learner import learner_alone
from fastpack_trl.bench.parity import GRADIENT_NORM, LOSS
from fastpack_trl.bench.rebuild import rebuild_per_layer
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.recipe.methods import SFT, Method

STOCK, TUNED, REBUILD, OURS, PLANNED = SIDES = "stock", "tuned", "rebuild", "fastpack", "fastpack_plan"
SAME_CHECKPOINTS = {"activation_memory": "off", "checkpoint_offload": "off"}
"""Fields with which a side recomputes as `gradient_checkpointing` says, as stock does."""


def _as_built(trainer: Any) -> AbstractContextManager[str]:
    return contextlib.nullcontext(_attention(trainer))


@dataclass(frozen=True, slots=True)
class SideRecipe:
    """The recipe of one side: its classes, its fields, and the context around its training.

    Attributes:
        trainer_class, config_class: what `build` is asked for.
        changes: fields of the configuration that make it this side.
        around: entered in the thread that trains, before `train`; yields the name of the path.
        compares: what the gate compares, `LOSS` or `GRADIENT_NORM`.
        made_up: what is not the run's own.
    """

    trainer_class: Any
    config_class: Any
    changes: Mapping[str, Any] = field(default_factory=dict)
    around: Callable[[Any], AbstractContextManager[str]] = _as_built
    compares: str = LOSS
    made_up: str = ""

    def of_the_learner(self) -> SideRecipe:
        """Return this recipe for a trainer that generates, whose learner alone is timed.

        Its loss is of advantages, which sum to zero, times ratios of the model to itself, which are one.
        """

        @contextlib.contextmanager
        def around(trainer: Any) -> Iterator[str]:
            with learner_alone(trainer), self.around(trainer) as path:
                yield path

        return replace(self, around=around, compares=GRADIENT_NORM, made_up="completions and rewards")


def recipe_of(name: str, method: Method = SFT) -> SideRecipe:
    """Return the recipe of a side of `SIDES`, for the trainers of a method.

    - ``stock``: `trl.SFTTrainer` as installed, as the configuration says.
    - ``tuned``: the same with flash-attn where it is installed, Liger's kernels where they load, and decoder layers
      compiled through accelerate. Dtype and checkpointing are the configuration's, as on every side.
    - ``rebuild``: stock with packing metadata and mask made again in each layer.
    - ``fastpack``: `FastSFTTrainer`, which recomputes what `gradient_checkpointing` says, as stock.
    - ``fastpack_plan``: `FastSFTTrainer` with every field as configured: on CUDA it recomputes as the memory asks, and
      of that has what the other sides leave free; in a process of its own (``--isolate``) all of it.
    """
    stock, ours = method.of_trl, method.classes
    liger = {} if liger_missing("cuda" if torch.cuda.is_available() else "cpu") else {"use_liger_kernel": True}
    recipe = {
        STOCK: SideRecipe(*stock),
        TUNED: SideRecipe(*stock, liger, _tuned),
        REBUILD: SideRecipe(*stock, {}, _rebuilt),
        OURS: SideRecipe(*ours, SAME_CHECKPOINTS),
        PLANNED: SideRecipe(*ours),
    }[name]
    return recipe.of_the_learner() if method.scores_rewards else recipe


def liger_missing(device: str) -> str:
    """Return why Liger's kernels cannot run; empty if they can."""
    from transformers.utils import is_liger_kernel_available

    if device != "cuda":
        return f"no Liger (Triton has no kernels for {device})"
    return "" if is_liger_kernel_available() else "no Liger (not installed)"


def _attention(trainer: Any) -> str:
    return str(trainer.model.config.get_text_config()._attn_implementation)


@contextlib.contextmanager
def _rebuilt(trainer: Any) -> Iterator[str]:
    with rebuild_per_layer(trainer.model):
        yield f"{_attention(trainer)}, mask and metadata in each layer"


def _is_installed(name: str) -> bool:
    available = getattr(transformers.utils, f"is_flash_attn_{name[-1]}_available", None)
    return available is not None and bool(available())


@contextlib.contextmanager
def _tuned(trainer: Any) -> Iterator[str]:
    device = torch.device(trainer.args.device).type
    if device == "cuda" and (trainer.args.bf16 or trainer.args.fp16):
        best = next(filter(_is_installed, ("flash_attention_3", "flash_attention_2")), None)
        if best is not None and not _attention(trainer).startswith("flash"):
            trainer.model.set_attn_implementation(best)
    with compiled_regions(trainer):
        yield f"{_attention(trainer)}, {liger_missing(device) or 'Liger'}, layers compiled by accelerate"


@contextlib.contextmanager
def compiled_regions(trainer: Any, backend: str = "inductor") -> Iterator[None]:
    """Compile the model that is prepared inside, as ``torch_compile=True`` with accelerate's regional compilation does.

    Not through the arguments: accelerate keeps them for the process, and the other sides would be compiled too. For the
    same reason it ends once this trainer's model is prepared: others may be prepared before its training ends.
    """
    from accelerate.utils import TorchDynamoPlugin

    accelerator, state = trainer.accelerator, trainer.accelerator.state
    prepare = accelerator.prepare_model

    def compiling(*args: Any, **kwargs: Any) -> Any:
        plugin = TorchDynamoPlugin(backend=backend, use_regional_compilation=True)
        with patch_attribute(state, "dynamo_plugin", plugin):
            return prepare(*args, **kwargs)

    with patch_attribute(accelerator, "prepare_model", compiling):
        yield
