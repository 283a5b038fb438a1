"""Layers that the user compiles run packed rows in one graph, compute what eager ones do, and keep as little."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from attention_material import one_step, random_row
from lora_material import adapted, any_ids
from model_material import hybrid_model, long_row, reached

from fastpack_trl import PackedBatch, apply_lora, packed_attention
from fastpack_trl.checkpointing.trace import storages_saved
from fastpack_trl.model.facts import text_model
from fastpack_trl.testing import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("varlen_on_the_cpu")]
HYBRIDS = ("qwen3_5_text", "falcon_h1", "lfm3")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_layers(model: Any, backend: str = "aot_eager") -> Any:
    layers = text_model(model).get_decoder().layers
    for layer in layers:
        layer.compile(backend=backend, fullgraph=True)
    return layers


@pytest.mark.parametrize("family", ["gpt_oss", *HYBRIDS])
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


LAYERS = 3


def kept_bytes(*, checkpointing: bool) -> int:
    """Bytes that two compiled LoRA layers keep for backward; one graph, that of a layer, is compiled for all."""
    model = adapted("llama", num_hidden_layers=LAYERS, hidden_size=64, intermediate_size=192)
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    apply_lora(model)
    backbone, batch = model.get_base_model().model, PackedBatch.from_lengths((20, 12))
    row = {"inputs_embeds": backbone.embed_tokens(any_ids(32)).detach().requires_grad_(), "use_cache": False}
    row |= {"position_ids": batch.position_ids, "packed_batch": batch}
    # Inductor's partitioner without its code generation.
    layers, kept = compile_layers(model, "aot_eager_decomp_partition"), list[int]()
    with packed_attention(model, "varlen"):
        backbone(**row).last_hidden_state.square().sum().backward()
        for count in (1, LAYERS):
            backbone.layers = layers[:count]
            with storages_saved(model, set()) as saved:
                backbone(**row)
            kept.append(sum(storage.nbytes() for storage in saved))
    return kept[1] - kept[0]


def test_a_compiled_checkpoint_keeps_little_more_than_the_input_of_a_layer() -> None:
    """It computes projections again instead of keeping their outputs."""
    kept = {checkpointing: kept_bytes(checkpointing=checkpointing) for checkpointing in (False, True)}
    one_input = 32 * 64 * 4
    # The scaled copies of the adapters: rank 8, q and o, k and v, gate and up and down.
    adapters = 4 * 8 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 192))
    assert kept[True] <= 2 * (1.5 * one_input + adapters), (kept, one_input, adapters)
    assert kept[False] - 2 * adapters >= 6 * (kept[True] - 2 * adapters) > 0, kept
