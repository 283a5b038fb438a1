"""`PromptGroups`: a padded batch of prompts and completions as one row without padding, each prompt in it once.

The trainers for preferences and online learning score completions, of which several share a prompt. The row is found on
the host, in the padded batch that TRL's own collator makes, and is read from that batch by index on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastpack_trl.packing import prefixes
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.packing.shared_keys import Ints, TensorFields

KEY = "fastpack_prompt_groups"
"""Of a collated batch: under it the `PromptGroups` of each padded tensor of token ids, by its key."""
_PER_TOKEN = "position_ids", "token_type_ids"
"""Keys of a collator of the user which models read, in the shape of the padded batch."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PromptGroups(TensorFields):
    """The row of a padded batch, for the model, and the places in it that the head reads.

    Two completions of one prompt (1, 2), shared from ``least=1`` on, whose padded batch is
    ``[[1, 2, 3, 4], [1, 2, 5, 0]]`` with ``completion_mask=[[0, 0, 1, 1], [0, 0, 1, 0]]``, are the row
    ``[1, 2, 3, 4, 5]``: ``tokens=[0, 1, 2, 3, 6]``, and the positions that the layers see are ``[0, 1, 2, 3, 2]``.
    The tokens 3, 4 and 5 are scored by the hidden states at ``positions=[1, 2, 1]``; their log-probabilities belong at
    ``places=[1, 2, 4]`` of the flattened (2, 3) result; ``copies=[2, 2, 1, 1, 1]``. With prompts repeated the row is
    ``[1, 2, 3, 4, 1, 2, 5]``.

    Attributes:
        batch: the segments of the row.
        tokens: (total_tokens,) int64, where each token of the row is in the flattened (rows, width) padded batch.
        positions: (N,) int64, positions of the row that the head reads, in the order of `places`.
        places: (N,) int64, in the flattened (rows, width - 1) result; without completions the rows themselves.
        copies: (1, total_tokens) int64, rows of the padded batch that have the token; None if each token is in one.
            0 for a last token that belongs to none and has the last position of the padded rows.
        shape: rows and width of the padded batch.
    """

    batch: PackedBatch
    tokens: Tensor
    positions: Tensor
    places: Tensor
    copies: Tensor | None
    shape: tuple[int, int]

    def row(self, padded: Tensor) -> Tensor:
        """Return (1, total_tokens) of a (rows, width) tensor on the same device."""
        return padded.flatten().index_select(0, self.tokens)[None]


def group_completions(ids: Tensor, attention_mask: Tensor, scored: Tensor, **form: Any) -> PromptGroups | str:
    """Return the row of a padded batch of prompts and completions, or why it has none.

    All are (rows, width) on the host: `ids` padded on either side, `attention_mask` 0 at padding, `scored` not 0 at
    tokens whose log-probability is needed; the first column never is. `form` of the row: see `_group`.
    """
    rows, column = scored[:, 1:].numpy().nonzero()  # the column before each scored token, which predicts it
    places = rows * (ids.shape[1] - 1) + column
    return _group(ids, attention_mask, rows, column, places, scores_next=True, **form)


def completions(batch: Mapping[str, Any], prefix: str, **form: Any) -> PromptGroups | str:
    """Find the row of DPO's and KTO's batches."""
    if f"{prefix}completion_mask" not in batch:
        return "a batch without completion_mask"
    ids, mask, scored = (batch[f"{prefix}{name}"] for name in ("input_ids", "attention_mask", "completion_mask"))
    return group_completions(ids, mask, scored, **form)


def pairs(batch: Mapping[str, Any], prefix: str, *, pad_token_id: int, **form: Any) -> PromptGroups | str:
    """Return the row of a reward trainer's batch, which a classifier reads at the last token of each of its rows.

    `pad_token_id`: by which transformers' classifiers find the token that they read: the last of another id.
    """
    ids = batch[f"{prefix}input_ids"]
    count, width = ids.shape
    others = ids.numpy() != pad_token_id
    last = np.where(others.any(1), width - 1 - others[:, ::-1].argmax(1), 0)
    rows = np.arange(count)
    return _group(ids, batch[f"{prefix}attention_mask"], rows, last, rows, **form)


def _group(
    ids: Tensor, attention_mask: Tensor, rows: Ints, column: Ints, places: Ints, *, scores_next: bool = False,
    share: bool = True, least: int = prefixes.LEAST_SHARED, keep_width: bool = False,
) -> PromptGroups | str:  # fmt: skip
    """Return the row of a padded batch whose head reads `column` of `rows`.

    Args:
        scores_next: the tokens that it reads predict the next ones, which must not be padding either.
        share: False: prompts are repeated.
        least: tokens below which a common prefix is repeated.
        keep_width: the longest position of the row is that of the padded batch, by a token that belongs to no document.
    """
    real, shape = attention_mask.numpy() != 0, (ids.shape[0], ids.shape[1])
    if real.shape != shape:
        return f"attention_mask of shape {real.shape} for tokens of shape {shape}"
    if not real.any():
        return "a batch without a token"
    if (np.diff(real, axis=1, prepend=False, append=False).sum(1) > 2).any():
        return "padding in the middle of a row"
    if scores_next and not real[rows, column + 1].all():
        return "padding is scored"
    if not real[rows, column].all():
        read = "a completion without a prompt is padded on the left"
        return read if scores_next else "the token that a classifier reads is padding"
    tokens, lengths = real.ravel().nonzero()[0], real.sum(1)
    positions = (real.ravel().cumsum() - 1)[rows * shape[1] + column]
    lengths = lengths[lengths > 0]
    width = shape[1] if keep_width and lengths.max() < shape[1] else 0
    shared = prefixes.share(ids.numpy().ravel()[tokens], lengths, least) if share else None
    own, before = (lengths, None) if shared is None else (shared.lengths, (shared.first_positions, shared.key_index))
    batch = PackedBatch.from_lengths(own, num_padding=min(width, 1), prefixes=before, width=width)
    copies = np.ones(len(tokens), np.int64) if shared is None else np.bincount(shared.token_of)
    if shared is not None:
        tokens, positions = tokens[shared.source_of], shared.token_of[positions]
    if width:
        tokens, copies = np.append(tokens, tokens[-1]), np.append(copies, 0)
    each_is_in_one = shared is None and not width
    return PromptGroups(
        batch=batch, tokens=torch.from_numpy(tokens), positions=torch.from_numpy(positions),
        places=torch.from_numpy(places), copies=None if each_is_in_one else torch.from_numpy(copies)[None], shape=shape,
    )  # fmt: skip


@dataclass
class PromptGroupsCollator:
    """Wrap a collator with TRL's keys, and add the `PromptGroups` of its batches under `KEY`, in the same worker.

    `find` returns the row of ``<prefix>input_ids`` of a batch, or why it has none: ``find(batch, "KL_", **form)``.
    """

    inner: Callable[[list[Any]], Any]
    find: Callable[..., PromptGroups | str]
    form: Mapping[str, bool]

    def __call__(self, examples: list[Any]) -> Any:
        """Collate, and add the rows or reasons."""
        batch = self.inner(examples)
        if not isinstance(batch, Mapping):
            return batch
        own = [name for name in _PER_TOKEN if isinstance(given := batch.get(name), Tensor) and given.any()]
        found: dict[str, PromptGroups | str] = {}
        for key, ids in batch.items():
            prefix = key.removesuffix("input_ids")
            if prefix != key and isinstance(ids, Tensor) and f"{prefix}attention_mask" in batch:
                found[key] = f"{own[0]} of a collator" if own else self.find(batch, prefix, **self.form)
        return {**batch, KEY: found}
