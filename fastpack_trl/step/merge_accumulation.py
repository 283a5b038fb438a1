"""The feature `merge_accumulation`: micro-batches of a step as fewer rows, up to a length that is chosen here."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch

from fastpack_trl.errors import first_reason
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.facts import ALORA, is_invoked_once_per_row
from fastpack_trl.model.hooks import (
    BATCH_METHODS,
    callback_between,
    hook_inside,
    hook_on_a_gradient,
    replaced_methods,
)
from fastpack_trl.run import DEEPSPEED, MERGED_ROW_TOKENS, Run
from fastpack_trl.step.accumulation import FEATURE, Merging, longest_row

CPU_ROW_NUMBERS = 1 << 17
"""Hidden states (tokens x hidden size) of a row up to which ``auto`` merges on the CPU: 512 KiB in fp32.

Measured with LoRA, 4 to 12 layers, hidden sizes of 32 to 256: steps are 1.2 to 1.8 times faster up to there; at four to
eight times as many the longer row has left the cache, and they take 1.3 to 1.8 times longer.
"""


@contextlib.contextmanager
def merge_accumulation(run: Run) -> Iterator[None]:
    """Run the micro-batches of an optimizer step as fewer, longer rows; needs the losses of `sync_free`."""
    setting = run.settings.merge_accumulation
    # A joint decision: under FSDP 2 `Merging` uses collectives, and hooks or callbacks may exist on one rank only.
    why = run.ranks.first_reason(lambda: first_reason(_reasons(run)))
    if why:
        run.set_status(FEATURE, "off", "stock", why, holds=run.args.gradient_accumulation_steps == 1)
        yield
        return
    target = _row_tokens(run) if setting == "auto" else math.inf
    rows = f"rows of up to {target:,.0f} tokens" if setting == "auto" else "one row per optimizer step"
    reason = f"{run.args.gradient_accumulation_steps} micro-batches per optimizer step"
    if run.device.type == "cuda":
        reason += "; as far as memory allows, measured in the first step"
    if draws_numbers(run.model):
        reason += "; dropout and jitter draw other random numbers"
    run.set_status(FEATURE, "on", rows, reason)
    merging = Merging(run, target)
    with run.keeping(merging), patch_attribute(run, "measures_first_step", merging.memory is not None):
        yield


def _row_tokens(run: Run) -> int:
    """Return the tokens up to which ``auto`` fills a row; 0 if no length is known to help."""
    hidden = int(run.model.config.get_text_config().hidden_size)
    return {"cuda": MERGED_ROW_TOKENS, "cpu": CPU_ROW_NUMBERS // hidden}.get(run.device.type, 0)


def _reasons(run: Run) -> Iterator[object]:
    """Yield why micro-batches run one by one in this run."""
    trainer, setting, attention = run.trainer, run.settings.merge_accumulation, run.attention_path
    args, device = run.args, run.device.type
    yield setting == "off" and "switched off"
    yield args.gradient_accumulation_steps == 1 and "gradient_accumulation_steps is 1"
    yield run.is_deepspeed and DEEPSPEED
    yield not run.loss_is_ours and "loss and metrics per micro-batch need sync_free"
    dense = attention == "sdpa" and setting == "auto"
    yield dense and f"the dense mask of {attention} grows with the square of a row"
    yield (own := replaced_methods(trainer, BATCH_METHODS)) and f"{own} may expect one micro-batch"
    alike = run.is_sharded and not run.is_fsdp2
    yield alike and "sharded parameters need as many forward passes on each rank"
    endless = run.is_fsdp2 and math.isinf(longest_row(run))
    yield endless and "max_length=None: FSDP needs as many forward passes on each rank, and rows may have any length"
    yield not trainer.model_accepts_loss_kwargs and "the loss is a mean per micro-batch"
    yield callback_between(trainer)
    yield hook_on_a_gradient(trainer.model, trainer.model.parameters())
    yield (hook := hook_inside(trainer.model)) and f"{hook} runs once per micro-batch"
    yield is_invoked_once_per_row(trainer.model) and ALORA
    yield drops_layers(trainer.model) and "layerdrop would drop a layer for all micro-batches of a row"
    yield args.neftune_noise_alpha and "NEFTune's noise depends on the length of a row"
    optim = str(getattr(args.optim, "value", args.optim))
    yield "lomo" in optim.lower() and f"optim={optim!r} steps in the backward pass"
    yield rope_follows_length(trainer.model) and "the rotary embedding depends on the longest document of a row"
    if setting == "auto":
        yield not _row_tokens(run) and f"no row length is known to help on {device}"
        two_rows = 2 * (args.max_length or 0) * args.per_device_train_batch_size if args.packing else 0
        most = _row_tokens(run)
        yield two_rows > most and f"two rows are more than the {most:,} tokens up to which it helps on {device}"


def rope_follows_length(model: Any) -> bool:
    """Return whether the rotation of a document depends on the longest one (``dynamic`` and ``longrope`` scaling)."""
    types: set[Any] = set()
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        types |= set(kind.values()) if isinstance(kind, dict) else {kind}
    return not types.isdisjoint({"dynamic", "longrope"})


def drops_layers(model: Any) -> bool:
    """Return whether training drops whole layers at random (``layerdrop``)."""
    config = model.config.get_text_config()
    return any(getattr(config, name, 0) for name in ("layerdrop", "decoder_layerdrop"))


def draws_numbers(model: Any) -> bool:
    """Return whether `model` draws random numbers in training: dropout, or noise in a router of experts."""
    config = model.config.get_text_config()
    jitters = any(getattr(config, name, 0) for name in ("router_jitter_noise", "input_jitter_noise"))
    return jitters or any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())
