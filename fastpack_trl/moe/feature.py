"""The feature `moe`: mixture-of-experts layers with tokens sorted once, while a trainer trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from accelerate.logging import get_logger
from torch import nn

from fastpack_trl.kernels._triton import is_supported
from fastpack_trl.kernels.grouped import reads_offsets
from fastpack_trl.moe.apply import apply_moe
from fastpack_trl.moe.layout import experts_modules
from fastpack_trl.moe.lora import has_expert_lora
from fastpack_trl.moe.quantised import expert_dtypes, has_quantised_experts
from fastpack_trl.run import SHARDED, Run

logger = get_logger(__name__)


Training = Literal["lora", "frozen", "full"]


MEASURED: frozenset[tuple[str, Training]] = frozenset({("cpu", "lora"), ("cuda", "lora")})
"""Device type and what trains, of the decoder rows of ``benchmarks/results/moe_*.json``: there ours is the faster."""


def what_trains(model: nn.Module) -> Training:
    """Return what is trained of the experts: LoRA on their stacks, the stacks themselves, or nothing."""
    if has_expert_lora(model):
        return "lora"
    stacks = (parameter for module in experts_modules(model).values() for parameter in module.parameters())
    return "full" if any(parameter.requires_grad for parameter in stacks) else "frozen"


def unmeasured(device_type: str, training: Training) -> str:
    """Return that our speed is not known, where it is not: less is kept for backward all the same."""
    experts = "LoRA on experts" if training == "lora" else f"{training} experts"
    known = (device_type, training) in MEASURED
    return "" if known else f"{experts}: speed not measured on {device_type}, moe='off' is stock"


def _reading_sizes(run: Run, dtypes: set[torch.dtype]) -> str:
    """Return why experts in one of `dtypes`, those that transformers dispatches, cannot be in a CUDA graph."""
    for dtype in dtypes:
        if reads_offsets(dtype, run.device):
            capability = ".".join(map(str, torch.cuda.get_device_capability(run.device)))
            return (
                f"grouped products in {str(dtype).removeprefix('torch.')} read their sizes on the host at compute "
                f"capability {capability}"
            )
    return ""


@contextmanager
def moe(run: Run) -> Iterator[None]:
    """Run mixture-of-experts layers on our path, while the model trains; evaluation by itself runs stock's.

    Raises:
        ValueError: the stacks are in four bits, and another setting asks for stock's path.
    """
    setting, model = run.settings.moe, run.model
    present = bool(experts_modules(model))
    run.experts_refuse_capture = partial(_reading_sizes, run, expert_dtypes(model))
    # PEFT's own forward fails on four-bit stacks: they run on our path in evaluation too.
    quantised = present and has_quantised_experts(model)
    if not (run.training or quantised) or not (present or setting == "on"):
        yield
        return
    asked = (run.args.model_init_kwargs or {}).get("experts_implementation")
    why = "" if present else "the model has no experts that transformers dispatches"
    if setting == "off":
        why = "switched off"
    elif run.is_sharded and not run.is_fsdp2:
        why = SHARDED
    elif asked is not None and setting != "on":
        why = f"experts_implementation={asked!r} was chosen"
    note = unmeasured(run.device.type, what_trains(model)) if present else ""
    if present and run.device.type == "cuda" and not is_supported(run.device):
        note = "its kernels need compute capability 8.0; moe='on' runs it in plain torch"
        why = why or (note if setting == "auto" and not quantised else "")
    if why and quantised:
        raise ValueError(
            f"moe_quantize_experts='on': {why}, and stock's experts cannot train in four bits; on several GPUs use DDP "
            "(accelerate_config: multi_gpu), otherwise leave out what chooses stock's, or moe_quantize_experts"
        )
    if why:
        run.set_status("moe", "stock" if present and setting != "off" else "off", "stock", why)
        yield
        return
    with apply_moe(model, lora=run.settings.lora != "off", force=setting == "on") as applied:
        for warning in applied.warnings:
            logger.warning(warning)
        said = "; ".join([applied.summary(), *[note] * bool(applied.active and note)])
        if applied.active:
            run.set_status("moe", "on", "fastpack", said)
        else:
            run.set_status("moe", "stock", "stock", said.removeprefix("stock: "))
        yield
