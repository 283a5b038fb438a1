"""Packing metadata and masks made again in each layer, as the baseline `rebuild` has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_material import make_row, separate, snapshot
from torch import Tensor

from fastpack_trl.attention.dense import dense_mask
from fastpack_trl.bench import rebuild
from fastpack_trl.bench.rebuild import dense_mask_of, metadata_of, rebuild_per_layer
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.testing import assert_gradients_close, gradients, tiny_model


def test_rebuilt_metadata_and_masks_equal_those_of_the_batch() -> None:
    batch = PackedBatch.from_lengths((9, 1, 14, 6))
    cu_seqlens, lengths, longest = metadata_of(batch.position_ids)
    assert torch.equal(cu_seqlens, batch.cu_seqlens)
    assert (tuple(lengths.tolist()), longest) == (batch.seq_lengths, batch.max_seqlen)
    for window in (None, 5):
        assert torch.equal(dense_mask_of(lengths, window), dense_mask(batch, window, torch.device("cpu")))


def step(model: Any, ids: Tensor, batch: PackedBatch) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    logits = model(input_ids=ids, position_ids=batch.position_ids, use_cache=False).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[batch.loss_positions], batch.loss_labels)
    loss.backward()
    return loss.item(), gradients(model)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_each_layer_rebuilds_what_separate_documents_compute_and_the_model_is_restored(
    family: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(rebuild, "metadata_of", lambda positions: calls.append(1) or metadata_of(positions))
    model = tiny_model(family)
    ids, _, batch = make_row()
    expected_loss, expected = separate(model, ids, batch)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    before, stock = snapshot(model), step(model, ids, batch)
    with rebuild_per_layer(model):
        loss, grads = step(model, ids, batch)
    assert len(calls) == (4 if checkpointing else 2), "of two layers, and again in the recomputation"
    assert abs(loss - expected_loss) <= 1e-5
    assert_gradients_close(grads, expected)
    with pytest.raises(RuntimeError, match="in the step"), rebuild_per_layer(model):
        raise RuntimeError("in the step")
    assert snapshot(model) == before
    assert step(model, ids, batch)[0] == stock[0]
    if family != "gpt_oss":  # whose stock lets documents see each other
        assert_gradients_close(grads, stock[1])


def test_rebuild_refuses_what_the_interface_does_not_reach() -> None:
    with pytest.raises(ValueError, match="falcon"), rebuild_per_layer(tiny_model("falcon")):
        pass
