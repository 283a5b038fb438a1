"""Small models as transformers loads its FP8 checkpoints, and the same with the weights that their values stand for."""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import FP8Linear, replace_with_fp8_linear

from fastpack_trl.kernels.fp8 import FP8, cast, magnitudes, scales_of
from fastpack_trl.testing import tiny_model

SHAPE = {
    "hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_hidden_layers": 1,
}  # fmt: skip
LAYERS = 7


def fp8_checkpoint(
    family: str = "qwen3", *, shape: Any = None, dtype: torch.dtype = torch.float32, **fields: Any
) -> Any:
    """A tiny model whose projections are `FP8Linear`; `fields` of `FineGrainedFP8Config`, its head as it was."""
    heads = {"head_dim": 128} if family == "qwen3" else {}
    model = tiny_model(family, **heads, **(SHAPE if shape is None else shape)).to(dtype)
    dense = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    config = FineGrainedFP8Config(**fields)
    replace_with_fp8_linear(model, modules_to_not_convert=["lm_head"], quantization_config=config)
    for name, module in model.named_modules():
        if isinstance(module, FP8Linear):
            module.to_empty(device="cpu")
            _fill(module, dense[name])
    return model


@torch.no_grad()
def _fill(module: Any, source: nn.Linear) -> None:
    out_features, in_features = source.weight.shape
    rows, columns = module.block_size or (out_features, in_features)
    blocks = source.weight.float().view(out_features // rows, rows, in_features // columns, columns)
    scales, _ = scales_of(magnitudes(blocks).amax((1, 3)))
    stored = module.weight_scale_inv
    if stored.dtype == torch.float8_e8m0fnu:
        scales = scales.log2().ceil().exp2()
    module.weight.copy_(cast(blocks / scales[:, None, :, None]).view(out_features, in_features))
    stored.copy_(scales.view(stored.shape))
    if module.activation_scale is not None:
        module.activation_scale.fill_(1.0)
    if source.bias is not None:
        module.bias.copy_(source.bias)


def weight_of(module: Any) -> Tensor:
    """The weight that an `FP8Linear` with blocks of 128 x 128 stands for, in float64."""
    assert module.weight.dtype == FP8
    scales = module.weight_scale_inv.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return module.weight.detach().double() * scales


def with_lora(model: Any, **fields: Any) -> Any:
    """The model with LoRA on all projections, drawn anew: PEFT rounds what it draws to the dtype of the base."""
    peft = get_peft_model(
        model, LoraConfig(**({"r": 8, "target_modules": "all-linear"} | fields), task_type="CAUSAL_LM")
    )
    draw = torch.Generator().manual_seed(1)
    for name, parameter in peft.named_parameters():
        if "lora_" in name:
            parameter.data = (torch.randn(parameter.shape, generator=draw) * 0.05).to(parameter.dtype)
    return peft.train()


def dense_twin(model: Any) -> Any:
    """A copy with `nn.Linear` of the same weights in place of each `FP8Linear`."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, FP8Linear):
            with_bias = module.bias is not None
            twin = nn.Linear(module.in_features, module.out_features, bias=with_bias, dtype=torch.float32)
            twin.weight.data = weight_of(module).float()
            if with_bias:
                twin.bias.data = module.bias.data.clone()
            model.set_submodule(name, twin)
    return model
