"""`DocumentsCollator`: each document of a packed row as a padded row, for models that nothing keeps them apart in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor

from fastpack_trl.model.upstream import DataCollatorForLanguageModeling
from fastpack_trl.packing.packed_batch import IGNORE_INDEX

PADDED_DOCUMENTS = "padded_documents"
"""In the place of an attention path: documents are handed to TRL's padding collator one by one."""


class DocumentsCollator:
    """Split packed rows at their ``seq_lengths``, and let TRL's collator pad the documents.

    ``[{"input_ids": [5, 6, 7, 8, 9], "seq_lengths": [3, 2]}]`` -> ``input_ids=[[5, 6, 7], [8, 9, 0]]``. The loss counts
    the same tokens as in the packed row: first tokens have no label. Its padding, which TRL counts, is one more row.
    `stock` is the trainer's collator, with ``padding_free=True``.
    """

    def __init__(self, stock: DataCollatorForLanguageModeling) -> None:
        self.pad = replace(stock, padding_free=False)

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        documents = [document for example in examples for document in _documents(example)]
        tokens = sum(len(document["input_ids"]) for document in documents)
        if count := -tokens % (self.pad.pad_to_multiple_of or 1):
            documents.append({"input_ids": [self.pad.pad_token_id] * count, "labels": [IGNORE_INDEX] * count})
        batch: dict[str, Any] = self.pad(documents)
        batch["labels"][:, 0] = IGNORE_INDEX
        return batch


def as_one_row(mask: Tensor, *padded: Tensor | None) -> list[Tensor | None]:
    """Return values per token of padded documents, (documents, width, ...), as one row, (1, tokens, ...).

    `mask` is (documents, width), 1 for tokens; `padded`, logits and labels, may have virtual tokens before these.
    """
    tokens = mask.bool()
    return [one if one is None else one[:, -mask.shape[1] :][tokens.to(one.device)][None] for one in padded]


def _documents(example: Mapping[str, Any]) -> list[dict[str, Any]]:
    columns = {name: example[name] for name in ("input_ids", "labels") if example.get(name) is not None}
    lengths = example.get("seq_lengths")  # a list, or an array or tensor in the format of the data set
    ends = accumulate([len(columns["input_ids"])] if lengths is None else map(int, lengths), initial=0)
    return [{name: values[a:b] for name, values in columns.items()} for a, b in pairwise(ends) if a < b]
