"""`PackingCollator`: rows of a packed dataset become one row, its labels and its `PackedBatch`, once, on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fastpack_trl.model.upstream import DataCollatorForLanguageModeling
from fastpack_trl.packing.packed_batch import IGNORE_INDEX, PackedBatch, TensorVersion, to_transformers_kwargs
from fastpack_trl.packing.packed_inputs import PackedInputs
from fastpack_trl.packing.prefixes import score, share
from fastpack_trl.packing.shared_keys import Documents, Ints


@dataclass
class PackingCollator(DataCollatorForLanguageModeling):
    r"""Drop-in for TRL's `DataCollatorForLanguageModeling` with ``padding_free=True``, without Python lists.

    ``[{"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [3, 2]}]`` -> ``input_ids=[[5, 6, 7, 8, 9]]``,
    ``labels=[[-100, 6, 7, -100, 9]]``, ``position_ids=[[0, 1, 2, 0, 1]]``, ``cu_seq_lens_q=[0, 3, 5]``.

    Rows have ``input_ids``, and may have ``labels`` (default: ``input_ids``) and ``seq_lengths`` (default: the row is
    one document), each a NumPy array (the fast path: ``dataset.with_format("numpy")``), a list or a tensor, of
    integers. All rows of a batch become one. Documents of length 0 are skipped; other columns are ignored.

    The result has TRL's keys and values. ``input_ids`` and ``labels`` are (1, total_tokens) int64; the label of each
    first token is -100. ``packed_batch`` is the `PackedBatch` of the other tensors, with what the loss counts.

    One difference is intended: the padding of `pad_to_multiple_of` is *one* further segment, never a document
    (`PackedBatch.num_padding`), where TRL makes one of each padding token.

    Args:
        pad_token_id: token id of the padded tail.
        padding_free: always ``True``, which returns position ids whatever `return_position_ids` is.
        pad_to_multiple_of: the row is padded to a multiple of this many tokens.
        return_tensors: ``"pt"``.
        share_prefixes: common prefixes of documents are stored once in the row, with `PackedBatch.shared` and
            `PackedBatch.documents`. ``labels`` stay those of the documents, one after the other: as many as without.
        vocab_size: if given, token ids and labels are checked against it, where they would otherwise fail as an
            out-of-range index on the device. Costs about two microseconds per thousand tokens.
        whole_rows: ``seq_lengths`` is ignored: each row is one document, as in TRL without ``padding_free``.

    Raises:
        ValueError: ``padding_free=False``, a padding or vocabulary that makes no sense. On a batch: no token in any
            row, a missing or wrong column, lengths that do not add up to the row, an id outside the vocabulary.
    """

    padding_free: bool = True
    vocab_size: int | None = None
    share_prefixes: bool = False
    whole_rows: bool = False

    def __post_init__(self) -> None:
        multiple, size, token = self.pad_to_multiple_of, self.vocab_size, self.pad_token_id
        outside = size is not None and multiple is not None and not (isinstance(token, int) and 0 <= token < size)
        checks = [
            (not self.padding_free, "padding_free=False packs nothing: use TRL's DataCollatorForLanguageModeling"),
            (multiple is not None and multiple < 1, f"pad_to_multiple_of={multiple} must be >= 1, or None"),
            (size is not None and size < 1, f"vocab_size={size} must be the rows of the embedding, or None"),
            (multiple and not isinstance(token, int), f"pad_token_id={token!r} cannot pad: set tokenizer.pad_token"),
            (outside, f"pad_token_id={token} is outside the vocabulary [0, {size}): choose a token with an embedding"),
        ]
        for is_wrong, problem in checks:
            if is_wrong:
                raise ValueError(problem)

    def torch_call(self, examples: Sequence[Mapping[str, Any]]) -> PackedInputs:
        """Flatten the rows; the class describes input and output."""
        columns = ("labels",) if self.whole_rows else ("labels", "seq_lengths")
        rows = [_read_row(index, example, columns) for index, example in enumerate(examples)]
        ids, lengths = [ids for ids, _, _ in rows], _flatten([lengths for _, _, lengths in rows])
        if not lengths.size:
            raise ValueError(f"the batch has no token in its {len(rows)} row(s): drop empty rows from the dataset")
        for each in ids:
            self._check_vocabulary("input_ids", each)
        labels, multiple = _flatten([labels for _, labels, _ in rows]), self.pad_to_multiple_of or 1
        labels[lengths.cumsum() - lengths] = IGNORE_INDEX
        row = None
        if self.share_prefixes:
            ids = [_flatten(ids)]
            row = share(ids[0], lengths)
        tokens = len(labels) if row is None else len(row.source_of)
        num_padding = -tokens % multiple
        targets = torch.full((1, len(labels) if row else tokens + num_padding), IGNORE_INDEX)
        targets[0, : len(labels)] = torch.from_numpy(labels)
        if row is None:
            batch = PackedBatch.from_lengths(lengths, num_padding=num_padding, labels=targets)
        else:
            loss_positions, loss_labels, weights = map(torch.from_numpy, score(row, ids[0], labels))
            token_of = torch.from_numpy(row.token_of)
            documents = Documents(
                tuple(lengths.tolist()), token_of, weights, token_of.bincount(minlength=tokens + num_padding).float(),
                loss_tokens=int(weights.sum(dtype=torch.int64)), capacity=len(labels) + -len(labels) % multiple,
            )  # fmt: skip
            prefixes = row.first_positions, row.key_index
            batch = replace(
                PackedBatch.from_lengths(row.lengths, num_padding=num_padding, prefixes=prefixes),
                loss_positions=loss_positions, loss_labels=loss_labels, labels=TensorVersion.of(targets),
                documents=documents,
            )  # fmt: skip
            ids = [ids[0][row.source_of]]
        assert batch.loss_labels is not None
        self._check_vocabulary("labels", batch.loss_labels.numpy())  # only what the loss counts
        padding = np.full(num_padding, self.pad_token_id or 0)
        inputs = {"input_ids": torch.from_numpy(_flatten([*ids, padding]).reshape(1, -1)), "labels": targets}
        return PackedInputs(inputs | to_transformers_kwargs(batch) | {"packed_batch": batch})

    def _check_vocabulary(self, name: str, ids: Ints) -> None:
        if self.vocab_size is None or not ids.size:
            return
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.vocab_size:
            wrong, fix = low if low < 0 else high, "use the tokenizer of this model, or model.resize_token_embeddings"
            raise ValueError(f"{name} has token id {wrong}, outside the vocabulary [0, {self.vocab_size}): {fix}")


def unshared(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a batch with each document by itself, as without sharing, for who reads rows token by token.

    On its device, without synchronizing; `inputs` itself if nothing is shared.
    """
    batch = inputs.get("packed_batch")
    if not isinstance(batch, PackedBatch) or batch.documents is None:
        return inputs
    documents = batch.documents
    plain = PackedBatch.from_lengths(documents.lengths).to(batch.device)
    rest = {name: value for name, value in inputs.items() if name not in to_transformers_kwargs(batch)}
    ids = inputs["input_ids"].index_select(1, documents.token_of)
    return PackedInputs(rest | {"input_ids": ids, "packed_batch": plain} | to_transformers_kwargs(plain))


def _read_row(index: int, example: Mapping[str, Any], columns: Sequence[str]) -> tuple[Ints, Ints, Ints]:
    """Return token ids, labels (the same object if the row has none) and document lengths, none of them 0."""
    if "input_ids" not in example:
        others, fix = ", ".join(map(repr, example)), "tokenize the dataset, or let SFTTrainer prepare it"
        raise ValueError(f"row {index} has no 'input_ids' column, only {others or 'nothing'}: {fix}")
    ids = _to_array(index, "input_ids", example["input_ids"])
    given = {name: _to_array(index, name, example[name]) for name in columns if example.get(name) is not None}
    labels, lengths = given.get("labels", ids), given.get("seq_lengths", np.array([len(ids)]))
    if len(labels) != len(ids):
        fix = f"give one label per token, {IGNORE_INDEX} where the loss does not count"
        raise ValueError(f"row {index} has {len(labels)} labels for {len(ids)} input_ids: {fix}")
    if lengths.min(initial=0) < 0 or lengths.sum() != len(ids):
        raise ValueError(
            f"row {index} has seq_lengths (min {lengths.min(initial=0)}) that add up to {lengths.sum()} for {len(ids)} "
            "input_ids: lengths must be >= 0 and cover the row; pack the dataset again (trl.pack_dataset)"
        )
    return ids, labels, lengths[lengths > 0]


def _to_array(index: int, name: str, value: Any) -> Ints:
    """Return one column of one row as a flat array of integers, without a copy if it is one."""
    try:
        array = value.numpy(force=True) if isinstance(value, Tensor) else np.asarray(value)
    except (TypeError, ValueError):  # ragged lists
        array = np.empty(0, object)
    if array.ndim == 1 and array.size == 0 and array.dtype != object:
        return np.empty(0, np.int64)  # an empty list has no integer type
    if array.ndim != 1 or array.dtype.kind not in "iu":
        kind = f"{type(value).__name__} ({array.dtype}, {array.ndim} dimension(s))"
        raise ValueError(f"row {index} has '{name}' of type {kind}: give one flat sequence of integers")
    return array


def _flatten(rows: Sequence[Ints]) -> Ints:
    """Return rows one after the other as int64."""
    return np.concatenate(rows or [np.empty(0, np.int64)], dtype=np.int64, casting="same_kind")
