"""The choice of a backend, and its trial on the device: what fails, or sees a wrong token, is named and passed over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_material import HOPPER, PLAIN
from trainer_material import assert_same_log, both

from fastpack_trl.attention import backends, per_document
from fastpack_trl.attention.backends import BACKENDS, choose, failure
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.model.facts import ModelFeatures, read_features
from fastpack_trl.packing.documents import PADDED_DOCUMENTS
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.testing import FAMILIES, tiny_model

LFM = {"gap": "lfm2 has conv layers"}
UNPACKED = "batches that are not packed run attn_implementation="
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


@pytest.mark.parametrize(
    ("features", "changes", "stock_requested", "path", "reason"),
    [
        (PLAIN, {}, None, "per_document", "one attention call per document (CPU)"),
        (PLAIN, {"windows": frozenset({5}), "sinks": True}, None, "per_document", "window 5, sinks"),
        (PLAIN, {"dropout": 0.1}, None, "sdpa", "attention dropout is 0.1"),
        (PLAIN, LFM, None, PADDED_DOCUMENTS, "conv layers"),
        (HOPPER, {}, None, "varlen", "torch's flash kernel, bfloat16, sm90; plain causal"),
        (HOPPER, {"windows": frozenset({128}), "sinks": True}, None, "varlen", "window 128, sinks"),
        (HOPPER, {"capability": (8, 0), "compute_dtype": torch.float16}, None, "varlen", "float16, sm80"),
        (HOPPER, {"capability": (7, 5)}, None, "per_document", "varlen needs compute capability 8.0, this device has"),
        (HOPPER, {"compute_dtype": torch.float32}, None, "per_document", "varlen needs bf16 or fp16, this run"),
        (HOPPER, {"head_dim": 288}, None, "per_document", "head_dim 288 is over varlen's limit of 256"),
        (HOPPER, {"softcap": True}, None, "per_document", "varlen has no softcap"),
        (HOPPER, {"dropout": 0.1}, None, "sdpa", "varlen does not support dropout (the model's is 0.1)"),
        (PLAIN, {}, "sdpa", "per_document", f"{UNPACKED}'sdpa'"),
        (PLAIN, {"dropout": 0.1}, "eager", "sdpa", f"{UNPACKED}'eager'"),
        (PLAIN, LFM, "sdpa", PADDED_DOCUMENTS, UNPACKED),
        (PLAIN, {}, "flash_attention_2", "off", "was asked for"),
    ],
)
def test_auto_takes_the_first_backend_that_is_right(
    features: ModelFeatures, changes: dict[str, Any], stock_requested: str | None, path: str, reason: str
) -> None:
    choice = choose("auto", replace(features, **changes), stock_requested=stock_requested)
    assert choice.path == path
    assert reason in choice.reason


@pytest.mark.parametrize(
    ("requested", "features", "message"),
    [
        ("per_document", replace(PLAIN, dropout=0.1), r"attention dropout is 0\.1"),
        ("varlen", PLAIN, "varlen needs CUDA, the model is on cpu"),
        ("per_document", replace(PLAIN, **LFM), "lfm2 has conv layers"),
        ("sdpa", replace(PLAIN, **LFM), "lfm2 has conv layers"),
        ("sdpa", replace(PLAIN, softcap=True), "the softcap: load the model with attn_implementation='eager'"),
        ("flash_attention_4", HOPPER, r"not installed: pip install --pre 'fastpack-trl\[fa4\]'"),
        ("flash_attention_4", replace(HOPPER, capability=(8, 0)), r"needs compute capability 9\.0 or higher"),
        ("xformers", PLAIN, "xformers needs CUDA, the model is on cpu"),
        ("xformers", replace(HOPPER, sinks=True), "xformers has no attention sinks"),
        ("xformers", replace(HOPPER, softcap=True), "xformers has no softcap"),
        ("warp", PLAIN, "packed_attention='warp' does not exist: use one of auto, flash_attention_4, varlen"),
    ],
)
def test_refusal_names_the_reason_and_the_fix(
    monkeypatch: pytest.MonkeyPatch, requested: str, features: ModelFeatures, message: str
) -> None:
    monkeypatch.setattr("fastpack_trl.attention.xformers.find_spec", lambda name: name)
    with pytest.raises(ValueError, match=message) as error:
        choose(requested, features)
    assert "use" in str(error.value)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_read_and_passes_its_trial_or_has_a_reason(family: str) -> None:
    model = tiny_model(family)
    choice = choose("auto", read_features(model))
    assert choice.reason
    assert (choice.path == PADDED_DOCUMENTS) == bool(read_features(model).gap)
    for dtype in (None, torch.bfloat16, torch.float16):
        features = read_features(model, dtype)
        assert choose("auto", features, attempt=failure) == choose("auto", features)


def test_a_path_is_chosen_for_the_device_that_weights_are_moved_to_later() -> None:
    """FSDP loads them on the first process only, where others have none."""
    features = read_features(tiny_model("qwen3").to("meta"), device=torch.device("cpu"))
    assert features == read_features(tiny_model("qwen3"))


@pytest.mark.cuda
def test_a_model_that_bf16_full_eval_leaves_on_the_host_trains_on_the_path_of_the_device(tmp_path: Path) -> None:
    options = {"packing": True, "use_cpu": False, "bf16": True, "bf16_full_eval": True}
    ours, stock = both(tmp_path, **options)
    assert ours.fastpack_report["packed_attention"].path == "varlen", ours.fastpack_report
    assert_same_log(ours, stock, rtol=3e-2)


def test_operator_that_has_changed_is_passed_over_by_auto_and_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def changed(*_: Any, **_keywords: Any) -> Any:
        raise TypeError("_scaled_dot_product_flash_attention_for_cpu() got an unexpected argument 'scale'")

    monkeypatch.setattr(per_document.PerDocumentLayer, "attend", changed)
    ours, stock = both(tmp_path, packing=True)
    line = ours.fastpack_report["packed_attention"]
    assert (line.status, line.path) == ("on", "sdpa")
    assert "per_document failed its trial on this cpu (TypeError: " in line.reason
    assert "unexpected argument 'scale'" in line.reason
    assert ours.fastpack_proof.proven
    assert_same_log(ours, stock)
    assert caplog.text.count("failed its trial") == 1, "said once per process, not per run"
    message = "'per_document' cannot be used here: .*unexpected argument.*; use packed_attention='auto'"
    with pytest.raises(ValueError, match=message), packed_attention(tiny_model("qwen3"), "per_document"):
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_backend_that_sees_a_wrong_token_or_computes_wrong_fails(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    features, backend, right = KINDS[kind], BACKENDS["per_document"], per_document.PerDocument.prepare
    attend = per_document.PerDocumentLayer.attend
    assert failure(backend, features) == ""

    def one_document(self: Any, batch: PackedBatch, *where: Any) -> Any:
        return right(self, PackedBatch.from_lengths((batch.total_tokens,)), *where)

    def without_window(self: Any, batch: PackedBatch, *where: Any) -> Any:
        layer = right(self, batch, *where)
        return layer._replace(masks={window: torch.ones_like(mask).tril() for window, mask in layer.masks.items()})

    for name, wrong in (
        ("prepare", one_document),
        *[("prepare", without_window)] * bool(features.windows),
        ("attend", lambda self, call: attend(self, call._replace(scale=2 * call.scale))),
        ("attend", lambda self, call: attend(self, call) * torch.nan),
    ):
        backends._failure.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(per_document.PerDocument if name == "prepare" else per_document.PerDocumentLayer, name, wrong)
            said = failure(backend, features)
            # transformers' sdpa leaves out the softcap: there documents are padded one by one.
            fallback = PADDED_DOCUMENTS if features.softcap else "sdpa"
            assert choose("auto", features, attempt=failure).path == fallback
        assert said.startswith("per_document failed its trial on this cpu (")
        assert said.endswith("% off those of plain torch)")


def test_trial_changes_no_random_state_and_runs_once() -> None:
    state = torch.get_rng_state()
    for family in ("qwen3", "llama", "qwen3"):
        assert choose("auto", replace(FEATURES, model_type=family), attempt=failure).path == "per_document"
    assert torch.equal(state, torch.get_rng_state())
    assert backends._failure.cache_info().misses == 1


@pytest.mark.cuda
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_backends_pass_their_trial_on_cuda(kind: str, dtype: torch.dtype) -> None:
    capability = torch.cuda.get_device_capability()
    features = replace(KINDS[kind], device_type="cuda", compute_dtype=dtype, capability=capability)
    for name in ("varlen", "per_document"):
        if not BACKENDS[name].refuses(features):
            assert failure(BACKENDS[name], features) == "", name
