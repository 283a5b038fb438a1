"""`FastGRPOTrainer` and `FastRLOOTrainer`: TRL's, whose learner scores completions on rows with each prompt once.

TRL shuffles what was generated before it cuts it into micro-batches, so that completions of one prompt are in many of
them. The micro-batches of an optimizer step run forward together; TRL's loss runs on each of them by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer

from fastpack_trl.errors import first_reason
from fastpack_trl.measure.device_memory import allocatable
from fastpack_trl.model.facts import learned_positions
from fastpack_trl.packing.batching import BatchPlan
from fastpack_trl.packing.families import Families, find_families
from fastpack_trl.trainers.packed import PackedTrainer

logger = get_logger(__name__)

MERGING = "merge_accumulation"
_MEMORY_SHARE = 0.7
"""Of the free device memory that the forward pass of a whole step may take by prediction."""
_IMAGES = ("pixel_values", "image_grid_thw", "num_images", "token_type_ids", "mm_token_type_ids")

Figures = tuple[Tensor, Tensor | None]
"""Log-probabilities and entropies, (rows, completion tokens)."""


class _OnlineTrainer(PackedTrainer):
    """One that generates; generation, rewards and their metrics are TRL's."""

    _fastpack_window: _Window | None = None
    _fastpack_room = True
    _fastpack_bytes_per_row = 0.0
    _fastpack_why_single = ""

    def _fastpack_plan(self, trainer: Any, path: str, flattens: bool, unproven: str = "") -> BatchPlan:
        if learned_positions(trainer.model) is not None:
            return BatchPlan("stock", "prompts are padded on the left, which shifts learned positions")
        return super()._fastpack_plan(trainer, path, flattens, unproven)

    def _fastpack_enter(self, stack: contextlib.ExitStack) -> None:
        super()._fastpack_enter(stack)
        self._fastpack_rows.entropy_has_gradient = bool(getattr(self, "_entropy_bonus_enabled", False))
        self._fastpack_window = None
        self._fastpack_why_single = first_reason(self._fastpack_against_merging())
        if self.fastpack_run.training:
            why, count = self._fastpack_why_single, self.args.gradient_accumulation_steps
            said = why or f"{count} micro-batches per optimizer step, shuffled by TRL"
            path = "stock" if why else "one row per optimizer step"
            self.fastpack_run.say(MERGING, "off" if why else "on", path, said)

    def _fastpack_against_merging(self) -> Iterator[object]:
        run, args = self.fastpack_run, self.args
        yield getattr(args, MERGING, "auto") == "off" and "switched off"
        yield not run.packs and "batches are stock's"
        yield args.gradient_accumulation_steps == 1 and "gradient_accumulation_steps is 1"
        yield args.steps_per_generation % args.gradient_accumulation_steps != 0 and (
            f"steps_per_generation={args.steps_per_generation} is no multiple of gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps}"
        )
        yield run.ranks.count > 1 and "each process has gradients reduced with its last micro-batch alone"
        yield getattr(self, "aux_loss_enabled", False) and "the auxiliary loss of experts is one per micro-batch"

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return stock's, which begins an optimizer step."""
        found = super().get_batch_samples(*args, **kwargs)
        self._fastpack_window = _Window(len(found[0])) if not self._fastpack_why_single else None
        return found

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute stock's loss of a micro-batch, from the figures of its whole optimizer step."""
        window = self._fastpack_window if self._fastpack_entered and self.model.training else None
        if window is not None and window.figures is None:
            window = self._fastpack_window = self._fastpack_open(window, model, inputs)
        if window is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        with window.serving():
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _fastpack_open(self, window: _Window, model: Any, inputs: Any) -> _Window | None:
        """Run the micro-batches of a step forward; None where they are not the next of TRL's buffer, or lack room."""
        stock: Any = self
        steps, buffered = self.args.steps_per_generation, stock._buffered_inputs
        first = stock._step % steps
        batches = buffered[first : first + window.count]
        known = window.count > 1 and len(batches) == window.count and batches[0] is inputs
        if not known or any(batch.get(name) is not None for batch in batches for name in _IMAGES):
            return None
        rows = sum(len(batch["prompt_ids"]) for batch in batches)
        if not self._fastpack_has_room(rows):
            return None
        names = (("prompt_ids", "completion_ids"), ("prompt_mask", "completion_mask"))
        ids, mask = (
            torch.cat([torch.cat([batch[part] for part in pair], dim=1) for batch in batches]) for pair in names
        )
        keep = batches[0]["completion_ids"].shape[1]
        log_probs, entropy, _ = stock._get_per_token_logps_and_entropies(model, ids, mask, keep, compute_entropy=True)
        window.open((log_probs, entropy), [len(batch["prompt_ids"]) for batch in batches])
        return window

    def _fastpack_has_room(self, rows: int) -> bool:
        """Return whether so many rows fit in memory at once, by what the rows of a micro-batch have taken."""
        device = self.args.device
        if device.type != "cuda" or not self._fastpack_room:
            return self._fastpack_room
        if not self._fastpack_bytes_per_row:
            return False  # the first optimizer step runs one by one, and is measured
        needed, free = rows * self._fastpack_bytes_per_row, _MEMORY_SHARE * allocatable(device)
        self._fastpack_room = needed <= free
        if not self._fastpack_room:
            gib = f"{needed / 2**30:.1f} GiB for the micro-batches of a step, {free / 2**30:.1f} GiB may be taken"
            logger.warning(f"{MERGING}: off: {gib}")
            self.fastpack_report.add(MERGING, "off", "stock", gib)
        return self._fastpack_room

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        window = self._fastpack_window
        if window is not None and window.is_serving:
            return (*window.next(), None)
        stock: Any = super()
        known: list[tuple[Tensor, Families | str]] = []
        if self._fastpack_entered and self.fastpack_run.packs:
            known = self._fastpack_families(input_ids, attention_mask, logits_to_keep, batch_size or len(input_ids))
        with self._fastpack_knowing(known), self._fastpack_measured(len(input_ids)):
            return stock._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs
            )

    @contextlib.contextmanager
    def _fastpack_measured(self, rows: int) -> Iterator[None]:
        """Measure the device memory that a forward pass with a backward pass to come takes, until one was."""
        device = self.args.device
        is_asked = torch.is_grad_enabled() and not (self._fastpack_why_single or self._fastpack_bytes_per_row)
        if device.type != "cuda" or not is_asked:
            yield
            return
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield
        self._fastpack_bytes_per_row = (torch.cuda.max_memory_allocated(device) - before) / rows

    def _fastpack_families(
        self, ids: Tensor, attention_mask: Tensor, logits_to_keep: int, size: int
    ) -> list[tuple[Tensor, Families | str]]:
        """Return the row of each `size` rows of a batch of this learner; reads its tokens and masks, in one copy."""
        tokens, mask = torch.stack([ids, attention_mask.to(ids.dtype)]).cpu()
        scored = mask.clone()
        scored[:, :-logits_to_keep] = 0
        share = not self._fastpack_why_repeated(self.model.training)
        parts = zip(ids.split(size), tokens.split(size), mask.split(size), scored.split(size), strict=True)
        return [(own, find_families(*host, share=share)) for own, *host in parts]


class _Window:
    """The micro-batches of an optimizer step, whose figures come from one forward pass.

    Each but the last gets copies, which take the gradient of its loss; backward through the last one's hands all of
    them on at once.

    Args:
        count: micro-batches.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.figures: Figures | None = None
        self.is_serving = False
        self._rows: list[slice] = []
        self._copies: list[list[Tensor]] = []

    def open(self, figures: Figures, sizes: list[int]) -> None:
        """Take the figures of all, of which each micro-batch has so many rows."""
        ends = torch.tensor(sizes).cumsum(0).tolist()
        self._rows = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self.figures = figures

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """Let `next` be asked for the figures of a micro-batch."""
        self.is_serving = True
        try:
            yield
        finally:
            self.is_serving = False

    def next(self) -> Figures:
        """Return the figures of the next micro-batch."""
        assert self.figures is not None
        place = len(self._copies)
        rows = self._rows[place]
        trained = [figure for figure in self.figures if figure is not None and figure.requires_grad]
        if place + 1 < self.count:
            own = [figure[rows].detach().requires_grad_() for figure in trained]
            self._copies.append(own)
        else:
            own = list(_Together.apply(self._copies, self._rows, *trained))
            self._copies.append([])
        made = iter(own)
        log_probs, entropy = (
            next(made) if figure is not None and figure.requires_grad else None if figure is None else figure[rows]
            for figure in self.figures
        )
        assert log_probs is not None
        return log_probs, entropy


class _Together(torch.autograd.Function):
    """The last micro-batch's rows of figures, whose backward pass is that of all micro-batches."""

    @staticmethod
    def forward(ctx: Any, copies: list[list[Tensor]], rows: list[slice], *figures: Tensor) -> tuple[Tensor, ...]:
        ctx.copies, ctx.rows, ctx.shapes = copies[:], rows, [figure.shape for figure in figures]
        return tuple(figure[rows[-1]].clone() for figure in figures)

    @staticmethod
    def backward(ctx: Any, *last: Tensor) -> tuple[Any, ...]:
        gradients = []
        for index, (own, shape) in enumerate(zip(last, ctx.shapes, strict=True)):
            whole = own.new_zeros(shape)
            whole[ctx.rows[-1]] = own
            for copies, rows in zip(ctx.copies, ctx.rows, strict=False):
                if (gradient := copies[index].grad) is not None:
                    whole[rows] = gradient
            gradients.append(whole)
        return (None, None, *gradients)


class FastGRPOTrainer(_OnlineTrainer, GRPOTrainer):
    """`trl.GRPOTrainer` whose learner runs on rows without padding, each prompt once. Same arguments and files."""

    _fastpack_stock = GRPOTrainer


class FastRLOOTrainer(_OnlineTrainer, RLOOTrainer):
    """`trl.RLOOTrainer` whose learner runs on rows without padding, each prompt once. Same arguments and files."""

    _fastpack_stock = RLOOTrainer
