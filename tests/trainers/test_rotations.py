"""Rotations and scalings that follow the length of a padded row: rows without padding compute what TRL's batches do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from preference_material import assert_same, both, classifier
from random_pairs_runs import model
from trainer_material import assert_same_log
from trainer_material import both as both_sft

from fastpack_trl.model.changes import isolated_run
from fastpack_trl.model.facts import position_use
from fastpack_trl.packing.prompt_groups import group_completions

CLOSE = {"rtol": 2e-5, "atol": 2e-5}
ONLINE = {"learning_rate": 0.0, "gradient_accumulation_steps": 2, "eval_strategy": "no"}
PADDED = {"pad_to_multiple_of": 32, "eval_strategy": "no"}  # beyond the switching length more often than tokens are
LLAMA, GEMMA = ("llama", "dynamic", 32), ("gemma3_text", "per layer", 20)
SCALED, LLAMA4 = ("ministral3", "scaled", 8), ("llama4_text", "default", 32)


@pytest.mark.parametrize(
    ("name", "rotation", "options"),
    [
        ("RLOO", ("phi3", "longrope", 32), ONLINE),
        ("GRPO", GEMMA, ONLINE | {"num_iterations": 2, "learning_rate": 1e-3}),
        ("DPO", ("qwen3", "dynamic", 56), PADDED | {"precompute_ref_log_probs": True}),
        ("KTO", ("llama", "dynamic", 56), PADDED),
        ("Reward", ("qwen3", "longrope", 48), PADDED),
    ],
)
def test_rows_rotate_as_their_padded_batch(name: str, rotation: Any, options: dict[str, Any], tmp_path: Path) -> None:
    def make() -> dict[str, Any]:
        return {"model": classifier(model=model(*rotation)) if name == "Reward" else model(*rotation)}

    ours, stock = both(name, tmp_path, make, max_steps=3, max_length=None, **options)
    assert [ours.fastpack_report[part].status for part in ("batches", "share_prefixes")] == ["on", "on"]
    assert_same(ours, stock, **CLOSE)


@pytest.mark.parametrize("rotation", [("phi3", "longrope", 20), GEMMA], ids=str)
def test_padding_of_a_packed_row_selects_no_rotation(rotation: Any, tmp_path: Path) -> None:
    options = {"packing": True, "pad_to_multiple_of": 64, "per_device_train_batch_size": 1, "max_length": 20}
    assert_same_log(*both_sft(tmp_path, model=model(*rotation), **options), **CLOSE)


def test_left_padding_shifts_positions_that_scale_attention(tmp_path: Path) -> None:
    ours, stock = both("GRPO", tmp_path, lambda: {"model": model(*SCALED)}, max_steps=2, **ONLINE)
    assert "left padding shifts positions, which scale attention" in ours.fastpack_report["batches"].reason
    assert_same(ours, stock, **CLOSE)


@pytest.mark.parametrize("rotation", [LLAMA, GEMMA], ids=str)
@pytest.mark.parametrize("length", [10, 60])
def test_a_check_leaves_the_length_that_a_rotation_was_made_for(rotation: Any, length: int) -> None:
    decoder, ids = model(*rotation), torch.arange(96)[None]
    with torch.no_grad():
        decoder(ids[:, :50])
        expected = decoder(ids[:, :45]).logits
        with isolated_run(decoder, training=False):
            decoder(ids[:, :length])
        assert torch.equal(decoder(ids[:, :45]).logits, expected)


@pytest.mark.parametrize(("share", "copies"), [(True, [2, 2, 1, 1, 1, 0]), (False, [1, 1, 1, 1, 1, 1, 1, 0])])
def test_a_row_reaches_the_last_position_by_a_token_of_no_document(share: bool, copies: list[int]) -> None:
    ids = torch.tensor([[0, 1, 2, 3, 4, 0, 0], [0, 1, 2, 5, 0, 0, 0]])
    plain, kept = (
        group_completions(ids, (ids > 0).long(), (ids > 2).long(), share=share, least=1, keep_width=keep_width)
        for keep_width in (False, True)
    )
    assert kept.batch.position_ids[0].tolist() == [*plain.batch.position_ids[0].tolist(), 6]  # type: ignore[union-attr]
    assert torch.equal(kept.positions, plain.positions)  # type: ignore[union-attr]
    assert kept.copies.tolist() == [copies]  # type: ignore[union-attr]


USES = {LLAMA: (True, math.inf), GEMMA: (True, math.inf), SCALED: (False, 8), LLAMA4: (False, 8192)}


@pytest.mark.parametrize("rotation", USES, ids=str)
def test_what_a_model_reads_of_positions(rotation: Any) -> None:
    assert position_use(model(*rotation)) == USES[rotation]
