"""The option `moe`, with `moe_quantize_experts`: mixture-of-experts layers on our path."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate.logging import get_logger

from fastpack_trl.features.feature import Stock
from fastpack_trl.kernels._triton import is_supported
from fastpack_trl.model.changes import remarked
from fastpack_trl.moe.apply import apply_moe, refuses_capture
from fastpack_trl.moe.layout import experts_modules
from fastpack_trl.moe.quantized import has_quantized_experts, quantize_experts
from fastpack_trl.run import SHARDED, Run

logger = get_logger(__name__)


def quantize(run: Run, model: Any, device: torch.device | None = None) -> None:
    """Store frozen expert stacks in 4 bits on `device` if the run asks for it, before TRL moves the model there."""
    if run.settings.moe_quantize_experts == "on" and not run.disabled:
        done = quantize_experts(model, device)
        run.report.facts.setdefault("quantized experts", str(done))  # a second call finds nothing left to do


def choose_experts(run: Run) -> None:
    """Let `cuda_graph` ask whether it may record the experts, whichever path they take."""
    run.refuses_experts = partial(refuses_capture, run.model)


def concerns(run: Run) -> bool:
    """Return whether there are experts, or the run insists; a separate evaluation runs transformers' path.

    PEFT's own forward fails on 4-bit stacks, so they run on our path in evaluation too.
    """
    present = bool(experts_modules(run.model))
    runs = run.training or (present and has_quantized_experts(run.model))
    return runs and (present or run.settings.moe == "on")


def why_not(run: Run) -> Iterator[object]:
    """Yield why transformers' path runs.

    Raises:
        ValueError: the stacks are in 4 bits, and another setting selects transformers' path.
    """
    yield not experts_modules(run.model) and "the model has no experts that transformers dispatches"
    quantized = has_quantized_experts(run.model)
    for why in filter(None, _reasons(run, quantized)):
        if quantized:
            requested = _requested(run)
            remove = "moe_quantize_experts" if requested is None else "experts_implementation, or moe_quantize_experts"
            raise ValueError(
                f"moe_quantize_experts='on': {why}, and TRL's experts cannot train in 4 bits; on several GPUs use DDP "
                f"(accelerate_config: multi_gpu), otherwise remove {remove}"
            )
        yield why if run.settings.moe == "off" else Stock(why)


def _reasons(run: Run, quantized: bool) -> Iterator[str]:
    setting, requested = run.settings.moe, _requested(run)
    if setting == "off":
        yield "switched off"
    if run.is_sharded and not run.is_fsdp2:
        yield SHARDED
    if requested is not None and setting != "on":
        yield f"experts_implementation={requested!r} was chosen"
    if setting == "auto" and not quantized:
        yield _lacks_kernels(run)


def _requested(run: Run) -> str | None:
    named: str | None = (run.args.model_init_kwargs or {}).get("experts_implementation")
    return named


def _lacks_kernels(run: Run) -> str:
    lacks = run.device.type == "cuda" and not is_supported(run.device)
    return "its kernels need compute capability 8.0; moe='on' runs it in plain torch" if lacks else ""


@contextmanager
def install(run: Run) -> Iterator[None]:
    """Run mixture-of-experts layers on our path, with LoRA on their stacks unless ``lora="off"``."""
    with apply_moe(run.model, lora=run.settings.lora != "off", force=run.settings.moe == "on") as applied:
        for warning in applied.warnings:
            logger.warning(warning)
        if applied.active:
            reason = "; ".join(filter(None, [applied.summary(), _lacks_kernels(run)]))
            run.set_status("moe", "on", "fastpack", reason)
        else:
            run.set_status("moe", "stock", "stock", applied.summary().removeprefix("stock: "))
        with remarked(experts_modules(run.model).values(), partial(run.report.remark, "moe")):
            yield
