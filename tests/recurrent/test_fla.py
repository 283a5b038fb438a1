"""fla's kernels where they are installed: chosen after a trial, given the batch's own tensors; refused by name.

They need a GPU. On the CPU a package of the same name stands for them, which reads the documents as they do.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_material import one_step, packed
from model_material import hybrid_model, long_row

from fastpack_trl.attention.install import packed_attention
from fastpack_trl.model.facts import ModelFeatures, read_features
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.recurrent import fla
from fastpack_trl.testing import count_host_syncs, gradients

PACKAGE = """
import torch
from fastpack_trl.packing.chunks import chunks_of
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.recurrent.delta import packed_delta

seen = []

def chunk_gated_delta_rule(q, k, v, g, beta, *, use_qk_l2norm_in_kernel=False, cu_seqlens=None, chunk_indices=None):
    seen.append((cu_seqlens, chunk_indices, q.shape[2:]))
    outs = []
    for document in zip(*(x[0].split(cu_seqlens.diff().tolist()) for x in (q, k, v, g, beta))):
        chunks = chunks_of(PackedBatch.from_lengths((len(document[0]),)))
        outs.append(packed_delta(*document, chunks, normalise=use_qk_l2norm_in_kernel))
    return (torch.cat(outs))[None], None
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Install a package of this source as ``fla.ops.gated_delta_rule``, for models on the CPU in any dtype."""

    def forget() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "fla"]:
            del sys.modules[name]
        fla.refusal.cache_clear()
        fla._function.cache_clear()

    def install(source: str) -> None:
        folder = tmp_path / "fla" / "ops" / "gated_delta_rule"
        folder.mkdir(parents=True)
        for part in (tmp_path / "fla", tmp_path / "fla" / "ops"):
            (part / "__init__.py").touch()
        (folder / "__init__.py").write_text(source, encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(fla, "_DEVICES", ("cpu",))
        forget()

    yield install
    forget()


def features_of(family: str = "qwen3_5_text", **changes: Any) -> ModelFeatures:
    return replace(read_features(hybrid_model(family)), **{"compute_dtype": torch.bfloat16, **changes})


@pytest.mark.parametrize("lengths", [(1,), (64,), (5, 1, 200, 64), (150, 1, 14, 64, 66)], ids=str)
@pytest.mark.parametrize("num_padding", [0, 65])
def test_chunks_begin_with_each_document(lengths: tuple[int, ...], num_padding: int) -> None:
    batch = PackedBatch.from_lengths(lengths, num_padding=num_padding)
    with count_host_syncs() as syncs:
        metadata = fla.fla_row(batch)
    assert syncs.total == 0, syncs.entries
    expected = [[n, c] for n, length in enumerate(batch.segment_lengths) for c in range(-(-length // 64))]
    assert metadata.chunk_indices.tolist() == expected
    assert metadata.chunk_indices.dtype == metadata.cu_seqlens.dtype == torch.int32
    assert metadata.cu_seqlens is batch.cu_seqlens


def test_layers_read_the_same_tensors_and_the_run_is_that_of_torch(installed: Any, varlen_on_the_cpu: None) -> None:
    layers = ["linear_attention", "linear_attention", "full_attention"]
    model, (ids, batch) = hybrid_model("qwen3_5_text", num_hidden_layers=3, layer_types=layers).bfloat16(), long_row()
    runs = []
    for by, source in (("over chunks", ""), ("by fla", PACKAGE)):
        if source:
            installed(source)
        with packed_attention(model) as attention:
            assert f"gated delta rule {by}" in attention.choice.reason
            if source:
                seen = sys.modules["fla.ops.gated_delta_rule"].seen
                tried = {heads for *_, heads in seen}
                seen.clear()
            loss = packed(model, ids, batch)
            loss.backward()
        runs.append((loss, gradients(model)))
        model.zero_grad()
        batch.clear_derived()
    assert len(seen) == 4  # of two layers, forward and again in backward
    assert all(ends is batch.cu_seqlens and chunks is seen[0][1] for ends, chunks, _ in seen)
    assert tried == {heads for *_, heads in seen}  # transformers 5.17 repeats those of keys before
    (expected, plain), (loss, actual) = runs
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)
    for name, gradient in actual.items():
        assert float((gradient - plain[name]).norm()) <= 0.03 * float(plain[name].norm()) + 1e-5, name


@pytest.mark.slow
def test_compiled_layers_call_it(installed: Any, varlen_on_the_cpu: None) -> None:
    installed(PACKAGE)
    model = hybrid_model("qwen3_5_text").bfloat16()
    with packed_attention(model):
        seen = sys.modules["fla.ops.gated_delta_rule"].seen
        seen.clear()
        for layer in model.model.layers:
            layer.compile(backend="aot_eager", fullgraph=True)
        one_step(model, *long_row())
        assert seen


BROKEN = {
    "OSError: no libcuda": "raise OSError('no libcuda')",
    "RuntimeError: no kernel image": PACKAGE.replace("outs = []", "raise RuntimeError('no kernel image')"),
    "there is no fla.ops.gated_delta_rule.chunk_gated_delta_rule": "",
    "its results are 10.0% off those of plain torch": PACKAGE.replace("torch.cat(outs)", "torch.cat(outs) * 1.1"),
    "does not require grad": PACKAGE.replace("x[0]", "x[0].detach()"),
    "its results are 100.0% off": PACKAGE.replace("(q, k, v, g, beta)", "(q, k, v, g + g.detach() - g, beta)"),
    "its results are nan% off": PACKAGE.replace("torch.cat(outs)", "torch.cat(outs) * float('nan')"),
}


@pytest.mark.parametrize("reason", BROKEN)
def test_broken_package_is_named_and_torch_runs(installed: Any, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    installed(BROKEN[reason])
    model, (ids, batch) = hybrid_model("qwen3_5_text").bfloat16(), long_row()
    with packed_attention(model) as attention:
        assert "over chunks (fla failed its trial" in attention.choice.reason
        assert reason in attention.choice.reason
        assert packed(model, ids, batch).isfinite()
    assert sum("fla failed its trial" in record.message for record in caplog.records) == 1


def test_what_fla_does_not_support_is_refused_before_a_trial(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("raise AssertionError('tried')")
    monkeypatch.setattr(fla, "_DEVICES", ("cuda",))
    hopper = features_of(device_type="cuda", capability=(9, 0))
    for reason, features in (
        ("fla needs CUDA", features_of()),
        ("fla computes in 16 bits, this run in float32", replace(hopper, compute_dtype=torch.float32)),
        ("the sizes of its layers are not known", replace(hopper, scans=frozenset())),
        ("tried", hopper),
    ):
        assert reason in fla.refusal(features)
    assert not fla.is_chosen(features_of("falcon_h1"))


@pytest.mark.cuda
def test_a_device_takes_it_or_names_the_reason() -> None:
    pytest.importorskip("fla")
    fla.refusal.cache_clear()
    why = fla.refusal(features_of(device_type="cuda", capability=torch.cuda.get_device_capability()))
    assert not why or "failed its trial" in why
