"""Bounds of a step's products: those of the parameters and tokens, from the shapes that operators are given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.kernel_kinds import BASE, HEAD, THIN, Facts, Launch, by_kind, launches_of
from benchmarks.lora_models import PROJECTIONS, RANK
from benchmarks.model_shapes import MODELS
from benchmarks.results_folder import load_results
from benchmarks.step_bounds import Device, products_seconds
from fastpack_trl import apply_lora
from fastpack_trl.testing import tiny_model

OPERATIONS = Device(flops=1.0, bandwidth=float("inf"))
"""On which a bound is the operations of the products."""


def with_lora(model: nn.Module) -> Any:
    """Adapters on every projection; the product with the frozen base is added onto theirs, in place."""
    peft = get_peft_model(model, LoraConfig(r=RANK, target_modules=list(PROJECTIONS), task_type="CAUSAL_LM"))
    peft.enable_input_require_grads()
    peft.to(torch.bfloat16)
    assert "peft" not in str(apply_lora(peft))
    return peft


def on_meta(name: str, layers: int) -> Any:
    """A model of public shape without weights."""
    shape = MODELS[name].cut_to(layers)
    with torch.device("meta"):
        return with_lora(AutoModelForCausalLM.from_config(AutoConfig.for_model(shape.model_type, **shape.fields)))


def tiny() -> Any:
    """A model whose sides are all different, and none of them thin."""
    return with_lora(tiny_model("qwen3", hidden_size=192, intermediate_size=320, head_dim=80))


def products_of(model: Any, tokens: int) -> dict[str, list[Launch]]:
    """The products of forward and backward of a decoder, by kind."""
    ids = torch.ones(1, tokens, dtype=torch.long, device=model.device)
    with torch.profiler.profile(record_shapes=True) as seen:
        no_mask = {"full_attention": None}
        hidden = model.get_base_model().model(input_ids=ids, attention_mask=no_mask, use_cache=False)[0]
        hidden.backward(torch.empty_like(hidden))
    # Without weights a sum with a product runs a product inside of itself.
    launches = [
        one for one in launches_of(seen.events() or (), "cpu") if not any("addmm" in name for name in one.around)
    ]
    return dict(by_kind(launches, Facts(model.config.vocab_size)))


@pytest.mark.parametrize(
    ("make", "tokens"),
    [
        (tiny, 112),
        (lambda: on_meta("qwen3-0.6b", 2), 8192),
        (lambda: on_meta("qwen3-8b", 2), 4096),
        (lambda: on_meta("qwen3-14b", 2), 4096),
    ],
    ids=["tiny", "0.6b", "8b", "14b"],
)
def test_base_products_are_two_of_each_parameter_and_token(make: Any, tokens: int) -> None:
    model = make()
    weights = sum(weight.numel() for name, weight in model.named_parameters() if "base_layer" in name)
    adapters = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    products = products_of(model, tokens)
    assert products_seconds(products[BASE], OPERATIONS) == 2 * 2 * weights * tokens
    assert products_seconds(products[THIN], OPERATIONS) == 3 * 2 * adapters * tokens


def test_the_products_of_the_head_are_those_of_the_vocabulary_and_the_tokens() -> None:
    tokens, hidden, vocabulary = 64, 96, 1000
    tile, weight = torch.randn(tokens, vocabulary), torch.randn(vocabulary, hidden)
    total = torch.zeros(tokens, hidden)
    with torch.profiler.profile(record_shapes=True) as seen:
        torch.mm(total, weight.t(), out=tile)
        torch.addmm(total, tile, weight, out=total)
        total.addmm_(tile, weight)
    launches = by_kind(launches_of(seen.events() or (), "cpu"), Facts(vocabulary))
    assert products_seconds(launches[HEAD], OPERATIONS) == 3 * 2 * tokens * hidden * vocabulary


def test_no_bound_of_a_stored_profile_is_above_what_was_measured() -> None:
    records = [record for record in load_results().values() if record["case"] == "row_profile"]
    assert records
    for record in records:
        for row in record["rows"]:
            for kind, found in row["kinds"].items():
                assert 0 <= found["bound_seconds"] <= found["seconds"], (row["setting"], kind)


@pytest.mark.cuda
def test_on_a_gpu_products_into_an_output_count_once_with_their_own_factors() -> None:
    rows, inner, columns = 256, 512, 1024
    left, right, total = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        for shape in ((rows, inner), (inner, columns), (rows, columns))
    )
    exact = total.float()
    with torch.profiler.profile(record_shapes=True) as seen:
        torch.mm(left, right, out=total)
        torch.addmm(total, left, right, out=total)
        torch.addmm(exact, left, right, out_dtype=torch.float32, out=exact)
        torch.cuda.synchronize()
    launches = by_kind(launches_of(seen.events() or (), "cuda"), Facts(9999))
    assert products_seconds(launches[BASE], OPERATIONS) == 3 * 2 * rows * inner * columns
