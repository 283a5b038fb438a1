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
from attention_material import packed
from compile_material import Counting, one_step
from hybrid_material import hybrid_model

from fastpack_trl.attention.install import packed_attention
from fastpack_trl.compile.layers import compiled_layers
from fastpack_trl.model.facts import ModelFeatures, read_features
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.recurrent import fla
from fastpack_trl.testing import count_host_syncs, gradients

LENGTHS = (150, 1, 14, 64, 66)
PACKAGE = """
import torch
from fastpack_trl.packing.chunks import chunks_of
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.recurrent.delta import packed_delta

seen = []

def chunk_gated_delta_rule(
    q, k, v, g, beta, *, use_qk_l2norm_in_kernel=False, cu_seqlens=None, chunk_indices=None, **kwargs
):
    seen.append((cu_seqlens, chunk_indices, q.shape[2:]))
    lengths = [int((chunk_indices[:, 0] == i).sum()) for i in range(len(cu_seqlens) - 1)]
    ends = cu_seqlens.tolist()
    assert lengths == [-(-(end - start) // 64) for start, end in zip(ends, ends[1:])]
    assert chunk_indices[:, 1].tolist() == [chunk for count in lengths for chunk in range(count)]
    outs = []
    for start, end in zip(ends, ends[1:]):
        row = [x[0, start:end] for x in (q, k, v, g, beta)]
        outs.append(packed_delta(
            *row, chunks_of(PackedBatch.from_lengths((end - start,))), normalise=use_qk_l2norm_in_kernel
        ))
    out = torch.cat(outs)
    return out[None], None
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


def row() -> tuple[torch.Tensor, PackedBatch]:
    ids = torch.randint(3, 96, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    return ids, PackedBatch.from_lengths(LENGTHS, labels=ids)


@pytest.mark.parametrize("lengths", [(1,), (64,), (70, 58), (5, 1, 200, 64), LENGTHS], ids=str)
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


def test_every_layer_reads_the_same_tensors_and_the_run_is_that_of_plain_torch(installed: Any) -> None:
    model, (ids, batch) = hybrid_model("qwen3_5_text", num_hidden_layers=3, layer_types=[
        "linear_attention", "linear_attention", "full_attention"]).bfloat16(), row()  # fmt: skip
    with packed_attention(model) as attention:
        assert "gated delta rule over chunks" in attention.choice.reason
        expected = packed(model, ids, batch)
        expected.backward()
    plain = gradients(model)
    model.zero_grad()
    batch.clear_derived()
    installed(PACKAGE)
    with packed_attention(model) as attention:
        assert "gated delta rule by fla" in attention.choice.reason
        seen = sys.modules["fla.ops.gated_delta_rule"].seen
        tried = {heads for *_, heads in seen}
        seen.clear()
        loss = packed(model, ids, batch)
        loss.backward()
    assert len(seen) == 4  # of two layers, forward and again in backward
    assert all(ends is batch.cu_seqlens and chunks is seen[0][1] for ends, chunks, _ in seen)
    assert tried == {heads for *_, heads in seen}  # transformers 5.17 repeats those of keys before
    torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)
    for name, gradient in gradients(model).items():
        assert float((gradient - plain[name]).norm()) <= 0.03 * float(plain[name].norm()) + 1e-5, name
    with (
        compiled_layers(model, verbose=False, _backend=Counting(differentiate=True)) as layers,
        packed_attention(model),
    ):
        seen.clear()
        one_step(model, *row())
        assert seen, "in a graph too"
    assert layers.path == "compiled", layers.reason


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise OSError('no libcuda')", "OSError: no libcuda"),
        (PACKAGE.replace("outs = []", "raise RuntimeError('no kernel image')"), "RuntimeError: no kernel image"),
        ("", "there is no fla.ops.gated_delta_rule.chunk_gated_delta_rule"),
        (PACKAGE.replace("torch.cat(outs)", "torch.cat(outs) * 1.1"), "its output is 10.0% off that of plain torch"),
        (PACKAGE.replace("x[0, start:end]", "x[0, start:end].detach()"), "does not require grad"),
        (PACKAGE.replace("(q, k, v, g, beta)]", "(q, k, v, g + g.detach() - g, beta)]"), "gradient of g is"),
        (PACKAGE.replace("torch.cat(outs)", "torch.cat(outs) * float('nan')"), "its output is nan% off"),
    ],
    ids=["import", "call", "moved", "output", "no gradient", "one gradient", "nan"],
)  # fmt: skip
def test_a_broken_package_is_named_and_plain_torch_runs(
    installed: Any, source: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    installed(source)
    model, (ids, batch) = hybrid_model("qwen3_5_text").bfloat16(), row()
    with packed_attention(model) as attention:
        assert attention.path == "per_document"
        assert "over chunks (fla failed its trial" in attention.choice.reason
        assert reason in attention.choice.reason
        assert packed(model, ids, batch).isfinite()
    assert sum("fla failed its trial" in record.message for record in caplog.records) == 1


def test_what_fla_does_not_support_is_refused_before_a_trial(installed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    installed("raise AssertionError('tried')")
    monkeypatch.setattr(fla, "_DEVICES", ("cuda",))
    hopper = features_of(device_type="cuda", capability=(9, 0))
    ampere = replace(hopper, capability=(8, 0))
    for triton, features, reason in (
        ("3.6.0", features_of(), "fla needs CUDA"),
        ("3.6.0", replace(hopper, compute_dtype=torch.float32), "fla computes in 16 bits, this run in float32"),
        ("3.6.0", replace(ampere, scans=()), "the sizes of its layers are not known"),
        ("3.4.0", hopper, "on Hopper with Triton 3.4.0 (fla issue 640)"), ("3.6.0", hopper, "fla issue 640"),
        ("3.3.1", hopper, "tried"), ("3.7.1", hopper, "tried"), ("3.6.0", ampere, "tried"),
    ):  # fmt: skip
        fla.refusal.cache_clear()
        monkeypatch.setattr(fla, "version", lambda _package, triton=triton: triton)
        assert reason in fla.refusal(features)
    assert not fla.is_chosen(features_of("falcon_h1"))


@pytest.mark.cuda
def test_a_device_takes_it_or_names_the_reason() -> None:
    pytest.importorskip("fla")
    fla.refusal.cache_clear()
    why = fla.refusal(features_of(device_type="cuda", capability=torch.cuda.get_device_capability()))
    assert not why or "fla issue 640" in why or "failed its trial" in why
