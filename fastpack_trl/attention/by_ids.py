"""What the packing proof sees by token ids alone: a backbone may read them beside the embeddings of its tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from fastpack_trl.attention.probe import Probe
from fastpack_trl.errors import PackingError
from fastpack_trl.model.sharded import in_any_process, units

# What a model raises that takes no `input_ids`, or not those of a packed row.
_REFUSES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, NotImplementedError)

Leaks = list[tuple[int, int, float]]


def leaks_by_ids(probe: Probe, logits: Tensor, seed: int, *, exact: bool) -> tuple[Leaks, tuple[float, float] | None]:
    """Compare the row by its ids with the row by its embeddings; where they differ, ids say more, e.g. of n-grams.

    Args:
        probe: the row.
        logits: of the packed row by its embeddings, detached.
        seed: of the tokens that each document is given in turn.
        exact: whether the logits of a document depend on no other one's at all, be it by rounding.

    Returns:
        The changes of a document's logits where another document has other ids, and the sums of losses, packed and
        separate; none of both where ids are embedded and nothing more, or the model takes none.
    """
    try:
        packed = probe.packed_by_ids(probe.ids)
        if not in_any_process(probe.model, not torch.equal(packed, logits)):  # the same operations on the same numbers
            return [], None
        # A kernel that rounds otherwise in each run tells nothing exactly.
        leaks = _changes(probe, packed, seed) if exact and _repeats(probe, packed) else []
        separate = probe.separate_losses(by_ids=True)
    except (PackingError, torch.OutOfMemoryError, torch.AcceleratorError):
        raise
    except _REFUSES:
        if units(probe.model):
            raise  # the other processes run on without this one
        return [], None
    finally:
        probe.batch.clear_derived()
    return leaks, (probe.packed_losses(packed), separate)


def _repeats(probe: Probe, packed: Tensor) -> bool:
    return not in_any_process(probe.model, not torch.equal(probe.packed_by_ids(probe.ids), packed))


def _changes(probe: Probe, packed: Tensor, seed: int) -> Leaks:
    others = type(probe)(probe.model, probe.attention, probe.lengths, seed).ids
    document_of = torch.arange(len(probe.lengths)).repeat_interleave(torch.tensor(probe.lengths)).to(others.device)
    leaks = []
    for source in range(len(probe.lengths)):
        ids = torch.where(document_of == source, others, probe.ids)
        change = (probe.packed_by_ids(ids) - packed).abs().split(probe.lengths)
        found = ((source, target, float(part.max())) for target, part in enumerate(change) if target != source)
        leaks += [leak for leak in found if leak[2] != 0.0]  # a NaN is a leak too
    return leaks
