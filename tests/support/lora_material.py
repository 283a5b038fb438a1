"""Small PEFT models, over bases in full, in 4 or 8 bits and in FP8, and the measurements that the LoRA tests share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_material import relative_errors
from counted_operators import Counted
from model_material import away_from_zero
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from trainer_material import build
from transformers import FineGrainedFP8Config, GPT2Config, GPT2LMHeadModel, TrainerCallback
from transformers.integrations.finegrained_fp8 import FP8Linear, replace_with_fp8_linear

from fastpack_trl import FastSFTTrainer, PackedBatch, packed_attention
from fastpack_trl.checkpointing.trace import storages_saved
from fastpack_trl.lora import projection
from fastpack_trl.lora.base_weight import BaseWeight
from fastpack_trl.lora.linear import FastLora
from fastpack_trl.testing import count_host_syncs, gradients, tiny_model

SHAPE = ("num_hidden_layers", "hidden_size", "intermediate_size", "head_dim")


def adapted(model: Any, *, seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """A model with LoRA on all projections, its B away from zero; a family's name or a model."""
    shape = {name: settings.pop(name) for name in SHAPE if name in settings}
    base = (tiny_model(model, seed=seed, **shape) if isinstance(model, str) else model).to(dtype)
    fields = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM", **settings}
    torch.manual_seed(seed)
    peft = get_peft_model(base, LoraConfig(**fields))
    return away_from_zero(peft, seed=seed + 1).train()


def gpt2() -> Any:
    """A model with transposed weights, and biases of the base."""
    sizes = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "pad_token_id": 0}
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def reference_projection(
    x: Tensor, base: BaseWeight, a: Tensor, b: Tensor, bias: Tensor | None = None, dropped: Tensor | None = None
) -> Tensor:
    """Project by torch's own operators and autograd: the oracle."""
    adapter = F.linear(F.linear(x if dropped is None else dropped, a), b)
    return F.linear(x, base.dense(x.dtype), bias) + adapter


def compiled_projection(*args: Any) -> Tensor:
    """`lora_projection` in a graph, cut by Inductor's partitioner, without its code generation."""
    torch._dynamo.reset()
    out: Tensor = torch.compile(projection.lora_projection, backend="aot_eager_decomp_partition", fullgraph=True)(*args)
    return out


def any_ids(length: int = 24, seed: int = 0) -> Tensor:
    return torch.randint(3, 96, (1, length), generator=torch.Generator().manual_seed(seed))


def step(model: Any, ids: Tensor, *, autocast: bool = False) -> Tensor:
    """Forward and backward; gradients add up."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=autocast):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return loss.detach()


def joint_error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """``|actual - expected| / |expected|`` over all gradients as one vector."""
    return float(relative_errors((1.0, dict(actual)), (1.0, dict(expected)))[1])


def saved_bytes(model: Any, ids: Tensor) -> int:
    """Bytes that one forward under autocast keeps for its backward, each storage once, parameters left out."""
    backbone = (model.get_base_model() if hasattr(model, "get_base_model") else model).model
    embedded = backbone.embed_tokens(ids).detach().requires_grad_()
    with storages_saved(model, set()) as saved, torch.autocast("cpu", torch.bfloat16):
        backbone(inputs_embeds=embedded, use_cache=False)
    return sum(storage.nbytes() for storage in saved)


def products_in_backward(model: Any, ids: Tensor, width: int) -> int:
    """How many matrix products have `width` among their three sizes, thin ones left out."""

    def wide(name: str, args: Any) -> bool:
        if name not in ("mm", "addmm", "addmm_"):
            return False
        left, right = args[-2:]
        sizes = (*left.shape, right.shape[1])
        return width in sizes and min(sizes) > 16

    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    with Counted(wide) as counted:
        loss.backward()
    return counted.count


def assert_trains_as_peft(stock: Any, fast: Any, *, each_gradient: float | None = None) -> None:
    """Twenty steps of AdamW in fp32; `each_gradient`: most relative error of a single gradient.

    AdamW divides by the size of a gradient, so a gradient near zero carries its rounding into the weights: 2e-5 apart
    after three steps. An update that is missed or wrong is a thousandth.
    """
    models = (stock, fast)
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=2e-4) for m in models]
    for number in range(20):
        losses = [float(step(model, any_ids(seed=number))) for model in models]
        assert losses[1] == pytest.approx(losses[0], rel=1e-6)
        expected, found = map(gradients, models)
        assert joint_error(found, expected) <= (1e-4 if number else 2e-6)
        for name, grad in expected.items() if each_gradient else ():
            assert float((found[name] - grad).norm()) <= each_gradient * float(grad.norm()), (number, name)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.step()
            model.zero_grad()


def assert_no_further(errors: Sequence[Sequence[float]]) -> None:
    """Our errors are no larger than PEFT's: what a draw of roundings adds is within two standard errors.

    Args:
        errors: per draw, PEFT's and ours.
    """
    table = torch.tensor(errors)
    more = table[:, 1] - table[:, 0]
    assert more.mean() <= 2 * more.std() / len(more) ** 0.5, table.mean(0)


def assert_never_waits(model: Any, *, compiled: bool) -> None:
    """A step of the backbone of a model on CUDA, under autocast, after one that makes what is made once."""
    backbone = model.get_base_model().model
    if compiled:
        for layer in backbone.layers:
            layer.compile(fullgraph=True)
    hidden = torch.randn(1, 63, model.config.hidden_size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    batch = PackedBatch.from_lengths((40, 23)).to("cuda")
    row = {"inputs_embeds": hidden, "position_ids": batch.position_ids, "packed_batch": batch, "use_cache": False}

    def run() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            out = backbone(**row).last_hidden_state
        out.sum().backward()

    with packed_attention(model, compute_dtype=torch.bfloat16):
        run()
        torch.cuda.synchronize()
        with count_host_syncs(error=True):
            run()


# --- bitsandbytes ---


def quantized(
    kind: str = "nf4", *, nested: bool = False, dtype: torch.dtype = torch.float32, compute: torch.dtype | None = None,
    seed: int = 0, **more: Any,
) -> Any:  # fmt: skip
    """A tiny llama with LoRA, all decoder projections in bitsandbytes' format; `compute`: default that of `dtype`."""
    model = tiny_model("llama", seed=seed, hidden_size=64, intermediate_size=128, **more).to(dtype)
    for block in (block for layer in model.model.layers for block in (layer.self_attn, layer.mlp)):
        for name, linear in [*block.named_children()]:
            if isinstance(linear, torch.nn.Linear):
                setattr(block, name, quantized_linear(linear, kind, nested=nested, dtype=compute or dtype))
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = kind != "int8", kind == "int8"
    return adapted(model, target_modules="all-linear")


def left_in_fp32(model: Any) -> Any:
    """The model, whose adapters TRL does not cast to bf16: without autocast, PEFT's code would run over those."""
    model.is_loaded_in_4bit = model.is_loaded_in_8bit = False
    return model


def quantized_linear(linear: Any, kind: str, *, nested: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """The layer in the format ``nf4``, ``fp4`` or ``int8``; skips the test without bitsandbytes."""
    bnb = pytest.importorskip("bitsandbytes")
    inner, outer = linear.in_features, linear.out_features
    if kind == "int8":
        out = bnb.nn.Linear8bitLt(inner, outer, bias=False, has_fp16_weights=False)
    else:
        fields = {"compute_dtype": dtype, "quant_type": kind, "compress_statistics": nested}
        out = bnb.nn.Linear4bit(inner, outer, bias=False, **fields)
    out.load_state_dict(linear.state_dict())
    return out.to("cpu")


def packed_weight(
    shape: tuple[int, ...], kind: str, *, nested: bool, blocksize: int = 64, dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
) -> tuple[Tensor, Any]:  # fmt: skip
    """A random weight packed by bitsandbytes, and its `QuantState`; skips the test without bitsandbytes."""
    functional = pytest.importorskip("bitsandbytes.functional")
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    packed, state = functional.quantize_4bit(values, blocksize=blocksize, quant_type=kind, compress_statistics=nested)
    return packed, state


def dequantize_4bit_torch(packed: Tensor, state: Any, code: Tensor) -> Tensor:
    """The kernel of 4-bit weights in plain torch; `code`: (16,) fp32, the value of each half of a byte."""
    scales = state.absmax
    if state.state2 is not None:
        inner = state.state2
        scales = inner.code[scales.int()] * inner.absmax.repeat_interleave(inner.blocksize)[: scales.numel()]
        scales = scales + state.offset
    stored = packed.contiguous().view(-1).view(torch.uint8)
    values = code[torch.stack((stored >> 4, stored & 15), dim=1).view(-1).int()][: state.shape.numel()]
    scales = scales.repeat_interleave(state.blocksize)[: values.numel()]
    return (values * scales).to(state.dtype).view(state.shape)


# --- FP8 ---

LAYERS = 14
KINDS = ("plain", "zeros", "outlier", "subnormal", "nan", "infinite", "largest")


def matrix(kind: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return values of a kind of `KINDS`, (rows, columns); what a kind is about stands in the first row."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    whole: dict[str, Any] = {"zeros": 0.0, "largest": torch.finfo(dtype).max, "subnormal": x[0] * 1e-40}
    one = {"outlier": (1, 1e4), "nan": (2, float("nan")), "infinite": (2, float("-inf"))}
    if kind in whole:
        x[0] = whole[kind]
    if kind in one:
        x[0, one[kind][0]] = one[kind][1]
    return x.to(dtype)


def made(folder: Path, model: Any = None, callbacks: Any = (), **fields: Any) -> Any:
    return build(
        FastSFTTrainer, folder, model=adapted("qwen3") if model is None else model,
        fast={"packing": True, "frozen_base": "fp8"} | fields, trainer={"callbacks": [*callbacks]},
    )  # fmt: skip


def fp8_checkpoint() -> Any:
    """A model as transformers loads an FP8 checkpoint with scales per block, with LoRA on all projections."""
    shape = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 128}
    model = tiny_model("qwen3", num_attention_heads=1, num_key_value_heads=1, **shape)
    replace_with_fp8_linear(model, modules_to_not_convert=["lm_head"], quantization_config=FineGrainedFP8Config())
    for module in model.modules():
        if isinstance(module, FP8Linear):
            module.to_empty(device="cpu")
    return get_peft_model(model, LoraConfig(target_modules="all-linear"))


def assert_as_loaded(model: Any, before: list[Tensor]) -> None:
    """Nothing of FP8 is left of a run, and the bases have the `weights` of before it."""
    assert not fast_layers(model)
    for layer, weight in zip(lora_layers(model), before, strict=True):
        assert torch.equal(layer.base_layer.weight, weight)
        assert not any(name.startswith("fastpack") for name in vars(layer))


def fast_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FastLora)]


def lora_layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "lora_A")]


def weights(model: Any) -> list[Tensor]:
    return [layer.base_layer.weight.detach().clone() for layer in lora_layers(model)]


class At(TrainerCallback):
    """Calls a function once, at the end of the first step."""

    def __init__(self, function: Any) -> None:
        self.function, self.found = function, None

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1:
            self.found = self.function(model)
