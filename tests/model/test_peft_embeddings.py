"""Token embeddings inside of what PEFT puts around them: their sizes are read, and runs are those of stock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from torch import nn
from trainer_material import assert_same_log, train
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.measure.flops import model_flops
from fastpack_trl.model.facts import learned_positions, token_table
from fastpack_trl.testing import tiny_model

WRAPPED: dict[str, dict[str, Any]] = {
    "trainable tokens": {"trainable_token_indices": [1, 2, 3]},
    "LoRA": {"target_modules": ["q_proj", "embed_tokens"]},
    "trained copy": {"modules_to_save": ["embed_tokens"]},
}


def wrapped(kind: str, family: str = "qwen3", **overrides: Any) -> Any:
    settings = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", **WRAPPED[kind]}
    return get_peft_model(tiny_model(family, **overrides), LoraConfig(**settings))


@pytest.mark.parametrize("kind", WRAPPED)
@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_embeddings_in_peft_have_the_sizes_of_their_tables(kind: str, tied: bool) -> None:
    model, plain = wrapped(kind, tie_word_embeddings=tied), tiny_model("qwen3")
    table = token_table(model)
    assert type(table) is nn.Embedding
    assert (table.num_embeddings, table.embedding_dim) == tuple(plain.model.embed_tokens.weight.shape)
    assert model_flops(model).head.forward == model_flops(plain).head.forward


@pytest.mark.parametrize("kind", WRAPPED)
def test_tokens_are_no_positions_where_there_are_as_many(kind: str) -> None:
    model = wrapped(kind, max_position_embeddings=96)
    assert model.config.vocab_size == 96
    assert learned_positions(model) is None


@pytest.mark.parametrize("level", ["selective", "checkpoint"])
@pytest.mark.parametrize("kind", WRAPPED)
def test_a_level_by_name_trains_as_stock(kind: str, level: str, tmp_path: Path) -> None:
    runs = [
        train(cls, tmp_path, model=wrapped(kind), fast=fast, packing=True, optim="sgd")
        for cls, fast in ((FastSFTTrainer, {"activation_memory": level}), (SFTTrainer, None))
    ]
    assert runs[0].fastpack_report["activation_memory"].path == level
    assert_same_log(*runs)
