"""Tiny models of the families with recurrent layers, and documents that are longer than two chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING

from fastpack_trl.model.facts import mixers
from fastpack_trl.packing.packed_batch import PackedBatch

_COMMON: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_expand": 2}

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {"head_dim": 8, "shared_expert_intermediate_size": 16, **_EXPERTS, **_DELTA},
    "qwen3_5_text": {"head_dim": 8, **_DELTA},
    "qwen3_5_moe_text": {"head_dim": 8, "shared_expert_intermediate_size": 16, **_EXPERTS, **_DELTA},
    "olmo_hybrid": {**_DELTA, "linear_value_head_dim": 16},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64, "mamba_d_conv": 4},
    "nemotron_h": {
        "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "head_dim": 8,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16, "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "attention", "moe", "mlp"],
    },
    "granitemoehybrid": {
        **_MAMBA, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 48,
        "mamba_chunk_size": 8, "layer_types": ["mamba", "attention"],
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "zamba2": {
        "mamba_d_state": 8, "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_ngroups": 2, "num_mem_blocks": 1,
        "adapter_rank": 4, "layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1, **_EXPERTS},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
}  # fmt: skip
"""Fields of the config by model type."""


class Inside(TorchDispatchMode):
    """Hands each operation to `run`, also those inside operators of ours and of what torch makes of several kernels."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:
            if func._schema.name.startswith("fastpack::"):
                self.enter(func, args)
                return func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
            if (found := func.decompose(*args, **kwargs)) is not NotImplemented:
                return found
        return self.run(func, args, kwargs)

    def enter(self, operator: Any, args: tuple[Any, ...]) -> None:
        """Called with each operator of ours."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


def hybrid_model(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """Return a random fp32 causal language model of `family` in training mode."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {**_COMMON, **HYBRIDS[family], **overrides}
    fields |= {name: 0.0 for name in ("attention_dropout", "hidden_dropout", "dropout") if name not in overrides}
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields)).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.train()


def composite_model() -> Any:
    """Return a model with a vision tower around the text model of Qwen3.5, in training mode."""
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = {
        **hybrid_model("qwen3_5_text").config.to_dict(),
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0],
                            "partial_rotary_factor": 0.5, "mrope_interleaved": True},
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    torch.manual_seed(0)
    return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision)).float().train()


BY_SEQ_IDX = ("lfm2", "lfm2_moe")
"""Families that hand the documents to their convolution as `seq_idx` alone in transformers 5.17."""


def reached(family: str) -> bool:
    """Whether the installed transformers has the family, in a form that packs."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers has no {family}")
    model = hybrid_model(family)
    return not (family in BY_SEQ_IDX and not mixers(model))


def long_row(lengths: tuple[int, ...] = (150, 1, 14, 64, 66)) -> tuple[torch.Tensor, PackedBatch]:
    """A document over more than two chunks, one of one token, one of a chunk; boundaries inside and between chunks."""
    ids = torch.randint(3, 96, (1, sum(lengths)), generator=torch.Generator().manual_seed(1))
    return ids, PackedBatch.from_lengths(lengths, labels=ids)
