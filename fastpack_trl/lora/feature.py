"""The feature `lora`: LoRA projections with few kernels, during training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from fastpack_trl.lora.linear import make_fast
from fastpack_trl.lora.report import has_lora
from fastpack_trl.model.changes import remarked
from fastpack_trl.run import SHARDED, Run


@contextmanager
def lora(run: Run) -> Iterator[None]:
    """Use the fast forward for LoRA layers during training; a separate evaluation runs PEFT's."""
    setting, present = run.settings.lora, has_lora(run.model)
    if not run.training or not (present or setting == "on"):
        yield
        return
    why = "" if present else "the model has no LoRA layers"
    if setting == "off":
        why = "switched off"
    elif run.is_sharded and not run.is_fsdp2:
        why = SHARDED
    tensors = [p for p in run.model.parameters() if p.is_floating_point()]
    adapters, others = ({str(p.dtype) for p in tensors if p.requires_grad is own} for own in (True, False))
    # Without autocast an input in the dtype of the adapters is needed.
    if run.compute_dtype is None and others and not (run.is_deepspeed or adapters & others):
        why = why or f"adapters in {', '.join(adapters)}, others in {', '.join(others)}; bf16=True would be fast"
    if why:
        run.set_status("lora", "stock" if present and setting != "off" else "off", "PEFT", why)
        yield
        return
    # FSDP 2 gathers new tensors each time and DeepSpeed casts them, so a copy would never be used.
    copies = not (run.settings.frozen_base == "fp8" or run.is_fsdp2 or run.is_deepspeed)
    applied = make_fast(run.model, run.compute_dtype, copies=copies)
    try:
        fast = applied.fast or applied.already
        holds = bool(fast) or not applied.handed_over  # LoRA on stacked parameters only belongs to `moe`
        run.set_status("lora", "on" if fast else "stock", "fast" if fast else "PEFT", str(applied), holds)
        with run.keeping(applied), remarked(applied.modules, partial(run.report.remark, "lora")):
            yield
    finally:
        if applied.call_by_call:  # known only after training: it depends on the layers' inputs
            run.set_status("lora", "on", "fast, PEFT call by call", str(applied))
        applied.revert()
