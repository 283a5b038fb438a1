"""Rotations and scalings that follow the length of a padded row: rows without padding compute what TRL's batches do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from preference_material import assert_same, both, build, pairs
from random_pairs_runs import model
from trainer_material import assert_same_log, train
from transformers import AutoModelForSequenceClassification
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.model.changes import isolated_run
from fastpack_trl.model.facts import position_use
from fastpack_trl.packing.prompt_groups import PromptGroups, group_completions

CLOSE = {"rtol": 2e-5, "atol": 2e-5}
SWITCH = 32
ONLINE = {"learning_rate": 0.0, "gradient_accumulation_steps": 2, "eval_strategy": "no"}
PADDED = {"pad_to_multiple_of": 32, "eval_strategy": "no"}


def made(name: str, family: str, rotation: str, switch: int = SWITCH) -> Any:
    causal = model(family, rotation, switch)
    if name != "Reward":
        return causal
    causal.config.num_labels, causal.config.pad_token_id = 1, 0
    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_config(causal.config).float()


@pytest.mark.parametrize(
    ("name", "family", "rotation", "options"),
    [
        ("RLOO", "phi3", "longrope", ONLINE),
        ("GRPO", "gemma3_text", "per layer", ONLINE | {"num_iterations": 2, "learning_rate": 1e-3}),
        ("DPO", "llama", "longrope", PADDED),
        ("DPO", "qwen3", "dynamic", PADDED | {"precompute_ref_log_probs": True}),
        ("KTO", "llama", "dynamic", PADDED),
        ("Reward", "qwen3", "longrope", PADDED),
    ],
)
def test_rows_rotate_as_their_padded_batch(
    name: str, family: str, rotation: str, options: dict[str, Any], tmp_path: Path
) -> None:
    switch = {"DPO": 56, "KTO": 56, "Reward": 48}.get(name, SWITCH)  # which padding exceeds more often than tokens
    ours, stock = both(
        name, tmp_path, lambda: {"model": made(name, family, rotation, switch)}, max_steps=3, max_length=None, **options
    )
    assert position_use(ours.model).by_longest
    assert ours.fastpack_report["batches"].path == "padding-free"
    assert ours.fastpack_report["share_prefixes"].status == "on"
    assert_same(ours, stock, **CLOSE)


@pytest.mark.parametrize(("family", "rotation"), [("phi3", "longrope"), ("gemma3_text", "per layer")])
def test_padding_of_a_packed_row_selects_no_rotation(family: str, rotation: str, tmp_path: Path) -> None:
    """TRL gives each token of padding position 0; ours count up, but never beyond a document."""
    options = {"packing": True, "pad_to_multiple_of": 64, "per_device_train_batch_size": 1, "max_length": 20}
    ours, stock = (
        train(cls, tmp_path / cls.__name__, model=model(family, rotation, 20), **options)
        for cls in (FastSFTTrainer, SFTTrainer)
    )
    assert_same_log(ours, stock, **CLOSE)


@pytest.mark.parametrize("name", ["GRPO", "RLOO"])
def test_left_padding_shifts_positions_that_scale_attention(name: str, tmp_path: Path) -> None:
    ours, stock = both(name, tmp_path, lambda: {"model": made(name, "ministral3", "scaled", 8)}, max_steps=2, **ONLINE)
    assert "left padding shifts positions, which scale attention" in ours.fastpack_report["batches"].reason
    assert_same(ours, stock, **CLOSE)
    within = build(name, tmp_path, fast=True, model=made(name, "ministral3", "scaled", 96), max_steps=1, **ONLINE)
    within.train()
    assert "left padding" not in within.fastpack_report["batches"].reason, "nothing is scaled before that position"


def test_a_check_leaves_the_length_that_a_rotation_was_made_for(tmp_path: Path) -> None:
    """The second start checks the model again, on few tokens; TRL goes on with the rotation of the longest batch."""
    logs = []
    for fast in (True, False):
        trainer = build(
            "DPO", tmp_path, fast=fast, model=made("DPO", "llama", "dynamic", 20), data=pairs(20, prompt=36),
            max_steps=2, eval_strategy="no",
        )  # fmt: skip
        trainer.train()
        trainer.train()
        logs.append(trainer)
    assert_same(*logs, **CLOSE)


@pytest.mark.parametrize("length", [20, 60])
def test_an_isolated_run_restores_rotary_state(length: int) -> None:
    for family, rotation in (("llama", "dynamic"), ("gemma3_text", "per layer"), ("phi3", "longrope")):
        decoder = made("", family, rotation)
        ids = torch.arange(96)[None]
        with torch.no_grad():
            decoder(ids[:, :50])
            rotary = next(module for module in decoder.modules() if hasattr(module, "rope_type"))
            state = {name: value for name, value in vars(rotary).items() if "max_seq_len" in name}
            expected = decoder(ids[:, :45]).logits
            with isolated_run(decoder, training=False):
                decoder(ids[:, :length])
            assert {name: vars(rotary)[name] for name in state} == state, (family, state)
            assert torch.equal(decoder(ids[:, :45]).logits, expected), family


@pytest.mark.parametrize("share", [True, False])
def test_a_row_reaches_the_last_position_of_its_batch_by_a_token_of_no_document(share: bool) -> None:
    ids = torch.tensor([[0, 1, 2, 3, 4, 0, 0], [0, 1, 2, 5, 0, 0, 0]])
    mask, scored = (ids > 0).long(), torch.zeros_like(ids)
    scored[:, 3:] = mask[:, 3:]
    plain, kept = (
        group_completions(ids, mask, scored, share=share, least=1, keep_width=keep_width)
        for keep_width in (False, True)
    )
    assert isinstance(plain, PromptGroups) and isinstance(kept, PromptGroups)  # noqa: PT018
    assert kept.batch.position_ids[0].tolist() == [*plain.batch.position_ids[0].tolist(), 6]
    assert kept.batch.seq_lengths == plain.batch.seq_lengths
    assert torch.equal(kept.positions, plain.positions) and torch.equal(kept.places, plain.places)  # noqa: PT018
    assert kept.copies is not None
    assert kept.copies[0].tolist() == [*(1,) * 7, 0] if not share else [2, 2, 1, 1, 1, 0]
    full = group_completions(ids[:, 1:5], mask[:, 1:5], scored[:, 1:5], share=share, keep_width=True)
    assert isinstance(full, PromptGroups)
    assert full.batch.num_padding == 0, "a document has that position"


def test_what_a_model_reads_of_positions() -> None:
    uses = {
        ("llama", "dynamic"): (True, math.inf), ("phi3", "longrope"): (True, math.inf),
        ("llama", "yarn"): (False, math.inf), ("glm4", "partial"): (False, math.inf),
        ("gemma3_text", "per layer"): (True, math.inf), ("ministral3", "scaled"): (False, SWITCH),
        ("llama4_text", "default"): (False, 8192), ("opt", "default"): (False, math.inf),
    }  # fmt: skip
    assert {key: tuple(position_use(model(*key, SWITCH))) for key in uses} == uses
