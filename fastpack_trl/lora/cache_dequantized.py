"""The feature `cache_dequantized`: dense copies of frozen LoRA bases, where the memory of a run has room for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from fastpack_trl.lora.report import FrozenCopies, LoraReport
from fastpack_trl.run import DEEPSPEED, SHARDED, Run


@contextmanager
def cache_dequantized(run: Run) -> Iterator[None]:
    """Keep dense copies of frozen LoRA bases, in what the plan of the activations leaves of its budget.

    They come before CUDA graphs: their gain is sure, and of models whose copies take more than a graph the device is
    busy either way.
    """
    setting, applied = run.settings.cache_dequantized, run.get_state(LoraReport)
    if applied is None or not applied.copies:
        if setting == "on" and run.training:  # asked for by name, so it is said
            why = "every frozen weight of the fast LoRA layers is in the dtype of the run already"
            some = applied is not None and bool(applied.fast)
            run.set_status("cache_dequantized", "off", "per use", why if some else "no LoRA layer is fast", holds=some)
        yield
        return
    if run.is_sharded or run.is_deepspeed:
        run.set_status("cache_dequantized", "off", "per use", SHARDED if run.is_sharded else DEEPSPEED)
        yield
        return
    copies, spare = applied.copies, partial(_drop, run, applied.copies)
    if setting == "auto" and run.step.activations_left is not None:
        copies.keep_in(run.step.activations_left, "left by activation_memory, whose kept layers come first")
        run.step.memory_reclaimers.append(spare)
        run.step.activations_left -= copies.nbytes if copies.kept else 0
    elif setting == "auto":
        copies.keep_where_free()
    _tell(run, copies)
    try:
        yield
    finally:
        if spare in run.step.memory_reclaimers:
            run.step.memory_reclaimers.remove(spare)


def _drop(run: Run, copies: FrozenCopies) -> bool:
    dropped = copies.drop("frozen weights are made per use since a step ran out of memory")
    if dropped:
        run.step.layers_changed()
        _tell(run, copies)
    return dropped


def _tell(run: Run, copies: FrozenCopies) -> None:
    reason = copies.reason or "switched off"
    if copies.kept:
        run.set_status("cache_dequantized", "on", "kept", reason)
    else:
        run.set_status("cache_dequantized", "off", "per use", reason)
