"""Compiled LoRA layers: a checkpoint around them computes the projections again instead of keeping their outputs."""

from __future__ import annotations

from typing import Any

import pytest
from lora_material import adapted, any_ids
from torch import Tensor

from fastpack_trl import PackedBatch, apply_lora, packed_attention
from fastpack_trl.checkpointing.trace import storages_saved

pytestmark = pytest.mark.usefixtures("varlen_on_the_cpu")

PARTITIONED = "aot_eager_decomp_partition"
"""Inductor's partitioner without its code generation."""


LAYERS = 3


def material(*, checkpointing: bool) -> tuple[Any, Tensor, PackedBatch]:
    """A model with fast LoRA layers, and the embeddings and documents of a row."""
    model = adapted("llama", num_hidden_layers=LAYERS, hidden_size=64, intermediate_size=192)
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    apply_lora(model)
    embedded = model.get_base_model().model.embed_tokens(any_ids(32)).detach().requires_grad_()
    return model, embedded, PackedBatch.from_lengths((20, 12))


def forward(model: Any, embedded: Tensor, batch: PackedBatch) -> Tensor:
    return (
        model.get_base_model()
        .model(inputs_embeds=embedded, position_ids=batch.position_ids, packed_batch=batch, use_cache=False)
        .last_hidden_state
    )


def compiled(*, checkpointing: bool) -> dict[int, int]:
    """Bytes that a compiled forward keeps for its backward, by the number of layers.

    One compilation for all: its graph is that of a layer.
    """
    model, embedded, batch = material(checkpointing=checkpointing)
    backbone = model.get_base_model().model
    layers, kept = backbone.layers, {}
    for layer in layers:
        layer.compile(backend=PARTITIONED, fullgraph=True)
    with packed_attention(model, "varlen"):
        forward(model, embedded, batch).square().sum().backward()
        for count in (1, LAYERS):
            backbone.layers = layers[:count]
            with storages_saved(model, set()) as saved:
                forward(model, embedded, batch)
            kept[count] = sum(storage.nbytes() for storage in saved)
    return kept


def test_a_compiled_checkpoint_keeps_little_more_than_the_input_of_a_layer() -> None:
    figures = {checkpointing: compiled(checkpointing=checkpointing) for checkpointing in (False, True)}
    kept = {checkpointing: figure[LAYERS] - figure[1] for checkpointing, figure in figures.items()}
    one_input = 32 * 64 * 4
    # The scaled copies of the adapters: rank 8, q and o, k and v, gate and up and down.
    adapters = 4 * 8 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 192))
    assert kept[True] <= 2 * (1.5 * one_input + adapters), (kept, one_input, adapters)
    assert kept[False] - 2 * adapters >= 6 * (kept[True] - 2 * adapters), kept
