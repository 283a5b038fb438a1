"""`ReferencedTrainer`: DPO's and KTO's comparison with a reference, on rows; before training too."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader

from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.packing.prompt_groups import PromptGroups, completions
from fastpack_trl.trainers.packed import PackedTrainer

_ANSWERS = ("chosen_ids", "rejected_ids", "completion_ids", "KL_completion_ids")


class _Computed(NamedTuple):
    """Log-probabilities of a whole data set, in its order: what stock's loop gets in place of its batches."""

    figures: tuple[Tensor | None, ...]


class ReferencedTrainer(PackedTrainer):
    """One that compares with a reference."""

    def compute_ref_log_probs(self, model: Any, inputs: Any) -> Any:
        """Compute stock's log-probabilities of the reference, on rows."""
        if isinstance(inputs, _Computed):
            return inputs.figures
        with self._fastpack_on_rows(inputs):
            return super().compute_ref_log_probs(model, inputs)

    def _precompute_ref_logps(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        if self._fastpack_disabled:
            return super()._precompute_ref_logps(dataset, *args, **kwargs)
        self._fastpack_choose()
        with self._fastpack_features(), self._fastpack_collating(training=False):
            by_length: Any = contextlib.nullcontext()
            if self.fastpack_run.packs and self.accelerator.num_processes == 1:
                by_length = patch_attribute(sys.modules[self._fastpack_stock.__module__], "DataLoader", self._by_length)
            with by_length:  # stock's loop over it, and its cache of the result
                return super()._precompute_ref_logps(dataset, *args, **kwargs)

    def _by_length(self, dataset: Dataset, batch_size: int, *, shuffle: bool, **options: Any) -> list[_Computed]:
        """Compute what stock would with a loader of these arguments, in batches of like length."""
        batches = length_batches(_lengths(dataset, self.args.max_length), batch_size)
        loader = self.accelerator.prepare(DataLoader(dataset, batch_sampler=batches, **options))
        model = getattr(self, "ref_model", None) or self.model
        found = zip(*(self.compute_ref_log_probs(model, batch) for batch in loader), strict=True)
        back = torch.from_numpy(np.concatenate(batches).argsort())
        return [_Computed(tuple(None if each[0] is None else torch.cat(each).cpu()[back] for each in found))]

    def _fastpack_find(self) -> Callable[..., PromptGroups | str] | None:
        return completions


def _lengths(dataset: Dataset, max_length: int | None) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the tokens of each example of a prepared data set, all its completions with their prompts, as cut."""
    answers = [name for name in _ANSWERS if name in dataset.column_names]
    table = dataset.select_columns(["prompt_ids", *answers]).with_format("arrow")[:]
    prompt, *rest = (pc.list_value_length(table[name]).to_numpy().astype(np.int64) for name in table.column_names)
    longest = np.iinfo(np.int64).max if max_length is None else max_length
    return np.sum([np.minimum(prompt + answer, longest) for answer in rest], axis=0)


def length_batches(lengths: np.ndarray[Any, np.dtype[np.int64]], batch_size: int) -> Sequence[list[int]]:
    """Return batches of examples, longest first, of as many tokens as `batch_size` of the longest have.

    That is what the padded batch has that holds the longest example, so memory for it is there.
    """
    room = batch_size * int(lengths.max(initial=1))
    batches: list[list[int]] = []
    left = 0
    for index in np.argsort(-lengths, kind="stable").tolist():
        if lengths[index] > left or not batches:
            batches.append([])
            left = room
        batches[-1].append(index)
        left -= int(lengths[index])
    return batches
