"""The features that `FastSFTTrainer` installs around a run, beside its attention and its batches, in order.

A switch is a context manager over the trainer: entering installs what helps on this model and machine and writes its
line of the report, leaving restores. It reads the trainer and decides; the work is done in the room of the feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.logging import get_logger

from fastpack_trl.checkpointing.activation_memory import activation_memory, checkpoint_offload
from fastpack_trl.compile.layer_compile import layer_compile
from fastpack_trl.config import setting_of
from fastpack_trl.lora.linear import apply_lora, has_lora
from fastpack_trl.model.facts import UNREADABLE, text_model
from fastpack_trl.model.upstream import lacks
from fastpack_trl.moe.apply import apply_moe
from fastpack_trl.moe.layout import experts_modules
from fastpack_trl.moe.measured_speed import measured, what_trains
from fastpack_trl.moe.quantised import has_quantised_experts
from fastpack_trl.step.accumulation import merge_accumulation
from fastpack_trl.step.sync_free import sync_free

logger = get_logger(__name__)

Switch = Callable[[Any], AbstractContextManager[None]]


def enter(stack: ExitStack, switch: Switch, trainer: Any) -> None:
    """Enter `switch` until `stack` closes; where it cannot read the model or lacks a name, stock runs, said once.

    Raises:
        ValueError: the same, of what was switched on by name; or one of its own.
    """
    name = str(getattr(switch, "__name__", switch))
    cause: BaseException | None = None
    reason = "" if name == "sync_free" else lacks(name)  # that one has host work to do all the same
    try:
        if not reason:
            stack.enter_context(switch(trainer))
            return
    except (ValueError, torch.OutOfMemoryError):
        raise
    except (*UNREADABLE, ImportError) as error:
        cause = error
        reason = f"{type(text_model(trainer.model)).__name__} cannot be read: {type(error).__name__}: {error}"
    setting = getattr(trainer.args, name, "auto")
    if setting not in ("auto", "off"):
        raise ValueError(f"{name}={setting!r}: {reason}; set {name}='off'") from cause
    trainer.fastpack_report.add(name, "stock", "stock", reason)
    logger.warning(f"{name}: stock ({reason})")


@contextmanager
def lora(trainer: Any) -> Iterator[None]:
    """LoRA projections without glue, while the model trains; evaluation by itself runs PEFT's."""
    setting, report = setting_of(trainer.args, "lora"), trainer.fastpack_report
    present = has_lora(trainer.model)
    if not trainer.fastpack_trains or not (present or setting == "on"):
        yield
        return
    why = "" if present else "the model has no LoRA layers"
    if setting == "off":
        why = "switched off"
    elif trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        why = "parameters are sharded while the step runs"
    if why:
        report.add("lora", "stock" if present and setting != "off" else "off", "PEFT", why)
        yield
        return
    cache, dtype = setting_of(trainer.args, "cache_dequantized"), trainer.fastpack_compute_dtype
    # `auto` waits for the plan of the activations.
    applied = apply_lora(trainer.model, cache_dequantized="off" if cache == "auto" else cache, compute_dtype=dtype)
    try:
        fast = applied.fast or applied.already
        report.add("lora", "on" if fast else "stock", "fast" if fast else "PEFT", str(applied))
        trainer.fastpack_lora = applied
        yield
    finally:
        trainer.fastpack_lora = None
        if applied.call_by_call:  # known only now: it depends on what the layers were given
            report.add("lora", "on", "fast, PEFT call by call", str(applied))
        applied.revert()


@contextmanager
def cache_dequantized(trainer: Any) -> Iterator[None]:
    """Dense copies of frozen LoRA bases, in what the plan of the activations leaves of its budget."""
    setting = setting_of(trainer.args, "cache_dequantized")
    applied, planned = trainer.fastpack_lora, trainer.fastpack_memory
    if applied is None or not applied.copies:
        if setting == "on" and trainer.fastpack_trains:  # asked for by name, so it is said
            why = "every frozen weight of the fast LoRA layers is in the dtype of the run already"
            why = why if applied is not None and applied.fast else "no LoRA layer is fast"
            trainer.fastpack_report.add("cache_dequantized", "off", "per use", why)
        yield
        return
    if setting == "auto" and planned is not None:
        applied.copies.keep_in(planned.plan.left, "left of the budget of activation_memory")
        planned.spare = partial(_drop_copies, trainer)
    elif setting == "auto":
        applied.copies.keep_where_free()
    _tell_copies(trainer)
    yield


def _drop_copies(trainer: Any) -> bool:
    dropped: bool = trainer.fastpack_lora.copies.drop("frozen weights are made per use since a step ran out of memory")
    if dropped:
        _tell_copies(trainer)
    return dropped


def _tell_copies(trainer: Any) -> None:
    copies = trainer.fastpack_lora.copies
    status, path = ("on", "kept") if copies.kept else ("off", "per use")
    trainer.fastpack_report.add("cache_dequantized", status, path, copies.reason or "switched off")


@contextmanager
def moe(trainer: Any) -> Iterator[None]:
    """Mixture-of-experts layers on our path, while the model trains; evaluation by itself runs stock's.

    Raises:
        ValueError: the stacks are in four bits, and another setting asks for stock's path.
    """
    setting, report = setting_of(trainer.args, "moe"), trainer.fastpack_report
    present = bool(experts_modules(trainer.model))
    # PEFT's own forward fails on four-bit stacks: they run on our path in evaluation too.
    quantised = present and has_quantised_experts(trainer.model)
    wanted = trainer.fastpack_trains or quantised
    if not wanted or not (present or setting == "on"):
        yield
        return
    asked = (trainer.args.model_init_kwargs or {}).get("experts_implementation")
    why = "" if present else "the model has no experts that transformers dispatches"
    if setting == "off":
        why = "switched off"
    elif trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        why = "parameters are sharded while the step runs"
    elif asked is not None and setting != "on":
        why = f"experts_implementation={asked!r} was chosen"
    faster, note = measured(trainer.args.device.type, what_trains(trainer.model)) if present else (True, "")
    if not why and not faster and setting == "auto" and not quantised:
        why = note
    if why and quantised:
        raise ValueError(
            f"moe_quantize_experts='on': {why}, and stock's experts cannot train in four bits; on several GPUs use DDP "
            "(accelerate_config: multi_gpu), otherwise leave out what chooses stock's, or moe_quantize_experts"
        )
    if why:
        report.add("moe", "stock" if present and setting != "off" else "off", "stock", why)
        yield
        return
    with apply_moe(trainer.model, lora=setting_of(trainer.args, "lora") != "off", force=setting == "on") as applied:
        for warning in applied.warnings:
            logger.warning(warning)
        said = "; ".join([*str(applied).splitlines(), *[note] * bool(applied.active)])
        report.add("moe", *(("on", "fastpack") if applied.active else ("stock", "stock")), said)
        yield


@contextmanager
def aux_loss(trainer: Any) -> Iterator[None]:
    """The load-balancing loss of a mixture-of-experts model: all layers at once, where the loss is ours."""
    report = trainer.fastpack_report
    if not getattr(trainer, "aux_loss_enabled", False):
        yield
        return
    given = trainer.args.router_aux_loss_coef is not None
    source = "the arguments" if given else "the model's config (router_aux_loss_coef)"
    reason = f"coefficient {trainer.router_aux_loss_coef:g}, from {source}"
    if trainer.args.gradient_checkpointing and (trainer.args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        reason += "; without effect: reentrant checkpointing drops its gradient, set use_reentrant=False"
        logger.warning(f"aux_loss: {reason}")
    step = trainer.fastpack_step
    if step is not None and step.loss:
        if trainer.args.pad_to_multiple_of:
            reason += "; without the padding of packed rows"
        report.add("aux_loss", "on", "stacked", reason)
    else:
        report.add("aux_loss", "stock", "stock", f"{reason}; as the loss (sync_free)")
    yield


EARLY_SWITCHES: tuple[Switch, ...] = (moe,)
"""Entered before the packing proof runs the model: on four-bit experts PEFT's own forward would fail."""

SWITCHES: tuple[Switch, ...] = (
    lora, sync_free, aux_loss, activation_memory, cache_dequantized, checkpoint_offload, merge_accumulation,
    layer_compile,
)  # fmt: skip
"""Entered from first to last when `train`, `evaluate` or `predict` begins, left in the opposite order."""
