"""Layers that the user compiles run packed rows in one graph, and compute what eager ones do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from attention_material import one_step, random_row
from lora_material import adapted
from model_material import hybrid_model, long_row, reached

from fastpack_trl import apply_lora, packed_attention
from fastpack_trl.model.facts import text_model
from fastpack_trl.testing import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("varlen_on_the_cpu")]
HYBRIDS = ("qwen3_5_text", "falcon_h1", "lfm3")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_layers(model: Any) -> None:
    for layer in text_model(model).get_decoder().layers:
        layer.compile(backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", *HYBRIDS])
def test_rows_of_any_length_have_the_losses_and_gradients_of_eager_layers(family: str) -> None:
    if family in HYBRIDS:
        reached(family)
    model = hybrid_model(family) if family in HYBRIDS else tiny_model(family)
    rows = [long_row() if family in HYBRIDS else random_row(0), random_row(1, longest=90)]
    with packed_attention(model):
        expected = [one_step(model, *row) for row in rows]
        compile_layers(model)
        actual = [one_step(model, *row) for row in rows]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
def test_casts_of_adapters_are_read_anew_in_each_step(low: bool) -> None:
    losses = []
    for compiles in (False, True):
        model = adapted("llama")
        model.gradient_checkpointing_enable({"use_reentrant": False})
        apply_lora(model, compute_dtype=torch.bfloat16 if low else None)
        if compiles:
            compile_layers(model)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        autocast = torch.autocast("cpu", torch.bfloat16) if low else nullcontext()
        with packed_attention(model, compute_dtype=torch.bfloat16 if low else None), autocast:
            for seed in range(4):
                losses.append(one_step(model, *random_row(seed))[0])
                optimizer.step()
    assert losses[4:] == pytest.approx(losses[:4], rel=1e-2 if low else 1e-5)
    assert losses[4] != pytest.approx(losses[7], rel=1e-3)
