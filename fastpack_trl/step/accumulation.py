"""Micro-batches of one optimizer step merged into fewer, longer rows: one launch of each kernel instead of many.

The trainer's loop stays as it is. It is given all micro-batches and calls a step for each; those before the last of a
group return a loss of zero without running, the last runs the group as one row and returns the sum of their losses.
So steps, callbacks, token and FLOP counts go on per micro-batch (`fastpack_trl.model.user_code` finds those that could
tell), and under DDP the group that ends the accumulation is the one that reduces the gradients. The NaN filter of the
logged loss looks at each micro-batch of a group.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor
from trl import SFTTrainer

from fastpack_trl.config import setting_of
from fastpack_trl.errors import close_frames
from fastpack_trl.model.hooks import HookWatch, hook_inside
from fastpack_trl.model.user_code import (
    BATCH_METHODS,
    callback_between,
    hook_on_a_gradient,
    once_per_micro_batch,
    replaced_methods,
    trained_parameters,
)
from fastpack_trl.packing.packed_batch import PackedBatch, merge_batches, to_transformers_kwargs
from fastpack_trl.packing.packed_inputs import PackedInputs

logger = get_logger(__name__)

_MEMORY_SHARE = 0.7
"""Of the free device memory that a merged row may fill by prediction; the rest is for fragments and longer rows."""

CUDA_ROW_TOKENS = 8192
"""Tokens of a row up to which ``auto`` merges on CUDA: beyond, kernels take longer than their launches."""

CPU_ROW_NUMBERS = 1 << 17
"""Hidden states (tokens x hidden size) of a row up to which ``auto`` merges on the CPU: 512 KiB in fp32.

Measured with LoRA, 4 to 12 layers, hidden sizes of 32 to 256: steps are 1.2 to 1.8 times faster up to there; at four to
eight times as many the longer row has left the cache, and they take 1.3 to 1.8 times longer.
"""

_Step = Callable[..., Tensor]


def merge_inputs(inputs: Sequence[Any]) -> PackedInputs:
    """The keywords of one row out of those of several (`merge_batches`); tokens and labels follow the documents."""
    batches = [one["packed_batch"] for one in inputs]
    lengths = [sum(batch.seq_lengths) for batch in batches]
    flat = {
        name: torch.cat([one[name][:, :n] for one, n in zip(inputs, lengths, strict=True)], dim=1)
        for name in ("input_ids", "labels")
    }
    batch = merge_batches(batches, flat["labels"])
    return PackedInputs(flat | to_transformers_kwargs(batch) | {"packed_batch": batch})


def can_merge(inputs: Any) -> bool:
    """Whether a micro-batch is one packed row as it was collated, with no keyword besides; its tokens may be others."""
    batch = inputs.get("packed_batch")
    if not isinstance(batch, PackedBatch) or batch.parts:
        return False
    if inputs.keys() != {"input_ids", "labels", "packed_batch", *to_transformers_kwargs(batch)}:
        return False
    return batch.counts(inputs["labels"]) and batch.describes(inputs["input_ids"], inputs["position_ids"])


def group_by_tokens(tokens: Sequence[int], limit: float) -> list[range]:
    """Neighbours together while they are at most `limit` tokens: ``(512, 512, 900, 300), 1024`` -> 0-1, 2, 3."""
    groups: list[range] = []
    start = total = 0
    for place, count in enumerate(tokens):
        if place > start and total + count > limit:
            groups.append(range(start, place))
            start, total = place, 0
        total += count
    return [*groups, range(start, len(tokens))] if tokens else []


class MemoryLimit:
    """Tokens of a row that fit into the memory of a CUDA device, predicted from the first optimizer step.

    That step runs unmerged. Each of its micro-batches but the first, which makes the gradients, gives an upper bound of
    the bytes per token: the peak so far less what was allocated before it. The lowest bound is taken.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes_per_token = math.inf
        self.tokens: float | None = None
        """The prediction; None until `predict`."""

    def observe(self, tokens: int, run: Callable[[], Tensor]) -> Tensor:
        """Run a micro-batch of `tokens` tokens and keep what it took."""
        before = torch.cuda.memory_allocated(self.device)
        loss = run()
        taken = torch.cuda.max_memory_allocated(self.device) - before
        self.bytes_per_token = min(self.bytes_per_token, taken / tokens)
        return loss

    def predict(self, trainer: Any) -> None:
        """Set `tokens`, at the beginning of a step: optimizer states are there, gradients are not. All ranks agree."""
        free, _ = torch.cuda.mem_get_info(self.device)
        free += torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        free -= sum(p.numel() * p.element_size() for p in trainer.model.parameters() if p.requires_grad)
        tokens = max(0.0, _MEMORY_SHARE * free / self.bytes_per_token)
        if trainer.accelerator.num_processes > 1:
            tokens = float(trainer.accelerator.gather(torch.tensor([tokens], device=self.device)).min())
        self.tokens = tokens


class Merging:
    """Decides per optimizer step which micro-batches run as one row, and runs them.

    Args:
        trainer: a `MergingTrainer`.
        target: tokens of a row above which nothing more is added; infinite for as many as fit.
        named: called with the status, path and reason of the report when rows are split again after they ran out of
            memory, or merging ends.
    """

    def __init__(self, trainer: Any, target: float, named: Callable[[str, str, str], object]) -> None:
        self.target = target
        self.named = named
        device = torch.device(trainer.args.device)
        self.memory = MemoryLimit(device) if device.type == "cuda" else None
        self._zero = torch.zeros((), device=device)
        self._ended = False
        self._all_looked_at = False
        self._module_hooks: HookWatch | None = None
        self._step: list[Any] = []
        self._groups: dict[int, range] = {}
        """By the identity of the last micro-batch of each group; the trainer keeps all of a step alive."""

    def plan(self, trainer: Any, batches: list[Any], num_items_in_batch: Any) -> None:
        """Choose the groups of one optimizer step.

        Without the number of tokens of the whole step each loss is a mean over its micro-batch: they cannot be merged.
        """
        self._step, self._groups = batches, {}
        if self.memory is not None and self.memory.tokens is None and math.isfinite(self.memory.bytes_per_token):
            self.memory.predict(trainer)
        fits = self.memory.tokens if self.memory is not None else math.inf
        if self._ended or len(batches) < 2 or num_items_in_batch is None or fits is None:
            return
        if not all(map(can_merge, batches)):
            trainer.fastpack_report.remark("merge_accumulation", "micro-batches changed after collation run one by one")
            return
        tokens = [sum(batch["packed_batch"].seq_lengths) for batch in batches]
        for group in group_by_tokens(tokens, min(self.target, fits)):
            self._groups[id(batches[group[-1]])] = group

    def run(self, trainer: Any, stock: _Step, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """One call of the trainer's loop: nothing, a group, or a micro-batch by itself."""
        if self._groups and inputs is self._step[0]:
            self._look_for_watchers(trainer)  # callbacks have begun the step
        group = self._groups.get(id(inputs))
        if group is None and self._groups:
            return self._zero  # runs with the last of its group
        if group is None or len(group) == 1:
            if self.memory is None or self.memory.tokens is not None or not self._step or inputs is self._step[0]:
                return stock(model, inputs, *args, **kwargs)
            tokens = inputs["input_ids"].numel() if "input_ids" in inputs else 0
            if not tokens:
                return stock(model, inputs, *args, **kwargs)
            return self.memory.observe(tokens, lambda: stock(model, inputs, *args, **kwargs))
        metrics = trainer.fastpack_step.metrics
        kept = len(metrics)
        merged = merge_inputs([self._step[place] for place in group])
        try:
            return stock(model, merged, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            close_frames(error)
            if trainer.accelerator.num_processes > 1:
                # The other ranks wait in a reduction that this one cannot join again.
                raise
        finally:
            merged["packed_batch"].clear_derived()
        merged.clear()
        # Past the handler: its exception keeps the frames alive that hold the memory.
        return self._split(trainer, stock, model, group, kept, args, kwargs)

    def _look_for_watchers(self, trainer: Any) -> None:
        """Merge no more in this run if a callback or a hook came that needs single micro-batches."""
        parameters = trained_parameters(trainer.optimizer) if self._all_looked_at else trainer.model.parameters()
        self._all_looked_at = True
        self._module_hooks = self._module_hooks or HookWatch(trainer.model_wrapped)  # wrapped by now
        reason = callback_between(trainer) or hook_on_a_gradient(trainer.model, parameters)
        reason = reason or once_per_micro_batch(self._module_hooks.look())
        if reason:
            logger.warning(f"merge_accumulation: {reason}: micro-batches run one by one from here on")
            self.named("off", "stock", reason)
            self._ended, self._groups = True, {}

    def _split(self, trainer: Any, stock: _Step, model: Any, group: range, kept: int, args: Any, kwargs: Any) -> Tensor:
        """Run the step so far again, one by one, after a group ran out of memory somewhere in its backward pass."""
        tokens = [sum(self._step[place]["packed_batch"].seq_lengths) for place in group]
        self.target = sum(tokens) // 2
        merges = self.target >= min(map(sum, itertools.pairwise(tokens)))
        after = f"rows of at most {self.target:,} tokens from here on" if merges else "micro-batches run one by one"
        reason = f"out of memory in a merged row of {sum(tokens):,} tokens: {after}"
        logger.warning(f"merge_accumulation: {reason}")
        self.named("on", "split again", reason)
        model.zero_grad()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        metrics = trainer.fastpack_step.metrics
        metrics.truncate(kept)
        # The gradients of earlier groups are gone with those of this one; their losses and metrics are counted already.
        for inputs in self._step[: group[0]]:
            stock(model, inputs, *args, **kwargs)
            inputs["packed_batch"].clear_derived()
        metrics.truncate(kept)
        total = self._zero
        for place in group:
            total = total + stock(model, self._step[place], *args, **kwargs)
            self._step[place]["packed_batch"].clear_derived()
        tokens = [sum(one["packed_batch"].seq_lengths) for one in self._step]
        done = group[-1] + 1
        self._groups = {
            id(self._step[done + rest[-1]]): range(done + rest[0], done + rest[-1] + 1)
            for rest in group_by_tokens(tokens[done:], self.target)
        }
        return total


class MergingTrainer(SFTTrainer):
    """Stock as long as `fastpack_merging` is None.

    Attributes:
        fastpack_merging: set around a run by the feature ``merge_accumulation``.
    """

    fastpack_merging: Merging | None = None

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """As `Trainer.get_batch_samples`."""
        batches, num_items_in_batch = super().get_batch_samples(*args, **kwargs)
        if self.fastpack_merging is not None:
            self.fastpack_merging.plan(self, batches, num_items_in_batch)
        return batches, num_items_in_batch

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """As `SFTTrainer.training_step`, for a group of micro-batches where they are merged."""
        if self.fastpack_merging is None:
            return super().training_step(model, inputs, *args, **kwargs)
        return self.fastpack_merging.run(self, super().training_step, model, inputs, *args, **kwargs)


@contextlib.contextmanager
def merge_accumulation(trainer: Any) -> Iterator[None]:
    """The switch: micro-batches of an optimizer step run as fewer, longer rows (`fastpack_trl.features`).

    Entered after `sync_free`, whose losses and metrics it needs.
    """
    if not trainer.fastpack_trains:
        yield
        return
    report, setting = trainer.fastpack_report, setting_of(trainer.args, "merge_accumulation")
    why_not = _why_not(trainer, setting)
    if why_not:
        report.add("merge_accumulation", "off", "stock", why_not)
        yield
        return
    device = torch.device(trainer.args.device).type
    target = _row_tokens(trainer) if setting == "auto" else math.inf
    rows = f"rows of up to {target:,.0f} tokens" if setting == "auto" else "one row per optimizer step"
    reason = f"{trainer.args.gradient_accumulation_steps} micro-batches per optimizer step"
    if device == "cuda":
        reason += "; as far as memory allows, measured in the first step"
    if _has_dropout(trainer.model):
        reason += "; dropout draws other random numbers"
    report.add("merge_accumulation", "on", rows, reason)

    trainer.fastpack_merging = Merging(trainer, target, functools.partial(report.add, "merge_accumulation"))
    try:
        yield
    finally:
        trainer.fastpack_merging = None


def _row_tokens(trainer: Any) -> int:
    """Tokens up to which ``auto`` fills a row; 0 where no length is known to help."""
    device = torch.device(trainer.args.device).type
    hidden = int(trainer.model.config.get_text_config().hidden_size)
    return {"cuda": CUDA_ROW_TOKENS, "cpu": CPU_ROW_NUMBERS // hidden}.get(device, 0)


def _why_not(trainer: Any, setting: str) -> str:
    """Why micro-batches run one by one in this run; empty where they need not."""
    args, attention = trainer.args, trainer.fastpack_report["packed_attention"].path
    step = trainer.fastpack_step
    device = torch.device(args.device).type
    watched = callback_between(trainer) or hook_on_a_gradient(trainer.model, trainer.model.parameters())
    watched = watched or once_per_micro_batch(hook_inside(trainer.model))
    own = replaced_methods(trainer, BATCH_METHODS)
    reasons = {
        "switched off": setting == "off",
        "gradient_accumulation_steps is 1": args.gradient_accumulation_steps == 1,
        "loss and metrics per micro-batch need sync_free": step is None or not step.loss,
        "padded_rows pads each row to its longest document": attention == "padded_rows",
        f"the dense mask of {attention} grows with the square of a row": attention == "sdpa" and setting == "auto",
        f"{own} may expect one micro-batch": bool(own),
        "sharded parameters need as many forward passes on each rank": trainer.is_fsdp_enabled
        or trainer.is_deepspeed_enabled,
        "the loss is a mean per micro-batch": not trainer.model_accepts_loss_kwargs,
        watched: bool(watched),
        "NEFTune's noise depends on the length of a row": bool(args.neftune_noise_alpha),
        f"optim={str(getattr(args.optim, 'value', args.optim))!r} steps in the backward pass": "lomo"
        in str(args.optim).lower(),
        "the rotary embedding depends on the longest document of a row": _rope_follows_length(trainer.model),
        f"no row length is known to help on {device}": setting == "auto" and not _row_tokens(trainer),
        f"two rows are more than the {_row_tokens(trainer):,} tokens up to which it helps on {device}": setting
        == "auto"
        and args.packing
        and args.max_length is not None
        and 2 * args.max_length * args.per_device_train_batch_size > _row_tokens(trainer),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _rope_follows_length(model: Any) -> bool:
    """Whether a document is rotated otherwise beside a long one (``dynamic`` and ``longrope`` scaling)."""
    types: set[Any] = set()
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        types |= set(kind.values()) if isinstance(kind, dict) else {kind}
    return not types.isdisjoint({"dynamic", "longrope"})


def _has_dropout(model: Any) -> bool:
    return any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in model.modules())
