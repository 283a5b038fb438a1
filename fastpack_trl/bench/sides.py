"""The sides of a comparison: TRL as installed, or compiled, and fastpack."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers.utils

from fastpack_trl.bench.learner import learner_alone
from fastpack_trl.bench.watch import GRADIENT_NORM, LOSS, SETTLING, SideResult, Watch, run_side
from fastpack_trl.errors import UserError
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.recipe.methods import SFT, Method

STOCK, COMPILED, OURS, PLANNED = SIDES = "stock", "stock_compiled", "fastpack", "fastpack_plan"
LONG_RUN = 10_000
"""``max_steps``, so that features that pay off in a long run are on."""
Build = Callable[..., Any]
"""``build(trainer_class, config_class, **changes)`` returns a new trainer; see `compare`."""
LONG = {"max_steps": LONG_RUN, "report_to": "none", "save_strategy": "no", "eval_strategy": "no", "disable_tqdm": True}
"""Fields of every side: the watch ends the run; nothing is written."""


def train_side(
    build: Build, name: str, method: Method = SFT, *, warmup: int, timed: int, gate: int, seed: int
) -> SideResult:
    """Build the trainer of a side and train it under a `Watch`.

    - ``stock``: TRL's trainer as installed and configured.
    - ``stock_compiled``: the same with the best flash-attn that is installed, Liger's kernels if they load, and decoder
      layers compiled through accelerate.
    - ``fastpack``: ours, which recomputes what `gradient_checkpointing` says, as TRL does.
    - ``fastpack_plan``: ours as configured, which recomputes only what memory requires.
    """
    cuda = torch.cuda.is_available()
    trainer_class, config_class = method.of_trl if name in (STOCK, COMPILED) else method.classes
    changes: dict[str, Any] = {}
    if name == OURS:
        changes = {"activation_memory": "off", "checkpoint_offload": "off"}
    elif name == COMPILED and cuda and transformers.utils.is_liger_kernel_available():
        changes = {"use_liger_kernel": True}
    watch = Watch(warmup=warmup, timed=timed, gate=gate, settling=SETTLING * cuda, profiled=3, count_syncs=True)
    watch.result.compares = GRADIENT_NORM if method.scores_rewards else LOSS

    def checked() -> Any:
        trainer = build(trainer_class, config_class, **LONG, **changes)
        if not isinstance(trainer, trainer_class):
            wanted, returned = trainer_class.__name__, type(trainer).__name__
            raise UserError(f"build must return its first argument's type, {wanted}; it returned {returned}")
        if (steps := trainer.args.max_steps) != LONG_RUN:
            fix = "make the configuration by config_class(**(settings | changes))"
            raise UserError(f"build ignored max_steps={LONG_RUN} (its trainer has {steps}): {fix}")
        if trainer.args.world_size > 1 or trainer.args.n_gpu > 1:
            raise UserError("the comparison runs on one device and in one process: set CUDA_VISIBLE_DEVICES=0")
        watch.result.setting = _setting_of(trainer)
        return trainer

    @contextlib.contextmanager
    def around(trainer: Any) -> Iterator[Any]:
        learner = learner_alone(trainer) if method.scores_rewards else contextlib.nullcontext()
        with learner, _compiled(trainer) if name == COMPILED else contextlib.nullcontext() as path:
            yield path

    return run_side(checked, watch, around=around, seed=seed)


def _setting_of(trainer: Any) -> str:
    """Return the run in a line, without names of paths: ``qwen3, 4 layers of 192, LoRA, checkpointing, ...``."""
    args, model = trainer.args, trainer.model
    config = model.config.get_text_config()
    parts = [
        f"{config.model_type}, {config.num_hidden_layers} layers of {config.hidden_size}",
        "4-bit" if getattr(model, "is_loaded_in_4bit", False) else "",
        "LoRA" if getattr(model, "peft_config", None) else "",
        "checkpointing" if args.gradient_checkpointing else "no checkpointing",
        f"{args.per_device_train_batch_size} x {args.gradient_accumulation_steps} rows per step",
        f"max_length {args.max_length}" if getattr(args, "max_length", None) else "",
    ]
    return ", ".join(filter(None, parts))


@contextlib.contextmanager
def _compiled(trainer: Any) -> Iterator[str]:
    """Choose the best attention and compile the layers; yield a readable description of what runs."""
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
