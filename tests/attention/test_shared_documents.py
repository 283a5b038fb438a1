"""Loss and every gradient of rows that share prefixes are those of the documents one by one, over float64 weights."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from fastpack_trl.attention.install import packed_attention
from fastpack_trl.packing.collator import PackingCollator
from fastpack_trl.packing.packed_batch import IGNORE_INDEX, to_transformers_kwargs
from fastpack_trl.testing import gradients, tiny_model

tokens = st.integers(3, 95)


@st.composite
def groups(draw: st.DrawFn) -> list[list[int]]:
    """Documents that begin with one of two prompts, or with a part of one, or with nothing in common."""
    prompts = [draw(st.lists(tokens, min_size=16, max_size=24)) for _ in range(2)]
    prompts.append(prompts[0] + draw(st.lists(tokens, min_size=1, max_size=20)))
    own = st.lists(tokens, min_size=0, max_size=7)
    count = draw(st.integers(2, 6))
    return [draw(st.sampled_from([*prompts, []])) + draw(own) or [5] for _ in range(count)]


@cache
def model_of(family: str) -> Any:
    model = tiny_model(family).double()
    if getattr(model.config, "_experts_implementation", None) not in (None, "eager"):
        model.set_experts_implementation("eager")  # grouped matrix products take no float64
    for module in model.modules():
        if hasattr(module, "dropout"):
            module.dropout = 0.0
    return model


def separate(model: Any, documents: list[list[int]], labels: list[list[int]]) -> tuple[float, dict[str, Tensor]]:
    reference, total = copy.deepcopy(model), 0.0
    reference.set_attn_implementation("eager")
    for document, label in zip(documents, labels, strict=True):
        if len(document) > 1:
            logits = reference(input_ids=torch.tensor([document]), use_cache=False).logits[0, :-1]
            loss = F.cross_entropy(logits, torch.tensor(label[1:]), reduction="sum", ignore_index=IGNORE_INDEX)
            loss.backward()
            total += loss.item()
    return total, gradients(reference)


@pytest.mark.parametrize("path", ["per_document", "sdpa"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt_oss", "qwen3_moe", "opt"])
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(documents=groups(), data=st.data())
def test_loss_and_gradients_are_those_of_separate_documents(
    family: str, path: str, documents: list[list[int]], data: st.DataObject
) -> None:
    model = model_of(family)
    labels = [[token if data.draw(st.booleans()) else IGNORE_INDEX for token in document] for document in documents]
    expected_loss, expected = separate(model, documents, labels)
    rows = [{"input_ids": document, "labels": label} for document, label in zip(documents, labels, strict=True)]
    inputs = PackingCollator(pad_token_id=0, share_prefixes=True)(rows)
    batch = inputs["packed_batch"]
    implementation = model.config._attn_implementation
    if path == "sdpa" and family == "gpt_oss":
        model.set_attn_implementation("eager")
    with packed_attention(model, path):
        keywords = {"input_ids": inputs["input_ids"], "use_cache": False, "packed_batch": batch}
        logits = model(**keywords, **to_transformers_kwargs(batch)).logits[0]
        losses = F.cross_entropy(logits[batch.loss_positions], batch.loss_labels, reduction="none")
        loss = (losses if batch.documents is None else losses * batch.documents.loss_weights).sum()
        loss.backward()
    model.set_attn_implementation(implementation)
    # Weights are float64; norms and rotary embeddings of transformers compute in fp32 all the same.
    assert abs(loss.item() - expected_loss) <= 1e-6 * max(1.0, expected_loss)
    found = gradients(model)
    model.zero_grad(set_to_none=True)
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-6, name
