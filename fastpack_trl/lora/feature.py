"""The feature `lora`: LoRA projections without glue while a trainer trains."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastpack_trl.lora.linear import apply_lora
from fastpack_trl.lora.report import has_lora
from fastpack_trl.run import SHARDED, Run


@contextmanager
def lora(run: Run) -> Iterator[None]:
    """Give LoRA layers the fast forward, while the model trains; evaluation by itself runs PEFT's."""
    setting, present = run.settings.lora, has_lora(run.model)
    if not run.training or not (present or setting == "on"):
        yield
        return
    why = "" if present else "the model has no LoRA layers"
    if setting == "off":
        why = "switched off"
    elif run.is_sharded and not run.is_fsdp2:
        why = SHARDED
    if why:
        run.set_status("lora", "stock" if present and setting != "off" else "off", "PEFT", why)
        yield
        return
    cache = run.settings.cache_dequantized
    # `auto` waits for the plan of the activations, FP8 for its choice of layers. FSDP 2 gathers other tensors each
    # time, DeepSpeed casts them: a copy of one serves nobody.
    fp8 = run.settings.frozen_base == "fp8"
    cache = "off" if cache == "auto" or fp8 or run.is_fsdp2 or run.is_deepspeed else cache
    applied = apply_lora(run.model, cache_dequantized=cache, compute_dtype=run.compute_dtype, fp8_bases=fp8)
    try:
        fast = applied.fast or applied.already
        holds = bool(fast) or not applied.handed_over  # those on stacked parameters alone are of `moe`
        run.set_status("lora", "on" if fast else "stock", "fast" if fast else "PEFT", str(applied), holds)
        with run.keeping(applied):
            yield
    finally:
        if applied.call_by_call:  # known only now: it depends on what the layers were given
            run.set_status("lora", "on", "fast, PEFT call by call", str(applied))
        applied.revert()
