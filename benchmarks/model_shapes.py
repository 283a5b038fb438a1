"""Shapes of public models as data, and models of these shapes with random weights: nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fastpack_trl.errors import UserError, did_you_mean

PAD, EOS = 0, 1


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One model, by the fields of its public transformers config.

    Attributes:
        model_type: as transformers names it.
        fields: the config's fields that decide about shapes and attention, under its own names.
        weights: dtype in which stock trains it: fp32 as TRL loads a model by default; bf16 for a mixture of experts,
            whose checkpoint is bf16 at the most.
        layers: decoder layers that a run without ``--layers`` has; fewer than the config's where all would not fit.
        published_layers: of the public model; set by `cut_to`.
        leaks: whether stock lets packed documents see each other.
    """

    model_type: str
    fields: dict[str, Any]
    weights: torch.dtype = torch.float32
    layers: int | None = None
    published_layers: int = 0
    leaks: bool = False

    @property
    def has_experts(self) -> bool:
        return "num_experts_per_tok" in self.fields

    def cut_to(self, layers: int | None) -> ModelShape:
        """Return the same model with its first `layers` layers (None: what this shape runs by default).

        Raises:
            UserError: below 1 or more than the model has.
        """
        published = self.published_layers or int(self.fields["num_hidden_layers"])
        chosen = layers if layers is not None else self.layers or published
        if not 1 <= chosen <= published:
            raise UserError(f"layers={chosen} is outside of 1 to {published}, the layers of this model")
        fields = dict(self.fields, num_hidden_layers=chosen)
        if "layer_types" in fields:
            fields["layer_types"] = fields["layer_types"][:chosen]
        return replace(self, fields=fields, layers=chosen, published_layers=published)


MODELS = {
    "qwen3-0.6b": ModelShape(
        "qwen3",
        {
            "num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
            "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "qwen3-8b": ModelShape(
        "qwen3",
        {
            "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "qwen3-14b": ModelShape(
        "qwen3",
        {
            "num_hidden_layers": 40, "hidden_size": 5120, "intermediate_size": 17408, "num_attention_heads": 40,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "qwen3-32b": ModelShape(
        "qwen3",
        {
            "num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 25600, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
    ),
    "llama-3.2-1b": ModelShape(
        "llama",
        {
            "num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        },
    ),
    "gpt-oss-20b": ModelShape(
        "gpt_oss",
        {
            "num_hidden_layers": 24, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "tie_word_embeddings": False,
            "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "rms_norm_eps": 1e-5,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        },
        weights=torch.bfloat16,
        layers=4,
        leaks=True,
    ),
    "qwen3-30b-a3b": ModelShape(
        "qwen3_moe",
        {
            "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
            "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False,
            "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        },
        weights=torch.bfloat16,
        layers=4,
    ),
    "small": ModelShape(
        "qwen3",
        {
            "num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 8,
            "num_key_value_heads": 4, "head_dim": 32, "vocab_size": 4000, "tie_word_embeddings": True,
            "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "tiny-qwen3": ModelShape(
        "qwen3",
        {
            "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "tie_word_embeddings": True,
            "rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "tiny-llama": ModelShape(
        "llama",
        {
            "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "tiny-gpt-oss": ModelShape(
        "gpt_oss",
        {
            "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4,
            "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 512, "tie_word_embeddings": False,
            "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 64, "rms_norm_eps": 1e-5,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        leaks=True,
    ),
}  # fmt: skip
"""By the name that ``--model`` takes. Rotary scaling for long contexts is left out: it costs nothing at run time."""


def shape_of(name: str) -> ModelShape:
    """Return the shape behind a name.

    Raises:
        UserError: there is none; names the nearest.
    """
    if name not in MODELS:
        raise UserError(f"there is no model {name!r}{did_you_mean(name, MODELS)} (models: {', '.join(MODELS)})")
    return MODELS[name]


def build_model(shape: ModelShape, *, positions: int, seed: int, device: str) -> Any:
    """Make a causal language model with random weights on `device`, in the shape's own dtype, dropout 0.

    Args:
        shape: which.
        positions: tokens of the longest row.
        seed: of the weights.
        device: ``cpu``, ``cuda`` or ``meta`` (shapes only).
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    special = {"pad_token_id": PAD, "eos_token_id": EOS, "bos_token_id": None}
    config = AutoConfig.for_model(
        shape.model_type, **shape.fields, **special, max_position_embeddings=positions, attention_dropout=0.0
    )
    torch.manual_seed(seed)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=shape.weights)
