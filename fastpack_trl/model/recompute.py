"""Settings of recomputation and offload that exclude each other, and devices that exclude an offload."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import Trainer

from fastpack_trl.errors import first_reason


def checkpointing_arguments(args: Any) -> tuple[bool, dict[str, Any]]:
    """Return whether a run checkpoints, and with what keywords. transformers 5.23 renamed both arguments."""
    name = "activation_checkpointing" if hasattr(args, "activation_checkpointing") else "gradient_checkpointing"
    return bool(getattr(args, name)), dict(getattr(args, f"{name}_kwargs") or {})


def other_offload(args: Any) -> str:
    """Return which other offload of the same memory a run asks for, with the fix; empty if none."""
    if getattr(args, "activation_offloading", False):
        other = "activation_offloading=True"
    elif checkpointing_arguments(args)[1].get("offload"):
        other = "gradient_checkpointing_kwargs={'offload': True}"
    else:
        return ""
    return f"{other} is another offload of the same memory: leave one of the two out"


def against_plan(args: Any, level: str, offload: str) -> Iterator[object]:
    """Yield the arguments of a run that decide what to keep, in addition to the fields `level` and `offload`."""
    enabled, keywords = checkpointing_arguments(args)
    keywords.pop("use_reentrant", None)  # a level uses False; only DeepSpeed needs True
    yield other_offload(args)
    yield not enabled and "gradient_checkpointing=False keeps all activations"
    yield keywords and f"gradient_checkpointing_kwargs={keywords} decides what is kept"
    yield (
        offload not in ("auto", "off") and level != "offload" and f"checkpoint_offload={offload!r} decides what is kept"
    )
    yield args.torch_compile and "torch_compile=True decides by itself what to keep"


def _against_offload(args: Any) -> Iterator[object]:
    enabled, keywords = checkpointing_arguments(args)
    yield other_offload(args)
    yield not enabled and "gradient_checkpointing=False: without checkpointing no layer input is kept by itself"
    if keywords.get("use_reentrant"):
        yield "use_reentrant=True stores layer inputs where no hook sees them: set it to False"


def check_recompute(args: Any, level: str, offload: str, reasons: Iterator[object] | None = None) -> None:
    """Raise `ValueError` if another setting excludes an explicit level or offload.

    `level` is `activation_memory`, `offload` is `checkpoint_offload`, `reasons` are against a plan.
    """
    asked = level not in ("auto", "off") and (level != "keep" or checkpointing_arguments(args)[0])
    if asked and (conflict := first_reason(reasons or against_plan(args, level, offload))):
        raise ValueError(f"activation_memory={level!r}: {conflict}; leave one of the two out")
    if offload not in ("auto", "off") and (conflict := first_reason(_against_offload(args))):
        raise ValueError(
            f"checkpoint_offload={offload!r}: {conflict}; set checkpoint_offload='auto' to train without it"
        )


def offload_unavailable(device: torch.device) -> str:
    """Return why offloading layer inputs gains nothing on `device`; empty if it may gain."""
    if device.type != "cuda":
        return f"the model is on {device}: there is no device memory to spare and no copy engine"
    if getattr(torch.cuda.get_device_properties(device), "is_integrated", False):
        return f"{torch.cuda.get_device_name(device)} shares its memory with the host: nothing is freed by a copy"
    return ""


def offload_conflict(args: Any, trainer: Trainer | None = None) -> str:
    """Return which setting of a run excludes our offload, with the fix; empty if none does."""
    if (other := other_offload(args)) or trainer is None:
        return other
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed is not tested with the offload, so refused: leave one of them out"
    if trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
        return "FSDP version 1 is not tested with the offload, so refused: set fsdp_version=2, or leave one of them out"
    return ""
