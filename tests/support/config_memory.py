"""Device memory of a config before the first activation: counted on the model's public shape, not measured."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import get_peft_model
from trl import get_peft_config

from benchmarks.model_shapes import MODELS, ModelShape, build_model
from fastpack_trl.recipe.arguments import Arguments

GIB = 2**30
NF4_BLOCK, NESTED_BLOCK = 64, 256  # numbers per scale; scales per scale of scales

SHAPES = MODELS | {
    "mixtral-8x7b": ModelShape(
        "mixtral",
        {
            "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2,
        },
    ),
    "moonlight-16b-a3b": ModelShape(
        "deepseek_v3",
        {
            "num_hidden_layers": 27, "hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size": 1408,
            "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 163840, "n_routed_experts": 64,
            "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1, "q_lora_rank": None,
            "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
            "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
        },
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Static:
    """GiB of the frozen weights, and of what is trained with its gradients and AdamW's two moments."""

    frozen: float
    trained: float

    @property
    def total(self) -> float:
        return self.frozen + self.trained


def nf4_bytes(numbers: int, nested: bool) -> float:
    """Half a byte per number and a scale per block: fp32, or one byte and an fp32 per 256 of them."""
    scale = 1 + 4 / NESTED_BLOCK if nested else 4
    return numbers * (0.5 + scale / NF4_BLOCK)


def _of(shape: ModelShape, layers: int, arguments: Arguments) -> Static:
    training, options = arguments.training, arguments.model
    dtype = getattr(torch, str(options.dtype))
    model: Any = build_model(replace(shape.cut_to(layers), weights=dtype), positions=4096, seed=0, device="meta")
    head = model.get_output_embeddings()
    packed: dict[int, bool] = {}  # parameters in four bits -> with nested scales
    if options.load_in_4bit:
        linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
        packed |= {id(module.weight): bool(options.use_bnb_nested_quant) for module in linear}
    if training.moe_quantize_experts == "on":
        names = (".experts.gate_up_proj", ".experts.down_proj")
        packed |= {id(p): True for name, p in model.named_parameters() if name.endswith(names)}
    config = get_peft_config(options)
    if config is not None:
        model = get_peft_model(model, config)
    frozen = trained = 0.0
    for parameter in model.parameters():
        if parameter.requires_grad:
            # TRL makes the adapters of a quantised base bf16.
            itemsize = 2 if options.load_in_4bit else parameter.element_size()
            trained += 4 * parameter.numel() * itemsize
        elif id(parameter) in packed:
            frozen += nf4_bytes(parameter.numel(), packed[id(parameter)])
        else:
            frozen += parameter.numel() * parameter.element_size()
    return Static(frozen / GIB, trained / GIB)


def static_memory(name: str, arguments: Arguments) -> Static:
    """Of the whole model, from two and three of its layers: those above are like the third."""
    shape = SHAPES[name]
    layers = int(shape.fields["num_hidden_layers"])
    two, three = _of(shape, 2, arguments), _of(shape, 3, arguments)

    def whole(low: float, high: float) -> float:
        return low + (layers - 2) * (high - low)

    return Static(whole(two.frozen, three.frozen), whole(two.trained, three.trained))
