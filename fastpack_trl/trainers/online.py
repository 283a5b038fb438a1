"""`FastGRPOTrainer` and `FastRLOOTrainer`: TRL's, whose learner scores completions on rows with each prompt once.

TRL shuffles what was generated before it cuts it into micro-batches, so that completions of one prompt are in many of
them. The micro-batches of an optimizer step run forward together; TRL's loss runs on each of them by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor
from trl import GRPOTrainer, RLOOTrainer

from fastpack_trl.checkpointing.activation_memory import count_layers, row_bytes
from fastpack_trl.checkpointing.plan import LayerCost
from fastpack_trl.errors import first_reason
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.facts import UNREADABLE, learned_positions
from fastpack_trl.model.hooks import replaced_methods
from fastpack_trl.packing.batching import BatchPlan
from fastpack_trl.packing.prompt_groups import PromptGroups, group_completions
from fastpack_trl.run.budget import free_bytes, memory_to_come
from fastpack_trl.trainers.packed import PackedTrainer

logger = get_logger(__name__)

MERGING = "merge_accumulation"
ON_HOST = "fastpack_on_host"
"""Key of (rows, 2, width): tokens and mask of a generation on the host, copied in one read of the device."""
_GENERATE = "_generate_and_score_completions"
_MEMORY_SHARE = 0.7
"""Share of the free device memory that the forward pass of a whole step may take by prediction."""
_IMAGES = ("pixel_values", "image_grid_thw", "num_images", "token_type_ids", "mm_token_type_ids")

Figures = tuple[Tensor, Tensor]
"""Log-probabilities and entropies, (rows, completion tokens)."""


class _OnlineTrainer(PackedTrainer):
    """A trainer that generates; generation, rewards and their metrics are TRL's."""

    _fastpack_window: _Window | None = None
    _fastpack_on_host: Tensor | None = None
    """Host copy of the rows that are scored next, as in `ON_HOST`; None if they must be read from the device."""
    _fastpack_regenerates = False
    _fastpack_costs: Sequence[LayerCost] | None = None
    _fastpack_why_single = ""

    def _fastpack_plan(self, trainer: Any, path: str, flattens: bool, unproven: str = "") -> BatchPlan:
        if learned_positions(trainer.model) is not None:
            return BatchPlan("stock", "prompts are padded on the left, which shifts learned positions")
        return super()._fastpack_plan(trainer, path, flattens, unproven)

    def _fastpack_enter(self, stack: contextlib.ExitStack) -> None:
        super()._fastpack_enter(stack)
        self._fastpack_rows.entropy_has_gradient = bool(getattr(self, "_entropy_bonus_enabled", False))
        self._fastpack_regenerates = bool(replaced_methods(self, (_GENERATE,)))  # its edits would be missing in copies
        self._fastpack_costs = None
        stack.callback(setattr, self, "_fastpack_window", None)
        self._fastpack_why_single = first_reason(self._fastpack_against_merging())
        if self.fastpack_run.training:
            why, count = self._fastpack_why_single, self.args.gradient_accumulation_steps
            said = why or f"{count} micro-batches per optimizer step, shuffled by TRL"
            path = "stock" if why else "one row per optimizer step"
            self.fastpack_run.set_status(MERGING, "off" if why else "on", path, said)

    def _fastpack_against_merging(self) -> Iterator[object]:
        run, args = self.fastpack_run, self.args
        yield getattr(args, MERGING, "auto") == "off" and "switched off"
        yield not run.packs and "batches are stock's"
        yield args.gradient_accumulation_steps == 1 and "gradient_accumulation_steps is 1"
        yield args.steps_per_generation % args.gradient_accumulation_steps != 0 and (
            f"steps_per_generation={args.steps_per_generation} is not a multiple of gradient_accumulation_steps="
            f"{args.gradient_accumulation_steps}"
        )
        yield run.ranks.count > 1 and "each process has gradients reduced with its last micro-batch alone"
        yield getattr(self, "aux_loss_enabled", False) and "the auxiliary loss of experts is one per micro-batch"

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return TRL's micro-batches of an optimizer step."""
        window = self._fastpack_window
        if window is not None and 0 < window.served < window.count:
            raise RuntimeError(
                f"{MERGING}: {window.served} of the {window.count} micro-batches of a step asked for figures, so no "
                f"gradient of it arrived: set {MERGING}='off'"
            )
        found = super().get_batch_samples(*args, **kwargs)
        self._fastpack_window = None if self._fastpack_why_single else _Window(len(found[0]))
        return found

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as TRL does, and add a host copy of tokens and masks, which TRL shuffles and cuts like the rest."""
        made = super()._generate_and_score_completions(*args, **kwargs)
        if self._fastpack_entered and self.fastpack_run.packs and not self._fastpack_regenerates:
            made[ON_HOST] = _host_copy(*_padded([made]))
        return made

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Compute TRL's loss of a micro-batch, from the figures of its whole optimizer step."""
        window = self._fastpack_window if self._fastpack_entered and self.model.training else None
        if window is not None and window.figures is None:
            window = self._fastpack_window = self._fastpack_open(window, model, inputs)
        serving = window.serving(inputs) if window is not None else contextlib.nullcontext()
        with serving, patch_attribute(self, "_fastpack_on_host", inputs.get(ON_HOST)):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    def _fastpack_open(self, window: _Window, model: Any, inputs: Any) -> _Window | None:
        """Run the micro-batches of a step forward; None where they are not the next of TRL's buffer, or lack room."""
        stock: Any = self
        first = stock._step % self.args.steps_per_generation
        batches = stock._buffered_inputs[first : first + window.count]
        if window.count == 1:
            return None  # the last step of an epoch
        if len(batches) != window.count or batches[0] is not inputs:
            self.fastpack_report.remark(MERGING, "one by one where micro-batches are not the next of TRL's buffer")
            return None
        if any(map(_has_images, batches)):
            self.fastpack_report.remark(MERGING, "one by one where there are images")
            return None
        if not self._fastpack_has_room(_padded(batches)[0]):
            return None
        on_host = [batch[ON_HOST] for batch in batches if ON_HOST in batch]
        keep = batches[0]["completion_ids"].shape[1]
        with patch_attribute(self, "_fastpack_on_host", torch.cat(on_host) if on_host else None):
            log_probs, entropy, _ = stock._get_per_token_logps_and_entropies(
                model, *_padded(batches), keep, compute_entropy=True
            )
        window.open((log_probs, entropy), batches)
        return window

    def _fastpack_has_room(self, ids: Tensor) -> bool:
        """Return whether the padded rows of a step fit in memory at once, by what layers keep of so many tokens."""
        run = self.fastpack_run
        free = _MEMORY_SHARE * max(0, free_bytes(self.args.device) - memory_to_come(run))
        try:
            self._fastpack_costs = self._fastpack_costs or count_layers(run)
            needed = row_bytes(run, self._fastpack_costs, ids.numel(), ids.shape[1])
        except UNREADABLE as error:
            self._fastpack_why_single = f"what layers keep cannot be counted: {type(error).__name__}: {error}"
        else:
            gib = f"{needed / 2**30:.1f} GiB for the micro-batches of a step, {free / 2**30:.1f} GiB may be taken"
            self._fastpack_why_single = gib if needed > free else ""
        if self._fastpack_why_single:
            run.disable(MERGING, "stock", self._fastpack_why_single)
        return not self._fastpack_why_single

    def _get_per_token_logps_and_entropies(
        self, model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, batch_size: int | None = None,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        window = self._fastpack_window
        if window is not None and window.place is not None:
            return (*window.figures_of_one(), None)
        stock: Any = super()
        known: list[tuple[Tensor, PromptGroups | str]] = []
        if self._fastpack_entered and self.fastpack_run.packs:
            if _has_images(kwargs):  # a prompt that is there once would have the pictures of all its copies
                self.fastpack_report.remark("batches", "as stock pads them where there are images")
            else:
                known = self._fastpack_groups(input_ids, attention_mask, logits_to_keep, batch_size or len(input_ids))
        with self._fastpack_knowing(known):
            return stock._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs
            )

    def _fastpack_groups(
        self, ids: Tensor, attention_mask: Tensor, logits_to_keep: int, size: int
    ) -> list[tuple[Tensor, PromptGroups | str]]:
        """Return, for every `size` padded rows of a batch, the row that they become."""
        on_host = self._fastpack_on_host
        tokens, mask = (_host_copy(ids, attention_mask) if on_host is None else on_host).unbind(1)
        scored = mask.clone()
        scored[:, :-logits_to_keep] = 0
        share = not self._fastpack_repeated
        parts = zip(ids.split(size), tokens.split(size), mask.split(size), scored.split(size), strict=True)
        found = [(own, group_completions(*host, share=share)) for own, *host in parts]
        if ids.device.type != "cuda":
            return found
        return [(own, each if isinstance(each, str) else each.pin_memory()) for own, each in found]


def _has_images(given: Mapping[str, Any]) -> bool:
    return any(given.get(name) is not None for name in _IMAGES)


def _padded(batches: Sequence[Mapping[str, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return tokens and attention mask of prompts and completions, as TRL joins them; of all `batches`."""
    names = (("prompt_ids", "completion_ids"), ("prompt_mask", "completion_mask"))
    ids, mask = (torch.cat([torch.cat([batch[part] for part in pair], dim=1) for batch in batches]) for pair in names)
    return ids, mask


def _host_copy(ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Return (rows, 2, width) on the host: tokens and mask, in one read of the device."""
    return torch.stack([ids, attention_mask.to(ids.dtype)], dim=1).cpu()


class _Window:
    """The micro-batches of an optimizer step, whose figures come from one forward pass.

    Each but the last gets copies, which take the gradient of its loss; backward through the last one passes all of them
    on at once.

    Args:
        count: number of micro-batches.

    Attributes:
        place: index of the micro-batch that is served; None if there is none.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.figures: Figures | None = None
        self.place: int | None = None
        self._batches: Sequence[Any] = ()
        self._rows: list[slice] = []
        self._copies: dict[int, Figures] = {}

    def open(self, figures: Figures, batches: Sequence[Any]) -> None:
        """Take the figures of all micro-batches."""
        sizes = [len(batch["prompt_ids"]) for batch in batches]
        ends = list(accumulate(sizes))
        self._rows = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self.figures, self._batches = figures, batches

    @property
    def served(self) -> int:
        """Return how many micro-batches had their figures."""
        return len(self._copies)

    @contextlib.contextmanager
    def serving(self, inputs: Any) -> Iterator[None]:
        """Serve the figures of a micro-batch in the context, if it belongs to the step and had none yet."""
        places = (place for place, batch in enumerate(self._batches) if batch is inputs and place not in self._copies)
        with patch_attribute(self, "place", next(places, None)):
            yield

    def figures_of_one(self) -> Figures:
        """Return the figures of the micro-batch at `place`."""
        assert self.figures is not None
        assert self.place is not None
        rows, is_last = self._rows[self.place], self.served + 1 == self.count
        if is_last:
            others = [(self._rows[place], copies) for place, copies in self._copies.items()]
            own: Figures = _Together.apply(rows, others, *self.figures)
        else:
            log_probs, entropy = (figure[rows].detach().requires_grad_(figure.requires_grad) for figure in self.figures)
            own = log_probs, entropy
        self._copies[self.place] = own
        return own


class _Together(torch.autograd.Function):
    """The last micro-batch's rows of figures, whose backward pass is that of all micro-batches."""

    @staticmethod
    def forward(ctx: Any, rows: slice, others: list[tuple[slice, Figures]], *figures: Tensor) -> tuple[Tensor, ...]:
        ctx.rows, ctx.others, ctx.shapes = rows, others, [figure.shape for figure in figures]
        own = tuple(figure[rows].clone() for figure in figures)
        ctx.mark_non_differentiable(
            *(one for one, trains in zip(own, ctx.needs_input_grad[2:], strict=True) if not trains)
        )
        return own

    @staticmethod
    def backward(ctx: Any, *last: Tensor) -> tuple[Any, ...]:
        gradients = []
        for index, (own, shape) in enumerate(zip(last, ctx.shapes, strict=True)):
            whole = own.new_zeros(shape)
            whole[ctx.rows] = own
            for rows, copies in ctx.others:
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
