"""The static form of a packed row: tensors of shapes that depend on its bucket only, filled in place batch after batch.

A CUDA graph replays what the device did and reads the tensors that it read then. So everything that changes from row
to row has to be in them: the row is filled up by a tail without documents and without a loss, `cu_seqlens` by segments
of length 0, the loss positions by masked ones. What the host knows of a plain batch is not in its static form
(`NotOnHost`): code that would read it there raises instead of going on with the lengths of another batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from fastpack_trl.packing.as_made import AsMade
from fastpack_trl.packing.buckets import Bucket, RowSize
from fastpack_trl.packing.packed_batch import (
    IGNORE_INDEX,
    NOT_ON_HOST,
    PackedBatch,
    to_transformers_kwargs,
)  # fmt: skip
from fastpack_trl.packing.packed_inputs import arrays_over, lay_out, tensors_over, write_segments


class StaticInputs:
    """The keywords of ``model.forward`` for any row that fits into a bucket; the same tensors for good.

    The tail has the tokens of its row once more, which go to as many experts as they do, and not those of rows before,
    on which rounding would depend. Each segment of it is at most `Bucket.max_seqlen` long. Its labels are -100, its
    position ids below those of the row's longest document, so that neither a table of positions nor a rotary embedding
    that follows the length meets a larger one. Masked loss positions are those of rows before, or any: valid, and
    spread over the row, where one position would be the target of thousands of additions in backward.

    Attributes:
        bucket: the shapes.
        keywords: ``input_ids``, ``labels``, those of `to_transformers_kwargs`, and ``packed_batch``.
        batch: the `PackedBatch` in them, with `loss_mask` and `part_bounds`.
    """

    def __init__(self, bucket: Bucket, device: torch.device | str) -> None:
        self.bucket, device = bucket, torch.device(device)
        row = (1, bucket.tokens)
        self._sections, size = lay_out(
            {
                "cu_seqlens": (bucket.segments + 1,),  # first, as in a plain row: one graph serves both
                "position_ids": row,
                "seq_idx": row,
                "part_bounds": (bucket.parts + 1,),
                "loss_mask": (bucket.loss_tokens,),
            }
        )
        self._block = torch.zeros(size, dtype=torch.int64, device=device)
        # Each has a count of edits of its own (`AsMade`), and copies are written past it: only others edit.
        tensors = {name: view.data for name, view in tensors_over(self._block, self._sections).items()}
        moved = {
            "input_ids": torch.zeros(row, dtype=torch.int64, device=device),
            "labels": torch.full(row, IGNORE_INDEX, dtype=torch.int64, device=device),
            "loss_positions": torch.arange(bucket.loss_tokens, device=device) % bucket.tokens,
            "loss_labels": torch.zeros(bucket.loss_tokens, dtype=torch.int64, device=device),
        }
        # A tail without documents until a row is copied in: what is recorded before has to be a row all the same.
        ends = torch.arange(bucket.segments + 1, device=device) * bucket.max_seqlen
        tensors["cu_seqlens"].copy_(ends.clamp_(max=bucket.tokens))
        self._ignored = torch.full((bucket.tokens,), IGNORE_INDEX, dtype=torch.int64, device=device)
        self._flat = {name: tensor.data.view(-1) for name, tensor in moved.items()}
        self._written = self._block.data
        self.batch = PackedBatch(
            seq_lengths=NOT_ON_HOST,
            num_padding=NOT_ON_HOST,
            parts=NOT_ON_HOST,
            max_seqlen=bucket.max_seqlen,
            loss_positions=moved["loss_positions"],
            loss_labels=moved["loss_labels"],
            labels=AsMade.of(moved["labels"]),
            positions=AsMade.of(tensors["position_ids"]),
            **tensors,
        )
        self.keywords: dict[str, Any] = {
            "input_ids": moved["input_ids"],
            "labels": moved["labels"],
            **to_transformers_kwargs(self.batch),
            "packed_batch": self.batch,
        }


def copy_into(static: StaticInputs, inputs: Mapping[str, Any]) -> None:
    """Give the tensors of `static` the documents of a micro-batch; the device is asked nothing.

    Two operations, on the current stream: one copy from pinned memory of what the host knows, one on the device of what
    it does not. What read the tensors before, and what reads them next, has to be on that stream too.

    Args:
        static: whose tensors are written.
        inputs: one packed row with its labels and a plain ``packed_batch``, on the device of `static`.

    Raises:
        ValueError: the row does not fit into the bucket, has shared prefixes, or is not the one that its batch
            describes (`is_as_collated`).
    """
    if not is_as_collated(inputs):
        raise ValueError("the micro-batch was changed after collation: run it as it is, not in its static form")
    batch: PackedBatch = inputs["packed_batch"]
    if batch.shares:
        raise ValueError("a row with shared prefixes has no static form: run it as it is")
    size = RowSize.of(batch)
    if not static.bucket.holds(size):
        raise ValueError(f"a row of {size} does not fit into {static.bucket}: ask Bucket.holds before")
    _copy_known(static, batch, size)
    flat, tokens, counted = static._flat, size.tokens, size.loss_tokens
    ids, tail = inputs["input_ids"].view(-1)[:tokens], static.bucket.tokens - tokens
    again = ids if tail <= tokens else ids.repeat(-(-tail // tokens))
    pairs = [
        (flat["input_ids"][:tokens], ids),
        (flat["input_ids"][tokens:], again[:tail]),
        (flat["labels"][:tokens], inputs["labels"].view(-1)[:tokens]),
        (flat["labels"][tokens:], static._ignored[:tail]),
        (flat["loss_positions"][:counted], batch.loss_positions),
        (flat["loss_labels"][:counted], batch.loss_labels),
    ]
    pairs = [(target, given) for target, given in pairs if target.numel()]
    torch._foreach_copy_([target for target, _ in pairs], [given for _, given in pairs])


def copy_row(static: StaticInputs, batch: PackedBatch, tokens: torch.Tensor) -> None:
    """Give the tensors of `static` a row without labels; see `copy_into`.

    Args:
        static: whose tensors are written.
        batch: of the row, on the device of `static`.
        tokens: (1, total_tokens) int64.
    """
    size = RowSize.of_row(batch)
    assert static.bucket.holds(size), f"a row of {size} does not fit into {static.bucket}"
    _copy_known(static, batch, size)
    flat, ids, tail = static._flat["input_ids"], tokens.view(-1)[: size.tokens], static.bucket.tokens - size.tokens
    flat[: size.tokens].copy_(ids)
    flat[size.tokens :].copy_(ids.repeat(-(-tail // size.tokens))[:tail])


def is_as_collated(inputs: Mapping[str, Any]) -> bool:
    """Return whether a micro-batch is one packed row as collated or merged, and nothing else; its tokens may be others.

    Only such a row is described by its `PackedBatch` alone.
    """
    batch = inputs.get("packed_batch")
    if not isinstance(batch, PackedBatch) or batch.is_static:
        return False
    if inputs.keys() != {"input_ids", "labels", "packed_batch", *to_transformers_kwargs(batch)}:
        return False
    return batch.counts(inputs["labels"]) and batch.describes(inputs["input_ids"], inputs["position_ids"])


def _copy_known(static: StaticInputs, batch: PackedBatch, size: RowSize) -> None:
    """Copy what follows from the lengths of the documents and parts."""
    bucket = static.bucket
    # New each time: torch keeps pinned memory from reuse until the copy out of it is done.
    staged = torch.empty_like(static._block, device="cpu", pin_memory=static._block.is_cuda)
    host = arrays_over(staged, static._sections)
    whole, rest = divmod(bucket.tokens - size.tokens, bucket.max_seqlen)
    lengths = np.array([*batch.seq_lengths, *[bucket.max_seqlen] * whole, *[rest] * (rest > 0)], dtype=np.int64)
    write_segments(host, lengths)
    host["position_ids"][size.tokens :] %= size.max_seqlen
    host["cu_seqlens"][len(lengths) + 1 :] = bucket.tokens
    bounds = [0, *accumulate(part.tokens for part in batch.parts)] if batch.parts else [0, size.tokens]
    host["part_bounds"][: len(bounds)] = bounds
    host["part_bounds"][len(bounds) :] = size.tokens
    host["loss_mask"][: size.loss_tokens] = True
    host["loss_mask"][size.loss_tokens :] = False
    static._written.copy_(staged, non_blocking=True)
