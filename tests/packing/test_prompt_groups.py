"""The row of a padded batch: what it holds, what the head reads of it, and where that belongs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fastpack_trl.packing.prompt_groups import PromptGroups, PromptGroupsCollator, completions, group_completions, pairs

Padded = tuple[Tensor, Tensor, Tensor]
PAD = 0


def pad(
    rows: Sequence[tuple[Sequence[int], Sequence[int]]], left: Sequence[int] | None = None, extra: int = 0
) -> Padded:
    """Tokens, attention mask and completion mask of prompts with completions, `left` columns of padding before each."""
    left = left or [0] * len(rows)
    width = max(start + len(prompt) + len(answer) for start, (prompt, answer) in zip(left, rows, strict=True)) + extra
    ids, mask, scored = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(3))
    for index, (start, (prompt, answer)) in enumerate(zip(left, rows, strict=True)):
        middle, end = start + len(prompt), start + len(prompt) + len(answer)
        ids[index, start:end] = torch.tensor([*prompt, *answer])
        mask[index, start:end] = 1
        scored[index, middle:end] = 1
    return ids, mask, scored


def drawn(seed: int) -> Padded:
    """Prompts of which some are equal, completions of which some are, or begin alike, or are empty; padded anyhow."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(1, 9) for _ in range(draw.randrange(1, 30))] for _ in range(draw.randrange(1, 4))]
    rows = []
    for _ in range(draw.randrange(1, 9)):
        answer = [draw.randrange(1, 3) for _ in range(draw.randrange(0, 6))]
        rows.append((draw.choice(prompts), answer))
    return pad(rows, [draw.randrange(4) for _ in rows], draw.randrange(3))


def seen(groups: PromptGroups, position: int) -> list[int]:
    """The places in the padded batch of what the token at a position of the row sees: by parents, in order."""
    batch = groups.batch
    ends = torch.tensor(batch.segment_lengths).cumsum(0)
    segment = int((ends <= position).sum())
    start = int(ends[segment]) - batch.segment_lengths[segment]
    before: list[int] = []
    if batch.shared is not None:
        first = int(batch.shared.cu_seqlens_k[segment])
        before = batch.shared.key_index[first : first + batch.shared.prefix_lengths[segment]].tolist()
    return groups.tokens[[*before, *range(start, position + 1)]].tolist()


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_each_scored_token_is_predicted_from_all_that_comes_before_it_in_its_padded_row(seed: int, share: bool) -> None:
    ids, mask, scored = drawn(seed)
    found = group_completions(ids, mask, scored, share=share, least=1)
    assert isinstance(found, PromptGroups)
    width = ids.shape[1]
    asked = [(row, column) for row, column in scored.nonzero().tolist() if column > 0]
    assert found.places.tolist() == [row * (width - 1) + column - 1 for row, column in asked]
    flat = ids.flatten()
    for position, (row, column) in zip(found.positions.tolist(), asked, strict=True):
        context = ids[row, :column][mask[row, :column] != 0].tolist()
        assert flat[seen(found, position)].tolist() == context
        assert int(found.batch.position_ids[0, position]) == len(context) - 1
    copies = torch.ones(1, len(found.tokens), dtype=torch.int64) if found.copies is None else found.copies
    counted = torch.zeros(10, dtype=torch.int64).index_add(0, found.row(ids)[0], copies[0])
    assert torch.equal(counted, torch.bincount(ids[mask != 0], minlength=10))
    assert (found.batch.total_tokens < int(mask.sum())) == (found.copies is not None)
    assert share or found.copies is None


def group(*rows: tuple[list[int], list[int]], least: int = 1) -> PromptGroups:
    found = group_completions(*pad(rows), least=least)
    assert isinstance(found, PromptGroups)
    return found


def test_worked_examples() -> None:
    found = group(([1, 2], [3, 4]), ([1, 2], [5]))
    assert (found.tokens.tolist(), found.shape) == ([0, 1, 2, 3, 6], (2, 4))
    assert (found.positions.tolist(), found.places.tolist()) == ([1, 2, 1], [1, 2, 4])
    assert found.copies is not None
    assert found.copies.tolist() == [[2, 2, 1, 1, 1]]
    assert found.batch.position_ids.tolist() == [[0, 1, 2, 3, 2]]
    for least, tokens in ((16, 32), (15, 17)):
        assert group(([1] * 15, [2]), ([1] * 15, [3]), least=least).batch.total_tokens == tokens
    for other in ([5, 6], [5, 6, 7]):  # equal completions, and one that begins the other
        found = group(([1, 2], other), ([1, 2], [5, 6]))
        assert found.batch.total_tokens == 2 + len(other)
        assert found.positions.tolist() == [*range(1, 1 + len(other)), 1, 2]


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ((torch.ones(1, 3, dtype=torch.int64), torch.tensor([[1, 0, 1]]), torch.tensor([[0, 0, 1]])), "in the middle"),
        ((torch.ones(1, 3, dtype=torch.int64), torch.tensor([[1, 1, 0]]), torch.tensor([[0, 1, 1]])), "is scored"),
        ((torch.ones(1, 3, dtype=torch.int64), torch.tensor([[0, 1, 1]]), torch.tensor([[0, 1, 1]])), "a prompt"),
        ((torch.ones(1, 3, dtype=torch.int64), torch.zeros(1, 3), torch.zeros(1, 3)), "without a token"),
        ((torch.ones(1, 3, dtype=torch.int64), torch.ones(1, 4), torch.zeros(1, 3)), "of shape"),
    ],
)  # fmt: skip
def test_what_is_no_row_is_said(batch: Padded, why: str) -> None:
    found = group_completions(*batch)
    assert isinstance(found, str)
    assert why in found


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_pairs_are_read_where_a_classifier_reads_them(seed: int, share: bool) -> None:
    """At the last token of another id than padding, which may also be a token of the text."""
    draw = random.Random(seed)
    half = draw.randrange(1, 4)
    prompts = [[draw.randrange(9) for _ in range(draw.randrange(1, 20))] for _ in range(half)]
    rows = [
        ([*prompt, 3], [draw.randrange(3) for _ in range(draw.randrange(5))]) for _ in range(2) for prompt in prompts
    ]
    ids, mask, _ = pad(rows)
    found = pairs({"input_ids": ids, "attention_mask": mask}, "", pad_token_id=PAD, share=share, least=1)
    assert isinstance(found, PromptGroups)
    assert found.places.tolist() == list(range(2 * half))
    for row, position in enumerate(found.positions.tolist()):
        last = int((ids[row] != PAD).nonzero().max())
        assert ids.flatten()[seen(found, position)].tolist() == ids[row, : last + 1].tolist()


def test_the_collator_adds_rows_and_leaves_everything_else() -> None:
    def collated(find: Any, names: set[str]) -> Any:
        given = {name: inner[name] for name in names}
        batch = PromptGroupsCollator(lambda _: given, find, share=True)([])
        assert {key: batch[key] for key in given} == given
        return batch["fastpack_prompt_groups"]["input_ids"]

    ids, mask, scored = pad([([1, 2], [3, 4]), ([1, 2], [5])])
    inner = {"input_ids": ids, "attention_mask": mask, "completion_mask": scored, "label": [True, False]}
    assert isinstance(collated(completions, {*inner}), PromptGroups)
    without = {"input_ids", "attention_mask"}
    assert collated(completions, without) == "a batch without completion_mask"
    assert collated(partial(pairs, pad_token_id=PAD), without).places.tolist() == [0, 1]
