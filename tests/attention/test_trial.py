"""A backend is tried on the device before it is chosen: what fails, or sees a wrong token, is named and passed over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_material import PLAIN
from trainer_material import assert_same_log, both, train

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention import backends, per_document
from fastpack_trl.attention.backends import BACKENDS, choose, failure
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.model.facts import read_features
from fastpack_trl.packing.documents import PADDED_DOCUMENTS
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.testing import FAMILIES, tiny_model

FEATURES = replace(PLAIN, head_dim=16, kv_heads=2)
KINDS = {
    "plain": FEATURES,
    "window": replace(FEATURES, windows=frozenset({5, 4096})),
    "sinks": replace(FEATURES, windows=frozenset({128}), sinks=True),
    "softcap": replace(FEATURES, windows=frozenset({5}), softcap=True),
}


@pytest.fixture(autouse=True)
def _no_trial_is_known() -> Iterator[None]:
    backends._failure.cache_clear()
    yield
    backends._failure.cache_clear()


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator of the CPU's backend takes other arguments than it did."""

    def refuses(*_: Any, **_keywords: Any) -> Any:
        raise TypeError("_scaled_dot_product_flash_attention_for_cpu() got an unexpected argument 'scale'")

    monkeypatch.setattr(per_document.PerDocumentLayer, "attend", refuses)


def test_where_an_operator_has_changed_auto_takes_the_next_and_says_so(
    tmp_path: Path, changed: None, caplog: pytest.LogCaptureFixture
) -> None:
    ours, stock = both(tmp_path, packing=True)
    assert isinstance(ours, FastSFTTrainer)
    line = ours.fastpack_report["packed_attention"]
    assert (line.status, line.path) == ("on", "sdpa")
    assert "per_document failed its trial on this cpu (TypeError: " in line.reason
    assert "unexpected argument 'scale'" in line.reason
    assert ours.fastpack_proof is not None
    assert ours.fastpack_proof.proven
    assert_same_log(ours, stock)
    assert caplog.text.count("failed its trial") == 1, "said once per process, not per run"


def test_asked_for_by_name_the_failure_is_an_error(tmp_path: Path, changed: None) -> None:
    message = (
        r"packed_attention='per_document' cannot be used here: .*unexpected argument.*; use packed_attention='auto'"
    )
    with pytest.raises(ValueError, match=message):
        train(FastSFTTrainer, tmp_path, packing=True, fast={"packed_attention": "per_document"})
    with pytest.raises(ValueError, match=message), packed_attention(tiny_model("qwen3"), "per_document"):
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_a_backend_that_sees_a_wrong_token_fails(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    features, backend, right = KINDS[kind], BACKENDS["per_document"], per_document.PerDocument.prepare
    assert failure(backend, features) == ""

    def one_document(self: Any, batch: PackedBatch, *where: Any) -> Any:
        return right(self, PackedBatch.from_lengths((batch.total_tokens,)), *where)

    def without_window(self: Any, batch: PackedBatch, *where: Any) -> Any:
        layer = right(self, batch, *where)
        causal = {window: torch.ones_like(mask).tril() for window, mask in layer.masks.items()}
        return layer._replace(masks=causal)

    for wrong in (one_document, without_window) if features.windows else (one_document,):
        backends._failure.cache_clear()
        monkeypatch.setattr(per_document.PerDocument, "prepare", wrong)
        reason = failure(backend, features)
        assert reason == (
            "per_document failed its trial on this cpu (a query sees other tokens than those before it in its document "
            "and window)"
        )
        # transformers' sdpa leaves out the softcap: there documents are padded one by one.
        fallback = PADDED_DOCUMENTS if features.softcap else "sdpa"
        assert choose("auto", features, attempt=failure).path == fallback


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_on_the_path_that_is_chosen_without(family: str) -> None:
    for dtype in (None, torch.bfloat16, torch.float16):
        features = read_features(tiny_model(family), dtype)
        assert choose("auto", features, attempt=failure) == choose("auto", features)


def test_a_trial_changes_no_random_state_and_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.get_rng_state()
    for family in ("qwen3", "llama", "qwen3"):
        assert choose("auto", replace(FEATURES, model_type=family), attempt=failure).path == "per_document"
    assert torch.equal(state, torch.get_rng_state())
    assert backends._failure.cache_info().misses == 1


CUDA = [
    pytest.param(name, dtype, marks=pytest.mark.cuda) for name in KINDS for dtype in (torch.bfloat16, torch.float16)
]


@pytest.mark.parametrize(("kind", "dtype"), CUDA)
def test_backends_pass_on_cuda_and_a_missing_operator_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, kind: str, dtype: torch.dtype
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    features = replace(
        KINDS[kind], device_type="cuda", compute_dtype=dtype, capability=torch.cuda.get_device_capability()
    )
    for name in ("varlen", "per_document"):
        if not BACKENDS[name].refuses(features):
            assert failure(BACKENDS[name], features) == "", name
    if BACKENDS["varlen"].refuses(features):
        return
    assert choose("auto", features, attempt=failure).path == "varlen"
    for operator in ("_flash_attention_forward", "_flash_attention_backward"):
        backends._failure.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(torch.ops.aten, operator, None)
            choice = choose("auto", features, attempt=failure)
        assert choice.path == "per_document"
        assert f"torch has no torch.ops.aten.{operator}" in choice.reason
