"""The option `lora`: LoRA projections with few kernels, during training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from fastpack_trl.features.feature import Stock
from fastpack_trl.lora.linear import make_fast
from fastpack_trl.lora.report import has_lora
from fastpack_trl.model.changes import patch_attribute, remarked
from fastpack_trl.model.walk import parameters_of
from fastpack_trl.run import SHARDED, Run


def concerns(run: Run) -> bool:
    """Return whether the model has LoRA layers, or the run insists."""
    return has_lora(run.model) or run.settings.lora == "on"


def why_not(run: Run) -> Iterator[object]:
    """Yield why PEFT's forward runs."""
    yield not has_lora(run.model) and "the model has no LoRA layers"
    yield run.is_sharded and not run.is_fsdp2 and Stock(SHARDED)
    adapters, others = (
        {str(p.dtype) for p in parameters_of(run.model) if p.requires_grad is own and p.is_floating_point()}
        for own in (True, False)
    )
    # Without autocast an input in the dtype of the adapters is needed, which no layer can have.
    apart = run.compute_dtype is None and others and not (run.is_deepspeed or adapters & others)
    yield apart and Stock(f"adapters in {', '.join(adapters)}, others in {', '.join(others)}; bf16=True would be fast")


@contextmanager
def install(run: Run) -> Iterator[None]:
    """Use the fast forward for LoRA layers during training; a separate evaluation runs PEFT's."""
    # FSDP 2 gathers new tensors each time and DeepSpeed casts them, so a copy would never be used.
    copies = not (run.settings.frozen_base == "fp8" or run.is_fsdp2 or run.is_deepspeed)
    applied = make_fast(run.model, run.compute_dtype, copies=copies)
    try:
        fast = applied.fast or applied.already
        holds = bool(fast) or not applied.handed_over  # LoRA on stacked parameters only belongs to `moe`
        run.set_status("lora", "on" if fast else "stock", "fast" if fast else "PEFT", str(applied), holds)
        with patch_attribute(run, "lora", applied), remarked(applied.modules, partial(run.report.remark, "lora")):
            yield
    finally:
        if applied.fast:  # known only after training: it depends on the layers' inputs
            run.set_status("lora", "on", "fast, PEFT call by call" if applied.call_by_call else "fast", str(applied))
        applied.revert()
