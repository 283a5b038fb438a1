"""Tiny random models of real families, and checks for tests: this project's and yours."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from fastpack_trl.measure.host_syncs import HostSync, HostSyncs, count_host_syncs

__all__ = ["FAMILIES", "HostSync", "HostSyncs", "assert_gradients_close", "count_host_syncs", "gradients", "tiny_model"]

_COMMON = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
_WINDOW_AND_FULL = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}

_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 5, "head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 5, "query_pre_attn_scalar": 8},
    "gemma3_text": {"head_dim": 8, **_WINDOW_AND_FULL},
    "phi3": {"sliding_window": None},
    "granite": {},
    "olmo2": {},
    "olmo3": _WINDOW_AND_FULL,
    "cohere2": _WINDOW_AND_FULL,
    "glm4": {"head_dim": 8},
    "exaone4": _WINDOW_AND_FULL,
    "starcoder2": {"sliding_window": 5},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, **_MOE},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
        "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, **_MOE,
    },
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, **_WINDOW_AND_FULL},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "afmoe": {
        "head_dim": 8, "num_experts": 4, "num_shared_experts": 1, "num_dense_layers": 1,
        "global_attn_every_n_layers": 2, **_WINDOW_AND_FULL, **_MOE,
    },
    "falcon": {"new_decoder_architecture": False, "multi_query": True, "alibi": False},
    "bloom": {"n_layer": 2, "n_head": 4},
    "granitemoehybrid": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48, "mamba_n_heads": 8,
        "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_expand": 2, "mamba_chunk_size": 8,
        "layer_types": ["mamba", "attention"],
    },
    "llama4_text": {
        "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 48, "attention_chunk_size": 6, "no_rope_layers": [1, 0],
    },
    "stablelm": {},
    "nemotron": {},
    "qwen3_next": {
        "head_dim": 8, "num_experts": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 8, "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"], **_MOE,
    },
}  # fmt: skip

FAMILIES = tuple(_FAMILIES)
"""Names that `tiny_model` knows: transformers' model types."""


def tiny_model(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """Return a random causal language model of `family` with two layers, fp32, in training mode, dropout 0.

    Args:
        family: one of `FAMILIES`; a `ValueError` lists them.
        seed: of the weights.
        overrides: fields of the config, or `attn_implementation`.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    if family not in _FAMILIES:
        raise ValueError(f"family={family!r} has no tiny model: use one of {', '.join(FAMILIES)}")
    fields = {**_COMMON, **_FAMILIES[family], **overrides}
    fields |= {name: 0.0 for name in ("attention_dropout", "hidden_dropout", "dropout") if name not in overrides}
    config = AutoConfig.for_model(family, **fields)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Gates, norms or sinks that start at 0 or 1 would hide errors in their inputs.
            parameter.add_(torch.randn_like(parameter) * 0.05 if "sinks" not in name else torch.randn_like(parameter))
    return model.train()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return a copy of every gradient of `model`, by parameter name."""
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients_close(
    actual: dict[str, Tensor], expected: dict[str, Tensor], *, rtol: float = 1e-5, atol_of_all: float = 1e-8
) -> None:
    """Check ``|d| <= rtol |g| + atol_of_all |all g|`` per parameter, in the 2-norm; also for gradients of exactly zero.

    Raises:
        AssertionError: a parameter has a gradient in only one of the two, or exceeds the bound; names the worst.
    """
    assert actual.keys() == expected.keys(), f"only on one side: {sorted(actual.keys() ^ expected.keys())}"
    everything = _norm(expected.values())
    worst = ("", 0.0)
    for name, reference in expected.items():
        bound = rtol * _norm([reference]) + atol_of_all * everything
        ratio = _norm([actual[name].double() - reference.double()]) / bound if bound else 0.0
        worst = max(worst, (name, ratio), key=lambda pair: pair[1])
    assert worst[1] <= 1, f"gradient of {worst[0]} is {worst[1]:.2g} times its bound away"


def _norm(tensors: Iterable[Tensor]) -> float:
    return float(torch.stack([tensor.double().norm() for tensor in tensors]).norm())
