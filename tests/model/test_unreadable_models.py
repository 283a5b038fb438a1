"""Models that are read by layer, inside of PEFT, or not at all: then the library's own code runs, and is named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_material import gemma4
from peft import LoraConfig, get_peft_model
from torch import nn
from trainer_material import assert_same_log, both
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from fastpack_trl import verify_packing
from fastpack_trl.measure.flops import model_flops
from fastpack_trl.model.facts import asked_for, layer_values, learned_positions, read_features, token_table
from fastpack_trl.testing import tiny_model

FACTS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"windows": {5}, "sinks": True, "kv_heads": 2, "head_dim": 8},
    "gemma2": {"windows": {5}, "sinks": False, "softcap": True},
    "mistral": {"windows": {5}, "softcap": False},
    "cohere2": {"windows": {5}, "dropout": 0},
    "olmoe": {"windows": set()},
    "deepseek_v3": {"head_dim": 12, "kv_heads": 4, "mixers": set()},
    "granitemoehybrid": {"mixers": {"Mamba-2"}},
    "stablelm": {"gap": "stablelm drops keywords on the way to attention"},
    "nemotron": {"gap": "nemotron drops keywords on the way to attention"},
    "llama4_text": {"gap": "llama4_text has chunked_attention layers, which the attention interface cannot keep apart"},
    "bloom": {"gap": "bloom does not call transformers' attention interface"},
}


def test_the_attention_of_a_family_is_read_from_its_attributes() -> None:
    for family, facts in FACTS.items():
        more = {"sliding_window": 5} if family == "olmoe" else {}  # a field that its mask ignores
        features = read_features(tiny_model(family, **more))
        assert {name: getattr(features, name) for name in facts} == facts, family
        assert bool(features.gap) == ("gap" in facts), family
    # Positions are found in a table, with and without rows that nobody reads.
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=96, n_positions=64, n_embd=8, n_layer=1, n_head=2))
    assert [learned_positions(model) for model in (tiny_model("opt"), gpt2, tiny_model("qwen3"))] == [128, 64, None]


def test_only_a_choice_of_the_user_counts_as_asked_for() -> None:
    assert asked_for(tiny_model("qwen3")) is None
    assert asked_for(tiny_model("qwen3", attn_implementation="eager")) == "eager"
    assert asked_for(tiny_model("gpt_oss")) is None, "gpt_oss has no sdpa: eager is its default"
    assert asked_for(tiny_model("qwen3"), "sdpa") == "sdpa"
    assert asked_for(tiny_model("qwen3", attn_implementation="eager"), {"": "eager"}) == "eager"


def test_fields_that_differ_from_layer_to_layer_are_read_per_layer() -> None:
    model = gemma4("text", 0, "full")
    assert layer_values(model.config, "head_dim") == [8, 16] * 2
    features, flops = read_features(model), model_flops(model)
    assert (features.head_dim, features.num_heads, features.windows, features.gap) == (16, 4, {5}, "")
    assert [flops.pairs[window] for window in (5, None)] == [2 * 4 * 4 * 8, 2 * 4 * 4 * 16]


def test_a_norm_without_a_gradient_at_zero_is_no_leak() -> None:
    """gemma3n, whose padding is a vector of zeros until somebody trains it."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_kv_shared_layers": 0}
    sizes = {"hidden_size": 32, "hidden_size_per_layer_input": 8, "intermediate_size": 48, "num_hidden_layers": 2}
    words = {"vocab_size": 96, "vocab_size_per_layer_input": 96, "pad_token_id": 0, "sliding_window": 5}
    types = {"layer_types": ["sliding_attention", "full_attention"]}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma3n_text", **heads, **sizes, **words, **types))
    assert not model.get_input_embeddings().weight[0].any()
    for seed in range(3):
        assert verify_packing(model.float(), seed=seed).proven


@pytest.mark.parametrize("field", ["trainable_token_indices", "target_modules", "modules_to_save"])
def test_embeddings_inside_of_peft_have_their_sizes_and_train_as_in_trl(field: str, tmp_path: Path) -> None:
    more = {"trainable_token_indices": [1], "target_modules": ["q_proj", "embed_tokens"]}.get(field, ["embed_tokens"])

    def wrapped(**overrides: Any) -> Any:
        settings = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM", field: more}
        return get_peft_model(tiny_model("qwen3", **overrides), LoraConfig(**settings))

    plain = tiny_model("qwen3")
    for tied in (False, True):
        table, flops = token_table(model := wrapped(tie_word_embeddings=tied)), model_flops(model)
        assert type(table) is nn.Embedding
        assert (table.num_embeddings, table.embedding_dim) == tuple(plain.model.embed_tokens.weight.shape)
        lora = sum(2 * p.numel() for name, p in model.named_parameters() if "lora_" in name and "embedding" not in name)
        assert flops.forward == model_flops(plain).forward + lora
    assert learned_positions(wrapped(max_position_embeddings=96)) is None, "tokens are no positions, if as many"
    ours, stock = both(tmp_path, model=wrapped(), fast={"activation_memory": "checkpoint"}, packing=True, optim="sgd")
    assert ours.fastpack_report["activation_memory"].path == "checkpoint"
    assert_same_log(ours, stock)
