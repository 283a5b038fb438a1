"""The static form of a packed row: tensors of shapes that depend on its bucket only, filled in place batch after batch.

A CUDA graph replays what the device did and reads the tensors that it read then. So everything that changes from row
to row has to be in them: the row is filled up by a tail without documents and without a loss, `cu_seqlens` by segments
of length 0, the loss positions by masked ones, the keys of shared prefixes by more of them for the tail, whose
gradients are zero. What the host knows of a plain batch is None in its static form: code that computes with it
raises instead of going on with the lengths of another batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from fastpack_trl.packing.buckets import Bucket, RowSize
from fastpack_trl.packing.packed_batch import (
    IGNORE_INDEX,
    NOT_ON_HOST,
    PackedBatch,
    TensorVersion,
    to_transformers_kwargs,
)  # fmt: skip
from fastpack_trl.packing.packed_inputs import IntArray, arrays_over, lay_out, tensors_over, write_segments
from fastpack_trl.packing.shared_keys import Documents, SharedKeys


class StaticInputs:
    """The keywords of ``model.forward`` for any row that fits into a bucket; the same tensors for good.

    The tail has the tokens of its row once more, which go to as many experts as they do, and not those of rows before,
    on which rounding would depend. Each segment of it is at most `Bucket.max_seqlen` long. Its labels are -100, its
    position ids below those of the row's longest document, so that neither a table of positions nor a rotary embedding
    that follows the length meets a larger one. Masked loss positions are those of rows before, or any: valid, and
    spread over the row, where one position would be the target of thousands of additions in backward. In a bucket with
    keys, where labels belong to documents that are not in the row as they are, all labels are -100: nobody reads them.

    Attributes:
        bucket: the shapes.
        keywords: ``input_ids``, ``labels``, those of `to_transformers_kwargs`, and ``packed_batch``.
        batch: the `PackedBatch` in them, with `loss_mask` and `part_bounds`.
    """

    def __init__(self, bucket: Bucket, device: torch.device | str) -> None:
        self.bucket, device = bucket, torch.device(device)
        row = (1, bucket.tokens)
        sections = {
            "cu_seqlens": (bucket.segments + 1,),  # first, as in a plain row: one graph serves both
            "position_ids": row,
            "seq_idx": row,
            "part_bounds": (bucket.parts + 1,),
            "loss_mask": (bucket.loss_tokens,),
        }
        if bucket.keys:
            sections |= {"key_index": (bucket.keys,), "cu_seqlens_k": (bucket.segments + 1,)}
            sections |= {"loss_weights": (bucket.loss_tokens,), "copies": (bucket.tokens,)}
        self._sections, size = lay_out(sections)
        self._block = torch.zeros(size, dtype=torch.int64, device=device)
        # Each has a count of edits of its own (`TensorVersion`), and copies are written past it: only others edit.
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
        # Of these the device alone knows what a row has; the host writes what is beyond it.
        known = {name: tensors[name] for name in ("key_index", "loss_weights", "copies") if bucket.keys}
        self._flat = {name: tensor.data.view(-1) for name, tensor in (moved | known).items()}
        self._written = self._block.data
        shared = documents = None
        if bucket.keys:
            tensors["cu_seqlens_k"].copy_(tensors["cu_seqlens"])
            shared = SharedKeys(NOT_ON_HOST, tensors.pop("key_index"), tensors.pop("cu_seqlens_k"), bucket.max_seqlen_k)
            documents = Documents(
                lengths=NOT_ON_HOST, token_of=NOT_ON_HOST, loss_weights=tensors.pop("loss_weights"),
                copies=tensors.pop("copies"), loss_tokens=NOT_ON_HOST, capacity=NOT_ON_HOST, parts=NOT_ON_HOST,
            )  # fmt: skip
        self.batch = PackedBatch(
            seq_lengths=NOT_ON_HOST,
            num_padding=NOT_ON_HOST,
            parts=NOT_ON_HOST,
            max_seqlen=bucket.max_seqlen,
            loss_positions=moved["loss_positions"],
            loss_labels=moved["loss_labels"],
            labels=TensorVersion.of(moved["labels"]),
            positions=TensorVersion.of(tensors["position_ids"]),
            shared=shared,
            documents=documents,
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
    it does not (with shared prefixes a second one, of floating-point numbers). What read the tensors before, and what
    reads them next, has to be on that stream too.

    Args:
        static: whose tensors are written.
        inputs: one packed row with its labels and a plain ``packed_batch``, on the device of `static`.

    Raises:
        ValueError: the row does not fit into the bucket, or is not the one that its batch describes (`is_as_collated`).
    """
    if not is_as_collated(inputs):
        raise ValueError("the micro-batch was changed after collation: run it as it is, not in its static form")
    batch: PackedBatch = inputs["packed_batch"]
    size = RowSize.of(batch)
    if not static.bucket.holds(size):
        raise ValueError(f"a row of {size} does not fit into {static.bucket}: ask Bucket.holds before")
    flat, tokens, counted = static._flat, size.tokens, size.loss_tokens
    pairs = [
        *_row_pairs(static, batch, size, inputs["input_ids"]),
        (flat["loss_positions"][:counted], batch.loss_positions),
        (flat["loss_labels"][:counted], batch.loss_labels),
    ]
    if not static.bucket.keys:
        pairs.append((flat["labels"][:tokens], inputs["labels"].view(-1)[:tokens]))
        pairs.append((flat["labels"][tokens:], static._ignored[: static.bucket.tokens - tokens]))
    _copy_known(static, batch, size)
    _copy_all(pairs)
    if batch.documents is not None:
        documents = batch.documents
        weights = (flat["loss_weights"][:counted], documents.loss_weights)
        _copy_all([weights, (flat["copies"][:tokens], documents.copies[:tokens])])


def _copy_all(pairs: list[tuple[Any, Any]]) -> None:
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
    _copy_all(_row_pairs(static, batch, size, tokens))


def _row_pairs(static: StaticInputs, batch: PackedBatch, size: RowSize, ids: torch.Tensor) -> list[tuple[Any, Any]]:
    """Return what is written, and with what, of a row: its tokens, once more in the tail, and where their keys are."""
    flat, row, tail = static._flat, ids.view(-1)[: size.tokens], static.bucket.tokens - size.tokens
    again = row if tail <= size.tokens else row.repeat(-(-tail // size.tokens))
    pairs = [(flat["input_ids"][: size.tokens], row), (flat["input_ids"][size.tokens :], again[:tail])]
    if batch.shared is not None:
        pairs.append((flat["key_index"][: size.keys], batch.shared.key_index[: size.keys]))
    return pairs


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
    pieces = bucket.pieces_of(size)
    tail = _even(bucket.tokens - size.tokens, pieces)
    lengths = np.concatenate([batch.seq_lengths, tail], dtype=np.int64)
    write_segments(host, lengths)
    host["position_ids"][size.tokens :] %= size.max_seqlen
    if bucket.keys:
        _write_keys(host, batch, size, lengths, _even(bucket.keys - size.with_keys.keys, pieces))
    host["cu_seqlens"][len(lengths) + 1 :] = bucket.tokens
    bounds = [0, *accumulate(part.tokens for part in batch.parts)] if batch.parts else [0, size.tokens]
    host["part_bounds"][: len(bounds)] = bounds
    host["part_bounds"][len(bounds) :] = size.tokens
    host["loss_mask"][: size.loss_tokens] = True
    host["loss_mask"][size.loss_tokens :] = False
    static._written.copy_(staged, non_blocking=True)


def _write_keys(host: Mapping[str, Any], batch: PackedBatch, size: RowSize, lengths: IntArray, tail: IntArray) -> None:
    """Write the keys of the tail and what `SharedKeys` and `Documents` say of a row in which nothing is shared.

    What a piece of the tail sees beside its own tokens is spread over the row: their gradients from it are zero.

    Args:
        host: the arrays.
        batch: of the row.
        size: of the row.
        lengths: tokens of each segment, those of the tail last.
        tail: keys of each piece of it, at least as many as its tokens.
    """
    behind: IntArray = np.zeros(len(lengths), np.int64)
    if batch.shared is not None:
        behind[: size.segments] = batch.shared.prefix_lengths[: size.segments]
    host["position_ids"][: size.tokens] += behind[: size.segments].repeat(lengths[: size.segments])
    count = len(lengths) - len(tail)
    behind[count:] = tail - lengths[count:]
    host["cu_seqlens_k"][0] = 0
    host["cu_seqlens_k"][1 : len(lengths) + 1] = (lengths + behind).cumsum()
    host["cu_seqlens_k"][len(lengths) + 1 :] = len(host["key_index"])
    index, end, token = host["key_index"], size.with_keys.keys, size.tokens
    index[: size.tokens] = np.arange(size.tokens)
    for more, own in zip(behind[count:].tolist(), lengths[count:].tolist(), strict=True):
        index[end : end + more] = np.arange(more) % size.tokens
        index[end + more : end + more + own] = np.arange(token, token + own)
        end, token = end + more + own, token + own
    for name, real in (("loss_weights", size.loss_tokens), ("copies", size.tokens)):
        host[name][:real], host[name][real:] = 1.0, 0.0


def _even(total: int, pieces: int) -> IntArray:
    """Return `total` in so many pieces, none more than one longer than another: ``7, 3`` -> 3, 2, 2."""
    whole, rest = divmod(total, max(1, pieces))
    return whole + (np.arange(pieces) < rest)
