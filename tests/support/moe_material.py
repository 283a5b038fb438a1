"""Tiny mixture-of-experts models of every family that the fused path covers, and experts modules on their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fastpack_trl.moe.layout import experts_modules

_COMMON = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "attention_dropout": 0.0, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
_MLA = {
    "head_dim": 4, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 0, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
_FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "num_local_experts": 4, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]
    },
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 16},
    "qwen3_moe": {"num_experts": 4, "norm_topk_prob": True},
    "qwen3_next": {
        "num_experts": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "mixtral": {"num_local_experts": 4},
    "olmoe": {"num_experts": 4},
    "deepseek_v2": {**_MLA, "topk_method": "greedy"},
    "deepseek_v3": _MLA,
    "glm4_moe": {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
    "granitemoe": {"num_local_experts": 4},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 0},
}  # fmt: skip
MOE_FAMILIES = tuple(_FAMILIES)


def moe_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A random model of `family` in training mode; biases, norms and sinks away from 0 and 1."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**_COMMON, **_FAMILIES[family], **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.to(dtype).train()


def model_without_gates() -> Any:
    """nemotron_h: experts that are two matrices with an activation between them, beside Mamba and attention."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in _COMMON.items() if name != "num_hidden_layers"}
    config = AutoConfig.for_model(
        "nemotron_h", **fields, n_routed_experts=4, n_group=1, topk_group=1, mamba_num_heads=8, mamba_head_dim=8,
        ssm_state_size=8, n_groups=2, chunk_size=8, moe_shared_expert_intermediate_size=16,
        layers_block_type=["mamba", "attention", "moe", "mlp"],
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).float().train()


def experts_of(model: nn.Module) -> Any:
    """The first experts module."""
    return next(iter(experts_modules(model).values()))


def routed(tokens: int, top_k: int, num_experts: int, *, seed: int = 0, skew: str = "uniform") -> tuple[Tensor, Tensor]:
    """(T, k) distinct expert ids and routing weights; `skew`: ``uniform``, ``hot`` (expert 0 always first), ``empty``
    (the last expert never)."""
    torch.manual_seed(seed)
    scores = torch.rand(tokens, num_experts)
    if skew == "hot":
        scores[:, 0] = 2
    elif skew == "empty":
        scores[:, -1] = -1
    weights, ids = scores.topk(top_k, dim=-1)
    return ids, weights.softmax(-1)


def input_ids(tokens: int = 24, vocabulary: int = 96, seed: int = 0) -> Tensor:
    torch.manual_seed(seed)
    return torch.randint(3, vocabulary, (1, tokens))


def norm_of_difference(actual: Tensor, expected: Tensor) -> float:
    """Relative L2 difference, in fp64."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30))
