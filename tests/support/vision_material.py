"""Tiny image-text models: which of their tokens see each other in both directions, and in positions of sections."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

_TEXT: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
_WINDOW = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8,
    "patch_size": 4,
}  # fmt: skip
_HEADS = {"num_key_value_heads": 2, "head_dim": 8}
_ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
_QWEN = {"rope_parameters": _ROPE, "rope_scaling": _ROPE}
_QWEN_VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32, "intermediate_size": 16, "patch_size": 4,
    "spatial_merge_size": 2, "fullatt_block_indexes": [0], "deepstack_visual_indexes": [],
}  # fmt: skip
_GEMMA4 = {
    **_WINDOW, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "global_head_dim": 16,
    "num_kv_shared_layers": 0,
}  # fmt: skip
_NO_VISION: dict[str, Any] = {"vision_config": None, "audio_config": None, "image_token_id": 95}

KINDS_OF_TOKENS = {
    "gemma3": "token_type_ids", "gemma4": "mm_token_type_ids", "molmo2": "mm_token_type_ids",
    "gemma4 vision": "mm_token_type_ids", "paligemma": "token_type_ids",
}  # fmt: skip
"""The keyword of a family that says which tokens see each other in both directions."""
SECTIONS = ("qwen2_5_vl", "qwen3_vl")
"""Families whose positions have several sections."""

_CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": (_WINDOW, {"vision_config": _VISION, "mm_tokens_per_image": 4, "image_token_index": 95}),
    "gemma4": (_GEMMA4, _NO_VISION),
    "molmo2": (
        {},
        {
            "vision_config": {**_VISION, **_HEADS, "image_size": [8, 8]}, "image_token_id": 95,
            "adapter_config": {**_VISION, **_HEADS, "text_hidden_size": 32, "vision_feature_layer": [0]},
        },
    ),
    # In both directions by their config: no backend takes them.
    "gemma4 vision": ({**_GEMMA4, "use_bidirectional_attention": "vision"}, _NO_VISION),
    "paligemma": (
        {"model_type": "gemma2", "sliding_window": 64},
        {
            "vision_config": {**_VISION, "model_type": "siglip_vision_model", "projection_dim": 32},
            "projection_dim": 32,
        },
    ),
    **{family: (_QWEN, {"vision_config": _QWEN_VISION, "image_token_id": 95}) for family in SECTIONS},
}  # fmt: skip


def vision_model(family: str) -> Any:
    """A random model of a family, fp32, in training mode; skipped if this transformers lacks it."""
    text, rest = _CONFIGS[family]
    torch.manual_seed(0)
    try:
        config = AutoConfig.for_model(family.split()[0], text_config={**_TEXT, **text}, **rest)
    except ValueError:
        pytest.skip(f"this transformers has no {family}")
    return AutoModelForImageTextToText.from_config(config).float().train()
