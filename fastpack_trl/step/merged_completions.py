"""`MergedCompletions`: the completions of an optimizer step of an online trainer, forward together as one row.

TRL shuffles generated completions before it cuts them into micro-batches, so that completions of one prompt are spread
over many. The micro-batches of an optimizer step run forward together; TRL computes the loss of each separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fastpack_trl.errors import first_reason
from fastpack_trl.model.hooks import callback_between, ends_early, hook_on_a_gradient, trained_parameters
from fastpack_trl.run import Run

FEATURE = "merge_accumulation"
_IMAGES = ("pixel_values", "image_grid_thw", "num_images", "token_type_ids", "mm_token_type_ids")

Figures = tuple[Tensor, ...]
"""Log-probabilities and entropies, (rows, completion tokens)."""


def has_images(given: Mapping[str, Any]) -> bool:
    """Return whether keywords of a batch hold images or what goes with them."""
    return any(given.get(name) is not None for name in _IMAGES)


class MergedCompletions:
    """Runs the micro-batches of each optimizer step forward together, until something needs them one by one.

    Args:
        run: of an online trainer of one process.
        lacks_memory: returns why a step of so many padded tokens, in rows of such a width, does not fit; else ``""``.
    """

    def __init__(self, run: Run, lacks_memory: Callable[[int, int], str]) -> None:
        self._run, self._lacks_memory = run, lacks_memory
        self._waiting: Sequence[tuple[Any, Figures]] = ()
        self._fits, self._has_ended = 0, False

    def figures(self, model: Any, inputs: Any) -> Figures | None:
        """Return the figures of a micro-batch, which begins a step or is the next of one; None if it runs by itself."""
        if not (self._waiting and self._waiting[0][0] is inputs):
            alone = self._has_ended or ends_early(self._run.trainer)
            self._waiting = () if alone else self._together(model, inputs)
        if not self._waiting:
            return None
        (_, figures), *self._waiting = self._waiting
        return figures

    def _together(self, model: Any, inputs: Any) -> Sequence[tuple[Any, Figures]]:
        """Run the forward pass of a step's micro-batches as one row; if it cannot, stop merging in this run."""
        trainer: Any = self._run.trainer
        args = trainer.args
        first = trainer._step % args.steps_per_generation
        batches = trainer._buffered_inputs[first : first + args.gradient_accumulation_steps]
        if why := first_reason(self._against_step(inputs, batches)):
            self._has_ended = True
            self._run.disable(FEATURE, "stock", why)
            return ()
        parts = (("prompt_ids", "completion_ids"), ("prompt_mask", "completion_mask"))
        ids, mask = (torch.cat([torch.cat([each[name] for name in pair], 1) for each in batches]) for pair in parts)
        keep = batches[0]["completion_ids"].shape[1]
        *figures, _ = trainer._get_per_token_logps_and_entropies(model, ids, mask, keep, compute_entropy=True)
        split = (_split(figure, [len(each["prompt_ids"]) for each in batches]) for figure in figures)
        return list(zip(batches, zip(*split, strict=True), strict=True))

    def _against_step(self, inputs: Any, batches: Sequence[Mapping[str, Any]]) -> Iterator[object]:
        trainer = self._run.trainer
        is_next = len(batches) == trainer.args.gradient_accumulation_steps and batches[0] is inputs
        yield not is_next and "the micro-batches of a step are not the next of TRL's buffer"
        yield any(map(has_images, batches)) and "there are images"
        yield callback_between(trainer)
        yield hook_on_a_gradient(trainer.model, trained_parameters(trainer.optimizer))
        width = sum(inputs[name].shape[1] for name in ("prompt_ids", "completion_ids"))
        tokens = width * sum(len(each["prompt_ids"]) for each in batches)
        if tokens > self._fits:
            yield self._lacks_memory(tokens, width)
            self._fits = tokens


def _split(figure: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Split a figure of a whole step by micro-batches, whose losses run backward one after the other.

    Each but the last gets a copy, which keeps the gradient of its loss; the backward pass of the last runs for all.
    """
    *parts, last = figure.split_with_sizes(list(sizes))
    copies, start = [part.detach().requires_grad_(figure.requires_grad) for part in parts], len(figure) - len(last)

    def add(gradient: Tensor) -> Tensor:  # holds copies alone: `figure` or `last` would keep its graph alive
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in copies]
        return torch.cat([*gradients, gradient[start:]])

    if figure.requires_grad:
        figure.register_hook(add)
    return [*copies, last]
