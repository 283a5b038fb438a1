"""The limits of an activation plan: the largest row, later allocations, and free memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import psutil
import torch

from fastpack_trl.checkpointing.streams import GIB
from fastpack_trl.measure.device_memory import allocatable
from fastpack_trl.model import sharded
from fastpack_trl.model.facts import text_model
from fastpack_trl.model.walk import modules_of, parameters_of
from fastpack_trl.packing.batching import has_images
from fastpack_trl.run import MERGED_ROW_TOKENS, Run

MARGIN = 0.9
"""Of the free memory; the allocator's gaps and what no pass counts need the rest: 60 predicted peaks were a median of
7 % above the measured ones, a quarter of them 3 % or more below."""
MARGIN_WITHOUT_RETRY = 0.8
"""The same where a step that runs out of memory ends the run: several processes, and trainers other than SFT's."""
MARGIN_OF_IMAGES = 0.65
"""The same for steps on images: no two have the same sizes, which leaves gaps in what torch holds. Not measured."""
HEAD_BYTES = 12
"""Per token and hidden unit: the last norm and its input at two bytes, their gradients at four, two of these alive."""


def largest_row(run: Run, *, merges: bool) -> tuple[int, int]:
    """Return the tokens of the largest row, and of its longest document; micro-batches may be merged if `merges`.

    Raises:
        ValueError: rows of any length.
    """
    if run.image_rows is not None:
        return run.image_rows.limit * int(run.args.per_device_train_batch_size), run.image_rows.longest
    most, facts = run.max_length, run.facts
    longest = most if facts is None or not facts.longest else min(most or 2**62, facts.longest)
    if longest is None:
        if has_images(run.trainer):
            fix = "set max_length, or image_row_tokens if the collator is TRL's"
            raise ValueError(f"rows of images may have any length: {fix}")
        raise ValueError("max_length=None, or a trainer without it: rows may have any length")
    return row_tokens(run.args, most, longest, run.sequences, merges=merges), int(longest)


def limits(args: Any) -> str:
    """Return the name of the field that limits rows."""
    return "max_length" if getattr(args, "image_row_tokens", None) is None else "image_row_tokens"


def row_tokens(args: Any, most: int | None, longest: int, sequences: int = 1, *, merges: bool) -> int:
    """Return the tokens of the largest row, of documents of up to `longest` tokens and rows cut at `most`."""
    row = most if getattr(args, "packing", False) and most is not None else longest
    tokens = int(args.per_device_train_batch_size * sequences * row)
    return max(tokens, min(tokens * args.gradient_accumulation_steps, MERGED_ROW_TOKENS)) if merges else tokens


def memory_to_come(run: Run) -> int:
    """Return the bytes of gradients and optimizer state that do not exist yet, and what FSDP gathers in a step."""
    parameters = [p for p in parameters_of(run.model) if p.requires_grad]
    held = [sharded.local(p) for p in parameters]
    gradients = sum(own.nbytes for p, own in zip(parameters, held, strict=True) if p.grad is None)
    if run.is_fsdp2:
        gradients += sharded.gathered_bytes(run.model, (run.compute_dtype or torch.float32).itemsize)
        if run.args.gradient_accumulation_steps > 1:  # resharded only at the end of the step
            gradients += sum(4 * p.numel() for p in parameters)
    optimizer = run.trainer.optimizer
    if optimizer is not None and getattr(optimizer, "state", None):
        return gradients
    return gradients + sum(own.numel() * state_bytes(run.args.optim, own.element_size()) for own in held)


def state_bytes(optim: Any, width: int) -> int:
    """Return the bytes that an optimizer keeps on the device for a weight of `width` bytes: two moments at most."""
    name = str(getattr(optim, "value", optim)).lower()
    return 2 if "8bit" in name else 0 if "paged" in name or "sgd" in name or "adafactor" in name else 2 * width


def free_bytes(device: torch.device) -> int:
    """Return the bytes that a run can still allocate on its device."""
    return allocatable(device) if device.type == "cuda" else int(psutil.virtual_memory().available)


def budget_bytes(run: Run, asked: float | None, say: Callable[[str], None], *, of_images: bool = False) -> int:
    """Return the bytes for activations in this process: `asked` GiB, at most the free memory."""
    without_retry = MARGIN_OF_IMAGES if of_images else MARGIN_WITHOUT_RETRY
    margin = MARGIN if run.ranks.count == 1 and run.kind == "sft" else without_retry
    there = max(0, int((free_bytes(run.device) - memory_to_come(run)) * margin))
    if asked is not None and asked * GIB > there:
        say(f"activation_memory_gib={asked:g} is more than the {there / GIB:.1f} GiB that are free: planned for those")
    return int(there if asked is None else min(there, asked * GIB))


def head_bytes(model: torch.nn.Module, tokens: int) -> int:
    """Return the memory of the last norm and the head over a row, which no budget of the layers has."""
    hidden: int = text_model(model).config.get_text_config().hidden_size
    return tokens * hidden * HEAD_BYTES


def largest_dense(model: torch.nn.Module) -> int:
    """Return the bytes of the largest 4-bit weight once it is made dense, for one use at a time."""
    # Never `module.weight`: of a parametrized module that computes, and may move its buffers.
    holders = [*modules_of(model), *parameters_of(model)]
    states = filter(None, (getattr(held, "quant_state", None) for held in holders))
    return max((math.prod(state.shape) * state.dtype.itemsize for state in states), default=0)
