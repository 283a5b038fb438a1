"""The option `merge_accumulation`: the micro-batches of an optimizer step as fewer, longer rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from fastpack_trl.checkpointing.budget import free_bytes, memory_to_come
from fastpack_trl.checkpointing.planned import count_layers, row_bytes
from fastpack_trl.features.feature import Met
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.facts import ALORA, UNREADABLE, dropout_of, drops_layers, is_invoked_once_per_row
from fastpack_trl.model.hooks import BATCH_METHODS, callback_between, hook_on_a_gradient, replaced_methods
from fastpack_trl.packing.batching import has_images
from fastpack_trl.run import MERGED_ROW_TOKENS, Run, looks_inside, steps_in_backward
from fastpack_trl.step.merged_completions import MergedCompletions
from fastpack_trl.step.merging import FEATURE, Merging

_MEMORY_SHARE = 0.7
"""Share of the free device memory that the forward pass of a whole step may take by prediction."""
CPU_ROW_NUMBERS = 1 << 17
"""Hidden states (tokens x hidden size) of a row up to which ``auto`` merges on the CPU: 512 KiB in fp32.

Measured with LoRA, 4 to 12 layers, hidden sizes of 32 to 256: steps are 1.2 to 1.8 times faster up to there; at four to
eight times as many the longer row has left the cache, and they take 1.3 to 1.8 times longer.
"""


@contextmanager
def install(run: Run) -> Iterator[None]:
    """Run the micro-batches of an optimizer step as fewer, longer rows; needs the losses of `sync_free`."""
    setting = run.settings.merge_accumulation
    batches = f"{run.args.gradient_accumulation_steps} micro-batches per optimizer step"
    if run.kind == "online":
        run.set_status(FEATURE, "on", "one row per optimizer step", f"{batches}, shuffled by TRL")
        with patch_attribute(run, "merging", MergedCompletions(run, partial(_lacks_memory, run))):
            yield
        return
    target = _row_tokens(run) if setting == "auto" else math.inf
    rows = f"rows of up to {target:,.0f} tokens" if setting == "auto" else "one row per optimizer step"
    reason = batches
    if run.device.type == "cuda":
        reason += "; as far as memory allows, measured in the first step"
    if noise := dropout_of(run.model):
        reason += f"; {noise} draws other random numbers"
    run.set_status(FEATURE, "on", rows, reason)
    with patch_attribute(run, "merging", Merging(run, target)):
        yield


def _row_tokens(run: Run) -> int:
    """Return the tokens up to which ``auto`` fills a row; 0 if no length is known to help."""
    hidden = int(run.model.config.get_text_config().hidden_size)
    return {"cuda": MERGED_ROW_TOKENS, "cpu": CPU_ROW_NUMBERS // hidden}.get(run.device.type, 0)


def why_not(run: Run) -> Iterator[object]:
    """Yield why micro-batches run one by one in this run."""
    yield run.args.gradient_accumulation_steps == 1 and Met("gradient_accumulation_steps is 1")
    if run.kind == "sft":
        yield from _of_documents(run)
    # No reason stops a run: what TRL generates is not known before its first step.
    yield from (why and Met(why) for why in (_of_completions(run) if run.kind == "online" else ()))


def _of_completions(run: Run) -> Iterator[object]:
    args, trainer = run.args, run.trainer
    yield not run.packs and "batches are padded by TRL"
    yield args.steps_per_generation % args.gradient_accumulation_steps != 0 and (
        f"steps_per_generation={args.steps_per_generation} is not a multiple of gradient_accumulation_steps="
        f"{args.gradient_accumulation_steps}"
    )
    yield run.ranks.count > 1 and "each process reduces its gradients with its last micro-batch only"
    yield getattr(trainer, "aux_loss_enabled", False) and "the auxiliary loss of experts is per micro-batch"
    yield steps_in_backward(args)
    yield callback_between(trainer)
    yield hook_on_a_gradient(run.model, run.model.parameters())


def _lacks_memory(run: Run, tokens: int, width: int) -> str:
    """Return why the micro-batches of a step, `tokens` with padding, do not fit together; ``""`` if they do."""
    free = _MEMORY_SHARE * max(0, free_bytes(run.device) - memory_to_come(run))
    try:
        needed = row_bytes(run, count_layers(run), tokens, width)
    except UNREADABLE as error:
        return f"the memory of the layers cannot be counted: {type(error).__name__}: {error}"
    gib = f"{needed / 2**30:.1f} GiB for the micro-batches of a step, {free / 2**30:.1f} GiB may be taken"
    return gib if needed > free else ""


def _of_documents(run: Run) -> Iterator[object]:
    trainer, setting, attention = run.trainer, run.settings.merge_accumulation, run.attention_path
    args, device = run.args, run.device.type
    yield has_images(trainer) and "images of several micro-batches are not joined"
    yield not run.loss_is_ours and "loss and metrics per micro-batch need sync_free"
    dense = attention == "sdpa" and setting == "auto"
    yield dense and f"the dense mask of {attention} grows with the square of a row"
    yield (own := replaced_methods(trainer, BATCH_METHODS)) and f"{own} may expect one micro-batch"
    yield callback_between(trainer)
    yield from looks_inside(run)
    yield is_invoked_once_per_row(trainer.model) and ALORA
    yield drops_layers(trainer.model) and "layerdrop would drop a layer for all micro-batches of a row"
    if setting == "auto":
        yield not _row_tokens(run) and f"no row length is known to help on {device}"
        two_rows = 2 * (args.max_length or 0) * args.per_device_train_batch_size if args.packing else 0
        most = _row_tokens(run)
        full = f"two rows exceed {most:,} tokens, where one already fills the {device} and a longer one is no faster"
        yield two_rows > most and full
