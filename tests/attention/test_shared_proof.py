"""The proof of rows with shared prefixes: passes on every kind of attention, and sees what is wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fastpack_trl.attention import probe
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.attention.per_document import PerDocument
from fastpack_trl.attention.probe import SHARED_LENGTHS as LENGTHS
from fastpack_trl.attention.proof import verify_shared
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.packing.shared_keys import SharedKeys
from fastpack_trl.testing import tiny_model

FAMILIES = ("llama", "qwen3", "gemma2", "gemma3_text", "mistral", "gpt_oss", "qwen3_moe", "deepseek_v3", "opt")


@pytest.mark.parametrize("path", ["per_document", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_proven(family: str, path: str) -> None:
    model = tiny_model(family)
    if path == "sdpa" and family in ("gemma2", "gpt_oss"):
        model.set_attn_implementation("eager")
    with packed_attention(model, path) as attention:
        proof = verify_shared(model, attention)
    assert proof.proven, proof
    assert not proof.leaks
    assert proof.budget is not None


def changed(monkeypatch: pytest.MonkeyPatch, keys: Any) -> None:
    """Let the backend read other keys than the batch has."""
    stock = PerDocument.prepare

    def prepare(self: PerDocument, batch: PackedBatch, *args: Any) -> Any:
        return stock(self, replace(batch, shared=keys(batch) if batch.shared is not None else None), *args)

    monkeypatch.setattr(PerDocument, "prepare", prepare)


def keys_behind(prefixes: list[Any]) -> SharedKeys:
    """Keys of segments behind these tokens of the row."""
    ends = np.cumsum(LENGTHS)
    index = [[*prefix, *range(end - own, end)] for prefix, end, own in zip(prefixes, ends, LENGTHS, strict=True)]
    return SharedKeys.of(np.array(LENGTHS), np.array(list(map(len, prefixes))), np.concatenate(index))


def test_a_branch_that_sees_another_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    def siblings(batch: PackedBatch) -> SharedKeys:
        return keys_behind([[], range(7), range(8), range(7), range(7), []])  # one token of the first branch

    changed(monkeypatch, siblings)
    model = tiny_model("llama")
    with packed_attention(model, "per_document") as attention:
        proof = verify_shared(model, attention)
    assert not proof.proven
    assert [pair[:2] for pair in proof.leaks] == [(1, 2)]
    assert "LEAK" in str(proof)


def test_a_branch_that_does_not_see_its_prefix_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def alone(batch: PackedBatch) -> SharedKeys:
        return keys_behind([[]] * len(LENGTHS))

    changed(monkeypatch, alone)
    model = tiny_model("llama")
    with packed_attention(model, "per_document") as attention:
        proof = verify_shared(model, attention)
    assert not proof.proven
    assert {(0, 1), (0, 2)} <= set(proof.unseen)
    assert "UNSEEN: segment 1 does not depend on segment 0" in str(proof)


def test_wrong_positions_show_in_the_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = probe.packed_batch

    def shifted(*args: Any, **kwargs: Any) -> PackedBatch:
        batch = stock(*args, **kwargs)
        return replace(batch, position_ids=torch.arange(batch.total_tokens)[None], positions=None)

    monkeypatch.setattr(probe, "packed_batch", shifted)
    model = tiny_model("opt")  # learned positions: a rotary embedding hides a shift of a whole segment, not of a part
    with packed_attention(model, "per_document") as attention:
        proof = verify_shared(model, attention)
    assert not proof.proven
    assert not proof.leaks
    assert proof.budget is not None
    assert proof.difference > proof.budget


@pytest.mark.cuda
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3_text", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("path", ["varlen", "per_document"])
def test_families_are_proven_on_the_device(family: str, path: str) -> None:
    model = tiny_model(family).cuda()
    if getattr(model.config, "_experts_implementation", None) not in (None, "eager"):
        model.set_experts_implementation("eager")  # grouped matrix products are made for bf16 weights
    compute = torch.autocast("cuda", torch.bfloat16)
    with packed_attention(model, path, compute_dtype=torch.bfloat16) as attention, compute:
        assert verify_shared(model, attention).proven
