"""Stock's preparation of a data set in two passes, so that documents are checked and counted before they are cut."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from datasets import Dataset, IterableDataset

from fastpack_trl.errors import DataError
from fastpack_trl.packing.dataset import (
    DatasetFacts,
    check_lengths,
    drop_empty,
    is_token_lists,
    measure,
    why_none_is_left,
)
from fastpack_trl.packing.source import check_source


def can_prepare_in_two_passes(dataset: Any) -> bool:
    """Return whether `dataset` can be read before it is trained on: neither streamed, nor transformed, nor empty."""
    return not isinstance(dataset, IterableDataset) and dataset.format["type"] != "custom" and bool(len(dataset))


def prepare_in_two_passes(
    stock: Callable[..., Any],
    dataset: Dataset,
    processing_class: Any,
    args: Any,
    packing: bool,
    formatting_func: Any,
    name: str,
    *,
    count: bool,
) -> tuple[Any, DatasetFacts | None]:
    """Tokenize, then cut and pack, each by stock's own preparation.

    Args:
        stock: `SFTTrainer._prepare_dataset`; the next six arguments are its own.
        dataset: one that `can_prepare_in_two_passes` accepts.
        processing_class: the tokenizer.
        args: the `SFTConfig`.
        packing: whether documents are packed into rows.
        formatting_func: makes the text of a row, or None.
        name: of the data set, for messages.
        count: whether the facts are wanted, and a data set of which nothing is left is an error.

    Returns:
        The prepared data set, and its facts if wanted and if its rows are token lists.

    Raises:
        DataError: columns that cannot be read, labels of another length than the tokens, no token, or none left.
    """
    check_source(dataset, args.dataset_text_field, formatted=formatting_func is not None, name=name)
    whole = copy.copy(args)
    whole.max_length, whole.shuffle_dataset = None, False
    documents = stock(dataset, processing_class, whole, False, formatting_func, name)
    if not is_token_lists(documents, ("input_ids", "labels")):
        return stock(documents, processing_class, args, packing, None, name), None
    check_lengths(documents, name)
    documents, empty = drop_empty(documents)
    if not len(documents):
        raise DataError(f"the {name} data set has no token: all {empty} documents are empty")
    prepared = stock(documents, processing_class, args, packing, None, name)
    if not count:
        return prepared, None
    if not len(prepared):
        raise DataError(why_none_is_left(documents, args.max_length))
    strategy = args.packing_strategy if packing else None
    facts = measure(documents, prepared, max_length=args.max_length, strategy=strategy, empty_documents=empty)
    return prepared, facts
