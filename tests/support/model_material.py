"""Tiny models beside those of `fastpack_trl.testing`: recurrent layers, images, keys that layers share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from sft_material import TEMPLATE, make_tokenizer
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from fastpack_trl.model.facts import mixers
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.testing import _COMMON as COMMON
from fastpack_trl.testing import _FAMILIES as FIELDS
from fastpack_trl.testing import tiny_model


def random_model(cls: Any, config: Any, *, seed: int = 0, noise: float = 0.0) -> Any:
    """Return a random fp32 model of a class or an auto class in training mode, with `noise` on all parameters."""
    torch.manual_seed(seed)
    make = cls.from_config if cls.__name__.startswith("Auto") else cls
    model = make(config).float()
    with torch.no_grad():
        for parameter in model.parameters() if noise else ():
            parameter.add_(torch.randn_like(parameter) * noise)
    return model.train()


def away_from_zero(model: Any, *, seed: int = 1, scale: float = 0.05) -> Any:
    """Give the second factor of each adapter values: with zeros there, half of the gradients are zero."""
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name and "ref" not in name:
            parameter.data = (torch.randn(parameter.shape, generator=draw) * scale).to(parameter)
    return model


# --- recurrent layers ---

_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_expand": 2}

HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": FIELDS["qwen3_next"],
    "qwen3_5_text": {"head_dim": 8, **_DELTA},
    "qwen3_5_moe_text": FIELDS["qwen3_next"],
    "olmo_hybrid": {**_DELTA, "linear_value_head_dim": 16},
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 64, "mamba_d_conv": 4},
    "nemotron_h": {
        "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "head_dim": 8,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16, "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "attention", "moe", "mlp"],
    },
    "granitemoehybrid": {**FIELDS["granitemoehybrid"], "mamba_n_groups": 2},
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


BY_SEQ_IDX = ("lfm2", "lfm2_moe")
"""Families that hand the documents to their convolution as `seq_idx` alone in transformers 5.17."""


def hybrid_model(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    fields = {**COMMON, "max_position_embeddings": 1024, **HYBRIDS[family], **overrides}
    fields |= {name: 0.0 for name in ("attention_dropout", "hidden_dropout", "dropout") if name not in overrides}
    return random_model(AutoModelForCausalLM, AutoConfig.for_model(family, **fields), seed=seed, noise=0.05)


def composite_model() -> Any:
    """Return a model with a vision tower around the text model of Qwen3.5."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
    text = hybrid_model("qwen3_5_text").config.to_dict() | {"rope_parameters": rope | {"mrope_interleaved": True}}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    return random_model(
        transformers.Qwen3_5ForConditionalGeneration, transformers.Qwen3_5Config(text_config=text, vision_config=vision)
    )


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


# --- images ---

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
    "mistral3": (
        {"model_type": "mistral", "sliding_window": None},
        {"vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 8}, "image_token_index": 95},
    ),
    "llava": (
        {"model_type": "llama"},
        {"vision_config": {**_VISION, "model_type": "clip_vision_model", "projection_dim": 8}, "image_token_index": 95},
    ),
    "internvl": (
        {"model_type": "qwen2"},
        {"vision_config": {**_VISION, "image_size": [8, 8], "patch_size": [4, 4]}, "image_token_id": 95},
    ),
    "qwen2_audio": (
        {"model_type": "qwen2"},
        {
            "audio_config": {
                "num_mel_bins": 8, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16,
                "d_model": 16, "max_source_positions": 20,
            },
            "audio_token_index": 95,
        },
    ),
}  # fmt: skip


def vision_model(family: str) -> Any:
    """Return a model with a tower for images or sound; skips the test if this transformers lacks the family."""
    text, rest = _CONFIGS[family]
    try:
        config = AutoConfig.for_model(family.split()[0], text_config={**COMMON, "head_dim": 8, **text}, **rest)
    except ValueError:
        pytest.skip(f"this transformers has no {family}")
    has_images = type(config) in AutoModelForImageTextToText._model_mapping
    return random_model(AutoModelForImageTextToText if has_images else transformers.AutoModelForMultimodalLM, config)


def gemma3() -> Any:
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=tiny_model("gemma3_text", vocab_size=304).config.to_dict(),
        vision_config={**vision, "image_size": 28, "patch_size": 14}, mm_tokens_per_image=4,
        image_token_index=300, boi_token_index=301, eoi_token_index=302,
    )  # fmt: skip
    return random_model(AutoModelForImageTextToText, config)


def gemma3_processor() -> Any:
    special = {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
    tokenizer = make_tokenizer(pad_token="<pad>", eos_token="<eos>", extra_special_tokens=special)
    images = transformers.Gemma3ImageProcessor(size={"height": 28, "width": 28})
    return transformers.Gemma3Processor(images, tokenizer, chat_template=TEMPLATE, image_seq_length=4)


# --- keys that layers share ---

STEPS: dict[str, Any] = {"max_steps": 2, "eval_strategy": "no", "learning_rate": 1e-5}
"""Adam's first steps turn rounding into signs."""
LAYERS = {
    "full": ["sliding_attention", "full_attention"] * 2,
    "sliding": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
    # Three of five layers share, of both types.
    "three": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}


def gemma4(kind: str, shared: int, last: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A model of the class for text or of the composite one; `last`: of `LAYERS`."""
    text = {
        **COMMON, **_GEMMA4, "num_hidden_layers": len(LAYERS[last]), "head_dim": 8, "max_position_embeddings": 256,
        "num_kv_shared_layers": shared, "layer_types": LAYERS[last], **more,
    }  # fmt: skip
    if kind == "text":
        return random_model(AutoModelForCausalLM, AutoConfig.for_model("gemma4_text", **text)).to(dtype)
    ids = {"image_token_id": 95, "video_token_id": 94, "audio_token_id": 93}
    config = transformers.Gemma4Config(text_config=text, vision_config=None, audio_config=None, **ids)
    return random_model(transformers.Gemma4ForConditionalGeneration, config).to(dtype)
