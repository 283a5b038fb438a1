"""The row of a padded batch: what it holds, what the head reads of it, and where that belongs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from shared_material import seen_by
from torch import Tensor

from fastpack_trl.packing.prompt_groups import PromptGroups, PromptGroupsCollator, completions, group_completions, pairs

Padded = tuple[Tensor, Tensor, Tensor]
both_ways = pytest.mark.parametrize("share", [True, False])


def pad(rows: Sequence[tuple[list[int], list[int]]], left: Sequence[int] | None = None, extra: int = 0) -> Padded:
    """Tokens, attention mask and completion mask of prompts with completions, `left` columns of padding before each."""
    left = left or [0] * len(rows)
    width = max(start + len(prompt) + len(answer) for start, (prompt, answer) in zip(left, rows, strict=True)) + extra
    ids, mask, scored = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(3))
    for index, (start, (prompt, answer)) in enumerate(zip(left, rows, strict=True)):
        tokens = torch.tensor([*prompt, *answer])
        ids[index, start : start + len(tokens)], mask[index, start : start + len(tokens)] = tokens, 1
        scored[index, start + len(prompt) : start + len(tokens)] = 1
    return ids, mask, scored


def context(groups: Any, ids: Tensor, position: int) -> list[int]:
    """The tokens that one of the row sees, by its place in the padded batch."""
    return groups.row(ids)[0, seen_by(groups.batch, position)].tolist()


@both_ways
@pytest.mark.parametrize("seed", range(40))
def test_scored_tokens_are_predicted_from_what_precedes_them_in_their_padded_row(seed: int, share: bool) -> None:
    """Some prompts are equal; some completions are, or begin alike, or are empty; padding is on either side."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(1, 9) for _ in range(draw.randrange(1, 30))] for _ in range(draw.randrange(1, 4))]
    rows = [
        (draw.choice(prompts), [draw.randrange(1, 3) for _ in range(draw.randrange(6))]) for _ in range(seed % 8 + 1)
    ]
    ids, mask, scored = pad(rows, [draw.randrange(4) for _ in rows], draw.randrange(3))
    groups: Any = group_completions(ids, mask, scored, share=share, least=1)
    requested = [(row, column) for row, column in scored.nonzero().tolist() if column > 0]
    assert groups.places.tolist() == [row * (ids.shape[1] - 1) + column - 1 for row, column in requested]
    for position, (row, column) in zip(groups.positions.tolist(), requested, strict=True):
        before = ids[row, :column][mask[row, :column] != 0].tolist()
        assert context(groups, ids, position) == before
        assert int(groups.batch.position_ids[0, position]) == len(before) - 1
    copies = torch.ones(1, len(groups.tokens), dtype=torch.int64) if groups.copies is None else groups.copies
    counts = torch.zeros(10, dtype=torch.int64).index_add(0, groups.row(ids)[0], copies[0])
    assert torch.equal(counts, torch.bincount(ids[mask != 0], minlength=10))
    assert (groups.batch.total_tokens < int(mask.sum())) == (groups.copies is not None)
    assert share or groups.copies is None


@pytest.mark.parametrize(
    ("mask", "scored", "reason"),
    [
        ([1, 0, 1], [0, 0, 1], "in the middle"),
        ([1, 1, 0], [0, 1, 1], "is scored"),
        ([0, 1, 1], [0, 1, 1], "a prompt"),
        ([0, 0, 0], [0, 0, 0], "without a token"),
        ([1, 1, 1, 1], [0, 0, 0], "of shape"),
    ],
)
def test_the_reason_without_a_row(mask: list[int], scored: list[int], reason: str) -> None:
    assert reason in group_completions(torch.ones(1, 3, dtype=torch.long), torch.tensor([mask]), torch.tensor([scored]))


@both_ways
@pytest.mark.parametrize("seed", range(20))
def test_pairs_are_read_where_a_classifier_reads_them(seed: int, share: bool) -> None:
    """At the last token of another id than padding, which may also be a token of the text."""
    draw = random.Random(seed)
    prompts = [[*(draw.randrange(9) for _ in range(draw.randrange(1, 20))), 3] for _ in range(draw.randrange(1, 4))]
    ids, mask, _ = pad([(prompt, [draw.randrange(3) for _ in range(draw.randrange(5))]) for prompt in prompts * 2])
    groups: Any = pairs({"input_ids": ids, "attention_mask": mask}, "", pad_token_id=0, share=share, least=1)
    assert groups.places.tolist() == list(range(len(ids)))
    for row, position in enumerate(groups.positions.tolist()):
        last = int(ids[row].nonzero().max())
        assert context(groups, ids, position) == ids[row, : last + 1].tolist()


def test_the_collator_adds_rows_and_leaves_everything_else() -> None:
    def collated(find: Any, names: set[str]) -> Any:
        given = {name: inner[name] for name in names}
        batch = PromptGroupsCollator(lambda _: given, find, {"share": True})([])
        assert {key: batch[key] for key in given} == given
        return batch["fastpack_prompt_groups"]["input_ids"]

    ids, mask, scored = pad([([1, 2], [3, 4]), ([1, 2], [5])])
    inner = {"input_ids": ids, "attention_mask": mask, "completion_mask": scored, "label": [True, False]}
    assert isinstance(collated(completions, {*inner}), PromptGroups)
    without = {"input_ids", "attention_mask"}
    assert collated(completions, without) == "a batch without completion_mask"
    assert collated(partial(pairs, pad_token_id=0), without).places.tolist() == [0, 1]
