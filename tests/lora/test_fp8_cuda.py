"""A base in FP8 on a CUDA device: the products of the device, compiled layers, captured steps, no host wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lora_material import adapted, assert_host_never_waits, weights
from trainer_material import figures, make_dataset, make_tokenizer, settings

from fastpack_trl import FastSFTConfig, FastSFTTrainer, apply_lora
from fastpack_trl.kernels.fp8 import quantise_rows, scaled_product
from fastpack_trl.lora.base_weight import Fp8Weight
from fastpack_trl.lora.frozen_base import put_in_fp8
from fastpack_trl.lora.linear import FastLora
from fastpack_trl.lora.projection import lora_projection

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
        reason="needs a CUDA device that multiplies in FP8",
    ),
]
SHAPE = {"hidden_size": 256, "intermediate_size": 512}


def in_fp8(model: Any) -> Any:
    apply_lora(model, compute_dtype=torch.bfloat16)
    for layer in [module for module in model.modules() if isinstance(module, FastLora)]:
        put_in_fp8(layer, torch.bfloat16)
    return model


@pytest.mark.parametrize("rows", [1, 7, 512])
def test_the_product_of_the_device_is_that_of_the_reference(rows: int) -> None:
    x, weight = (torch.randn(count, 4096, device="cuda").bfloat16() for count in (rows, 256))
    a, b = quantise_rows(x), quantise_rows(weight)
    found, true = scaled_product(a, b, torch.bfloat16), a.dense().double() @ b.dense().double().t()
    # Rounding to bf16 alone: 2**-9 at most; sums in fewer bits than fp32 may add as much again.
    assert (found.double() - true).norm() / true.norm() < 2**-8


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tokens", [1, 37, 4096])
def test_a_projection_is_that_of_the_cpu(tokens: int, compiled: bool) -> None:
    torch.manual_seed(0)
    values = {"x": (tokens, 512), "a": (16, 512), "b": (1024, 16), "weight": (1024, 512), "grad": (tokens, 1024)}
    given = {name: torch.randn(shape).bfloat16() for name, shape in values.items()}
    results = []
    for device in ("cpu", "cuda"):
        own = {name: tensor.to(device) for name, tensor in given.items()}
        base = Fp8Weight.of(own["weight"])
        read = [own[name].clone().requires_grad_() for name in ("x", "a", "b")]
        torch._dynamo.reset()
        project = torch.compile(lora_projection) if compiled and device == "cuda" else lora_projection
        out = project(read[0], base, *read[1:])
        out.backward(own["grad"])
        results.append([out.detach().cpu(), *[leaf.grad.cpu() for leaf in read if leaf.grad is not None]])
    for theirs, ours in zip(*results, strict=True):
        # Values on the edge of two FP8 numbers may be rounded to either, by a compiler that divides with less care.
        assert (ours.float() - theirs.float()).norm() <= 0.01 * theirs.float().norm()


@pytest.mark.parametrize("compiled", [False, True])
def test_the_host_never_waits(compiled: bool) -> None:
    assert_host_never_waits(in_fp8(adapted("llama", dtype=torch.bfloat16, **SHAPE).cuda()), compiled=compiled)


@pytest.mark.parametrize("fields", [{}, {"layer_compile": "on"}, {"layer_compile": "on", "cuda_graph": "on"}], ids=str)
def test_a_run_learns_as_one_over_the_loaded_base_and_leaves_it(tmp_path: Path, fields: dict[str, str]) -> None:
    losses = {}
    for base in ("as_loaded", "fp8"):
        model = adapted("qwen3", dtype=torch.bfloat16, **SHAPE)
        before = weights(model)
        args = settings(tmp_path / base, packing=True, use_cpu=False, bf16=True, max_steps=12)
        trainer = FastSFTTrainer(
            model,
            args=FastSFTConfig(**args, frozen_base=base, **fields),
            train_dataset=make_dataset("text"),
            eval_dataset=make_dataset("text", 8, seed=7),
            processing_class=make_tokenizer(),
        )
        trainer.train()
        losses[base] = [row["loss"] for row in figures(trainer) if "loss" in row]
        after = [weight.cpu() for weight in weights(trainer.model)]
        assert all(torch.equal(one.cpu(), other) for one, other in zip(before, after, strict=True))
        if base == "fp8":
            line = trainer.fastpack_report["frozen_base"]
            assert line.path == "fp8", str(trainer.fastpack_report)
    assert losses["fp8"] == pytest.approx(losses["as_loaded"], rel=0.01)
    assert losses["fp8"] != losses["as_loaded"]
