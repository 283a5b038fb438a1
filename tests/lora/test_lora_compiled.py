"""Compiled LoRA layers: a checkpoint around them computes the projections again instead of keeping their outputs."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from lora_material import adapted, any_ids
from torch import Tensor

from fastpack_trl import PackedBatch, apply_lora, packed_attention
from fastpack_trl.compile.layers import compiled_layers
from fastpack_trl.testing import assert_gradients_close, gradients

PARTITIONED = "aot_eager_decomp_partition"
"""Inductor's partitioner without its code generation."""


def run(layers: int, *, compiled: bool, checkpointing: bool) -> tuple[int, dict[str, Tensor]]:
    """Bytes that a forward keeps for its backward, parameters left out, and the gradients."""
    model = adapted("llama", num_hidden_layers=layers, hidden_size=64, intermediate_size=192)
    if checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    apply_lora(model)
    backbone = model.get_base_model().model
    batch = PackedBatch.from_lengths((20, 12))
    embedded = backbone.embed_tokens(any_ids(32)).detach().requires_grad_()

    def forward() -> Any:
        return backbone(
            inputs_embeds=embedded, position_ids=batch.position_ids, packed_batch=batch, use_cache=False
        ).last_hidden_state

    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    seen: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = tensor
        return tensor

    with packed_attention(model, "per_document"):
        if not compiled:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                out = forward()
            out.square().sum().backward()
        else:
            with compiled_layers(model, verbose=False, _backend=PARTITIONED) as handle:
                forward().square().sum().backward()  # compiles; hooks around a checkpoint would move the compilation
                model.zero_grad()
                seen_before = len(seen)
                out = forward()
                assert handle.path == PARTITIONED, handle.reason
                assert seen_before == 0
                for tensor in saved_by(out.grad_fn):
                    pack(tensor)
                out.square().sum().backward()
    return sum(tensor.untyped_storage().nbytes() for tensor in seen.values()), gradients(model)


def saved_by(node: Any) -> list[Tensor]:
    """The tensors that the compiled functions of a graph hold."""
    found, pending, visited = [], [node], set()
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        with contextlib.suppress(RuntimeError):  # of a node that has none to show
            found += [tensor for tensor in getattr(node, "saved_tensors", ()) if isinstance(tensor, Tensor)]
        pending += [following for following, _ in node.next_functions]
    return found


@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_gradients_are_those_of_eager(checkpointing: bool) -> None:
    _, eager = run(2, compiled=False, checkpointing=checkpointing)
    _, compiled = run(2, compiled=True, checkpointing=checkpointing)
    assert_gradients_close(compiled, eager, rtol=1e-5)


def test_a_compiled_checkpoint_keeps_little_more_than_the_input_of_a_layer() -> None:
    kept = {
        checkpointing: run(3, compiled=True, checkpointing=checkpointing)[0]
        - run(1, compiled=True, checkpointing=checkpointing)[0]
        for checkpointing in (False, True)
    }
    one_input = 32 * 64 * 4
    # The scaled copies of the adapters: rank 8, q and o, k and v, gate and up and down.
    adapters = 4 * 8 * (2 * (64 + 64) + 2 * (64 + 32) + 3 * (64 + 192))
    assert kept[True] <= 2 * (1.5 * one_input + adapters), (kept, one_input, adapters)
    assert kept[False] - 2 * adapters >= 6 * (kept[True] - 2 * adapters), kept
