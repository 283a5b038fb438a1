"""Does a side of the model benchmark compute the right loss? Judged token by token, against separate documents."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

TIMES_BUDGET = 2.0
"""A side may be this many times as far from fp32 as stock's own bf16 is on separate documents."""

_TOKENS_PER_CALL = 1024  # of the output layer: all logits of a long row at once would be the largest tensor by far


@dataclass(frozen=True, slots=True)
class Reference:
    """Losses of the documents of one row, each computed on its own by stock, as packing must leave them.

    Attributes:
        exact: (num_loss_tokens,) fp32, in fp32 arithmetic.
        budget: root mean square over tokens of (stock in bf16 - exact), in units of loss.
    """

    exact: Tensor
    budget: float

    def error(self, losses: Tensor) -> float:
        """Return the root mean square over tokens of the distance to `exact`, in units of loss."""
        return float((losses - self.exact).square().mean().sqrt())

    def verdict(self, name: str, losses: Tensor, trainer_loss: float) -> tuple[dict[str, Any], str]:
        """Return the figures for the record, and what is wrong (empty if nothing is).

        Args:
            name: of the side.
            losses: of its packed row, per token.
            trainer_loss: what its trainer's step returned for the same row: its mean must be the same within the same
                budget, or the trainer was not given what was judged here.
        """
        error, bound = self.error(losses), TIMES_BUDGET * self.budget
        mean = abs(trainer_loss - float(self.exact.mean()))
        figures = {"error": error, "trainer_loss": trainer_loss, "trainer_loss_error": mean}
        for what, value in (("the loss of its tokens is off by", error), ("the loss of its step is off by", mean)):
            if not value <= bound:  # a NaN is over every bound
                return (
                    figures,
                    f"{name}: {what} {value:.2e}, over {TIMES_BUDGET:g} x stock's own bf16 error {bound:.2e}",
                )
        return figures, ""


def reference(model: Any, input_ids: Tensor, position_ids: Tensor) -> Reference:
    """Compute the losses of separate documents under stock, in fp32 and under bf16 autocast.

    Args:
        model: stock's, without anything of ours installed.
        input_ids, position_ids: (1, total_tokens) each; positions start again at 0 in each document.
    """
    starts = (position_ids[0] == 0).nonzero().squeeze(1).tolist()
    rows = [input_ids[:, start:end] for start, end in pairwise([*starts, input_ids.shape[1]])]

    def losses(which: Any, bf16: bool) -> Tensor:
        return torch.cat([token_losses(which, {"input_ids": row}, bf16=bf16) for row in rows])

    with _in_fp32(model) as exact_model:
        exact = losses(exact_model, bf16=False)
    return Reference(exact, float((losses(model, bf16=True) - exact).square().mean().sqrt()))


@torch.no_grad()
def token_losses(model: Any, inputs: Mapping[str, Any], *, bf16: bool) -> Tensor:
    """Return (num_loss_tokens,) fp32: the loss of each token that follows another one of its document.

    Args:
        model: a causal language model; what is installed on its backbone is used.
        inputs: keywords of its forward; without ``position_ids`` the row is one document.
        bf16: compute under bf16 autocast.
    """
    ids = inputs["input_ids"]
    positions = inputs.get("position_ids")
    if positions is None:
        positions = torch.arange(ids.shape[1], device=ids.device)[None]
    keywords = {key: value for key, value in inputs.items() if key not in ("labels", "use_cache")}
    follows = positions[0, 1:] != 0
    before, targets = follows.nonzero().squeeze(1), ids[0, 1:][follows]
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=bf16):
        hidden = model.base_model(**keywords, use_cache=False).last_hidden_state[0]
        head = model.get_output_embeddings()
        parts = [
            F.cross_entropy(head(hidden[index]).float(), target, reduction="none")
            for index, target in zip(before.split(_TOKENS_PER_CALL), targets.split(_TOKENS_PER_CALL), strict=True)
        ]
    return torch.cat(parts)


@contextmanager
def _in_fp32(model: Any) -> Iterator[Any]:
    """Yield the model itself if its weights are fp32, else a copy that is gone afterwards."""
    if model.dtype == torch.float32:
        yield model
        return
    exact = copy.deepcopy(model).float()
    if getattr(exact.config, "_experts_implementation", None) not in (None, "eager"):
        exact.set_experts_implementation("eager")  # grouped matrix products are made for bf16
    yield exact
