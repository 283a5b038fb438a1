"""Shapes of public models as data, and models of these shapes with random weights: nothing is downloaded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.command import known
from fastpack_trl.errors import UserError

PAD, EOS = 0, 1


@dataclass(frozen=True, slots=True)
class ModelShape:
    """One model, by the fields of its public transformers config.

    Attributes:
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


def decoder_shape(
    model_type: str, sizes: tuple[int, int, int], heads: tuple[int, int, int], vocabulary: int, *, tied: bool = False,
    theta: float = 1e6, eps: float = 1e-6, experts: dict[str, Any] | None = None, bf16: bool = False,
    layers: int | None = None, leaks: bool = False,
) -> ModelShape:  # fmt: skip
    """Return a shape from ``(layers, width, inner width)`` and ``(heads, key-value heads, width of one)``."""
    count, hidden, inner = sizes
    query, key_value, width = heads
    fields = {
        "num_hidden_layers": count, "hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": query,
        "num_key_value_heads": key_value, "head_dim": width, "vocab_size": vocabulary, "tie_word_embeddings": tied,
        "rms_norm_eps": eps, "rope_parameters": {"rope_type": "default", "rope_theta": theta}, **(experts or {}),
    }  # fmt: skip
    return ModelShape(model_type, fields, torch.bfloat16 if bf16 else torch.float32, layers, leaks=leaks)


def gpt_oss_fields(experts: int, top: int, window: int, layers: int) -> dict[str, Any]:
    """Return the fields of gpt-oss beside those of a decoder: every second layer sees all."""
    kinds = [("sliding_attention", "full_attention")[layer % 2] for layer in range(layers)]
    return {"num_local_experts": experts, "num_experts_per_tok": top, "sliding_window": window, "layer_types": kinds}


def moe_fields(experts: int, top: int, inner: int) -> dict[str, Any]:
    """Return the fields of Qwen3's mixture of experts beside those of a decoder."""
    return {"moe_intermediate_size": inner, "num_experts": experts, "num_experts_per_tok": top, "norm_topk_prob": True}


_QWEN3 = 151_936
MODELS = {
    "qwen3-0.6b": decoder_shape("qwen3", (28, 1024, 3072), (16, 8, 128), _QWEN3, tied=True),
    "qwen3-8b": decoder_shape("qwen3", (36, 4096, 12_288), (32, 8, 128), _QWEN3),
    "qwen3-14b": decoder_shape("qwen3", (40, 5120, 17_408), (40, 8, 128), _QWEN3),
    "qwen3-32b": decoder_shape("qwen3", (64, 5120, 25_600), (64, 8, 128), _QWEN3),
    "llama-3.2-1b": decoder_shape("llama", (16, 2048, 8192), (32, 8, 64), 128_256, tied=True, theta=5e5, eps=1e-5),
    "gpt-oss-20b": decoder_shape(
        "gpt_oss", (24, 2880, 2880), (64, 8, 64), 201_088, theta=1.5e5, eps=1e-5, bf16=True, layers=4, leaks=True,
        experts=gpt_oss_fields(32, 4, 128, 24),
    ),
    "qwen3-30b-a3b": decoder_shape(
        "qwen3_moe", (48, 2048, 6144), (32, 4, 128), _QWEN3, bf16=True, layers=4, experts=moe_fields(128, 8, 768),
    ),
    "small": decoder_shape("qwen3", (8, 256, 768), (8, 4, 32), 4000, tied=True, theta=1e4),
    "tiny-qwen3": decoder_shape("qwen3", (3, 64, 128), (4, 2, 16), 512, tied=True, theta=1e4),
    "tiny-llama": decoder_shape("llama", (3, 64, 128), (4, 2, 16), 512, tied=True, theta=1e4, eps=1e-5),
    "tiny-gpt-oss": decoder_shape(
        "gpt_oss", (2, 64, 64), (4, 1, 16), 512, theta=1e4, eps=1e-5, experts=gpt_oss_fields(8, 2, 64, 2), leaks=True
    ),
}  # fmt: skip
"""By the name that ``--model`` takes. Rotary scaling for long contexts is left out: it costs nothing at run time."""


def shape_of(name: str) -> ModelShape:
    """Return the shape behind a name.

    Raises:
        UserError: there is none; names the nearest.
    """
    return MODELS[known("model", [name], MODELS)[0]]


def build_model(shape: ModelShape, *, positions: int, seed: int, device: str) -> Any:
    """Make a causal language model with random weights on `device`, in the shape's own dtype, dropout 0.

    Args:
        positions: tokens of the longest row.
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
