"""The case ``attention``, and metadata rebuilt in each layer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_material import make_row, separate, snapshot
from torch import Tensor

from benchmarks import __main__ as command
from benchmarks import attention
from benchmarks.attention import Configuration, Grid, Heads, Layer
from benchmarks.cases import Run
from fastpack_trl.attention.dense import dense_mask
from fastpack_trl.bench.rebuild import dense_mask_of, metadata_of, rebuild_per_layer
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.testing import assert_gradients_close, gradients, tiny_model

CPU = torch.device("cpu")
ONE = Run(rounds=1, threads=1)
PLAN = Grid((300,), (Heads(4, 2, 16), Heads(4, 2, 16, sinks=True)), (None, 128), (torch.float32, torch.bfloat16))


# --- attention alone ---


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return attention.measure(Run(rounds=2, threads=1), plan=PLAN)


def test_a_miniature_run_times_what_the_cpu_can(measured: dict[str, Any]) -> None:
    assert measured["complete"]
    assert {row["dtype"] for row in measured["rows"]} == {"float32", "bfloat16"}
    assert {(row["documents"], row["window"]) for row in measured["rows"]} >= {("short", None), ("row", 128)}
    assert {row["sinks"] for row in measured["rows"]} == {False, True}
    for row in measured["rows"]:
        assert set(row["backends"]) == set(attention.NAMES)
        for name in ("per_document", "sdpa"):
            backend = row["backends"][name]
            for part in ("forward", "backward"):
                assert len(backend[part]["seconds"]["values"]) == 2
                rates = backend[part]["tflops"]
                assert rates["attended"]["low"] <= rates["attended"]["median"] <= rates["attended"]["high"]
        for name in ("varlen", "flex", "xformers", "flash_attention_3"):
            assert row["backends"][name]["refused"]


def test_conventions_count_the_pairs_of_the_mask() -> None:
    for window in (None, 128, 20):
        layer = Layer(Heads(4, 2, 16), window, torch.float32, "cpu")
        configuration = Configuration(layer, 60, "short", (1, 40, 19))
        pairs = configuration.pairs()
        assert pairs["causal_half"] == (1 + 40**2 + 19**2) / 2
        assert pairs["attended"] == dense_mask(PackedBatch.from_lengths((1, 40, 19)), window, CPU).sum()
    rates = attention._rates(configuration, attention.FORWARD_PER_PAIR, [0.5, 0.5])
    assert rates["tflops"]["causal_half"]["median"] == pytest.approx(4 * 4 * 16 * pairs["causal_half"] / 0.5 / 1e12)


def test_documents_fill_the_row_and_windows_matter() -> None:
    for mean in (None, 150, 1500):
        lengths = attention.document_lengths(8192, mean, 0)
        assert sum(lengths) == 8192
        assert mean is None or 0.7 * mean < sum(lengths[:-1]) / (len(lengths) - 1) < 1.3 * mean
    planned = attention.configurations(attention.CUDA, "cuda", 0)
    assert all(c.layer.window is None or c.layer.window < max(c.lengths) for c in planned)
    assert {c.layer.window for c in planned if c.tokens == 2048} == {None, 128}
    assert {c.tokens for c in planned} == {2048, 8192, 32768}


def test_a_wrong_backend_and_one_that_raises_are_rows_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = attention.prepare

    def failure(backend: Any, features: Any) -> str:
        wrong = backend.name == "per_document" and features.compute_dtype == torch.bfloat16
        return "its results are 50.0% off those of plain torch" if wrong else ""

    def prepare(name: str, layer: Layer, batch: PackedBatch) -> Any:
        if name == "per_document":
            raise RuntimeError("no kernel image is available")
        return original(name, layer, batch)

    monkeypatch.setattr(attention, "failure", failure)
    monkeypatch.setattr(attention, "prepare", prepare)
    found = attention.measure(ONE, plan=replace(PLAN, layers=PLAN.layers[:1], windows=(None,)))
    for row in found["rows"]:
        side = row["backends"]["per_document"]
        assert ("wrong" in side) == (row["dtype"] == "bfloat16")
        assert side.get("failed") == (None if "wrong" in side else "RuntimeError: no kernel image is available")
        assert "forward" not in side
        assert "forward" in row["backends"]["sdpa"]
    assert "per_document: its results are 50.0% off" in command.table(found)


def test_the_attention_table_and_command_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(attention, "CPU", replace(PLAN, layers=PLAN.layers[:1], dtypes=(torch.float32,)))
    file = tmp_path / "attention.json"
    arguments = ["--case", "attention", "--tokens", "160", "--pairs", "1", "--threads", "1", "--device", "cpu"]
    only = ["--backends", "per_document", "varlen"]
    assert command.main([*arguments, *only, "--seconds", "20", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "sdpa" not in out
    assert "160 tokens, 4/2 heads x 16, float32" in out
    assert "causal_half" in out
    assert "varlen: varlen needs CUDA" in out
    assert json.loads(file.read_text())["settings"]["flops"]["causal_half"]


# --- rebuilt in each layer ---


def test_rebuilt_metadata_and_masks_equal_those_of_the_batch() -> None:
    batch = PackedBatch.from_lengths((9, 1, 14, 6))
    cu_seqlens, lengths, longest = metadata_of(batch.position_ids)
    assert torch.equal(cu_seqlens, batch.cu_seqlens)
    assert (tuple(lengths.tolist()), longest) == (batch.seq_lengths, batch.max_seqlen)
    for window in (None, 5):
        assert torch.equal(dense_mask_of(lengths, window), dense_mask(batch, window, CPU))


def step(model: Any, ids: Tensor, batch: PackedBatch) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    logits = model(input_ids=ids, position_ids=batch.position_ids, use_cache=False).logits[0]
    loss = torch.nn.functional.cross_entropy(logits[batch.loss_positions], batch.loss_labels)
    loss.backward()
    return loss.item(), gradients(model)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gpt_oss"])
def test_rebuild_computes_what_separate_documents_do_and_restores_the_model(family: str, checkpointing: bool) -> None:
    model = tiny_model(family)
    ids, _, batch = make_row()
    expected_loss, expected = separate(model, ids, batch)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    before, stock = snapshot(model), step(model, ids, batch)
    with rebuild_per_layer(model):
        loss, grads = step(model, ids, batch)
    assert abs(loss - expected_loss) <= 1e-5
    assert_gradients_close(grads, expected)
    assert snapshot(model) == before
    again = step(model, ids, batch)
    assert again[0] == stock[0]
    if family != "gpt_oss":  # whose stock lets documents see each other
        assert abs(loss - stock[0]) <= 1e-5
        assert_gradients_close(grads, stock[1])
    with pytest.raises(RuntimeError, match="in the step"), rebuild_per_layer(model):
        raise RuntimeError("in the step")
    assert snapshot(model) == before


def test_rebuild_happens_in_every_layer_and_again_in_the_recomputation(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastpack_trl.bench import rebuild

    calls: list[int] = []

    def counted(position_ids: Tensor) -> Any:
        calls.append(1)
        return metadata_of(position_ids)

    monkeypatch.setattr(rebuild, "metadata_of", counted)
    model = tiny_model("qwen3")
    ids, _, batch = make_row()
    with rebuild_per_layer(model):
        step(model, ids, batch)
        assert len(calls) == 2
        model.gradient_checkpointing_enable({"use_reentrant": False})
        step(model, ids, batch)
    assert len(calls) == 2 + 4


def test_rebuild_refuses_what_the_interface_does_not_reach() -> None:
    with pytest.raises(ValueError, match="falcon"), rebuild_per_layer(tiny_model("falcon")):
        pass
