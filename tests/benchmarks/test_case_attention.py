"""``fastpack-trl bench``: attention alone, models beside the per-layer rebuild, and what they are made of."""

from __future__ import annotations

import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_material import make_row, separate, snapshot
from torch import Tensor

from benchmarks import attention, attention_sides, command, model_gate, model_steps, side_turns
from benchmarks.attention import Configuration, Grid, Heads, Layer
from benchmarks.model_shapes import MODELS, ModelShape, build_model, shape_of
from fastpack_trl.attention.dense import dense_mask
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.bench.rebuild import dense_mask_of, metadata_of, rebuild_per_layer
from fastpack_trl.errors import UserError
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.testing import assert_gradients_close, gradients, tiny_model

CPU = torch.device("cpu")
TINY = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64,
}  # fmt: skip
TINY_EXPERTS = {**TINY, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}
PLAN = Grid((300,), (Heads(4, 2, 16), Heads(4, 2, 16, sinks=True)), (None, 128), (torch.float32, torch.bfloat16))


def tiny_shape(name: str) -> ModelShape:
    shape = MODELS[name]
    return replace(shape, fields={**shape.fields, **(TINY_EXPERTS if shape.has_experts else TINY)}).cut_to(2)


# --- attention alone ---


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return attention.measure(plan=PLAN, rounds=2, threads=1)


def test_a_miniature_run_times_what_the_cpu_can(measured: dict[str, Any]) -> None:
    assert measured["complete"]
    assert {row["dtype"] for row in measured["rows"]} == {"float32", "bfloat16"}
    assert {(row["documents"], row["window"]) for row in measured["rows"]} >= {("short", None), ("row", 128)}
    assert {row["sinks"] for row in measured["rows"]} == {False, True}
    for row in measured["rows"]:
        assert set(row["backends"]) == set(attention_sides.NAMES)
        for name in ("per_document", "sdpa"):
            backend = row["backends"][name]
            assert not backend["wrong"]
            assert len(backend["errors"]) == 4 + row["sinks"]
            for part in ("forward", "backward"):
                assert len(backend[part]["seconds"]["values"]) == 2
                rates = backend[part]["tflops"]
                assert rates["full_square"]["median"] == pytest.approx(2 * rates["causal_half"]["median"])
                assert rates["attended"]["low"] <= rates["attended"]["median"] <= rates["attended"]["high"]
        for name in ("varlen", "flex", "xformers", "flash_attention_3", "cudnn_varlen"):
            assert row["backends"][name]["refused"]


def test_conventions_count_the_pairs_of_the_mask() -> None:
    for window in (None, 128, 20):
        layer = Layer(Heads(4, 2, 16), window, torch.float32, "cpu")
        configuration = Configuration(layer, 60, "short", (1, 40, 19))
        pairs = configuration.pairs()
        assert pairs["full_square"] == 1 + 40**2 + 19**2
        assert pairs["attended"] == dense_mask(PackedBatch.from_lengths((1, 40, 19)), window, CPU).sum()
    rates = attention._rates(configuration, attention.FORWARD_PER_PAIR, [0.5, 0.5])
    assert rates["tflops"]["full_square"]["median"] == pytest.approx(4 * 4 * 16 * pairs["full_square"] / 0.5 / 1e12)


def test_documents_fill_the_row_and_windows_matter() -> None:
    for mean in (None, 150, 1500):
        lengths = attention.document_lengths(8192, mean, 0)
        assert sum(lengths) == 8192
        assert mean is None or 0.7 * mean < sum(lengths[:-1]) / (len(lengths) - 1) < 1.3 * mean
    planned = attention.configurations(attention.CUDA, "cuda", 0)
    assert all(c.layer.window is None or c.layer.window < max(c.lengths) for c in planned)
    assert {c.layer.window for c in planned if c.tokens == 2048} == {None, 128}
    assert {c.tokens for c in planned} == {2048, 8192, 32768}


def test_a_wrong_backend_is_a_row_and_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = attention_sides.prepare

    def prepare(name: str, layer: Layer, batch: PackedBatch) -> Any:
        if name == "per_document":  # every document sees those before it
            return original(name, layer, PackedBatch.from_lengths((batch.total_tokens,)))
        return original(name, layer, batch)

    monkeypatch.setattr(attention_sides, "prepare", prepare)
    plan = replace(PLAN, layers=PLAN.layers[:1], windows=(None,), dtypes=(torch.bfloat16,))
    found = attention.measure(plan=plan, rounds=1, threads=1)
    for row in found["rows"]:
        assert "out is off by" in row["backends"]["per_document"]["wrong"]
        assert "forward" not in row["backends"]["per_document"]
        assert "forward" in row["backends"]["sdpa"]
    assert "per_document: out is off by" in command.table(found)


def test_a_backend_that_raises_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare(name: str, layer: Layer, batch: PackedBatch) -> Any:
        if name == "per_document":
            raise RuntimeError("no kernel image is available")
        return attention_sides.prepare(name, layer, batch)

    monkeypatch.setattr(attention, "prepare", prepare)
    plan = replace(PLAN, layers=PLAN.layers[:1], windows=(None,), dtypes=(torch.float32,))
    found = attention.measure(plan=plan, rounds=1, threads=1)
    assert all(
        row["backends"]["per_document"]["failed"] == "RuntimeError: no kernel image is available"
        for row in found["rows"]
    )


def test_no_time_is_named() -> None:
    found = attention.measure(plan=PLAN, rounds=1, threads=1, seconds=1e-9)
    assert all("no time left" in row["skipped"] for row in found["rows"])
    assert "skipped: no time left" in command.table(found)


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


# --- models ---


def parameters(shape: ModelShape) -> int:
    return sum(p.numel() for p in build_model(shape, positions=64, seed=0, device="meta").parameters())


@pytest.mark.parametrize(
    ("name", "millions", "layers"),
    [("qwen3-0.6b", 596, 28), ("llama-3.2-1b", 1236, 16), ("gpt-oss-20b", 20915, 24)],
)
def test_shapes_have_the_size_of_the_public_models(name: str, millions: int, layers: int) -> None:
    shape = shape_of(name)
    assert round(parameters(shape.cut_to(layers)) / 1e6) == millions
    cut = shape.cut_to(2)
    assert (cut.layers, cut.published_layers) == (2, layers)
    assert parameters(cut) < parameters(shape.cut_to(3))
    for outside in (0, layers + 1):
        with pytest.raises(UserError, match=f"layers={outside} is outside of 1 to {layers}"):
            shape.cut_to(outside)


@pytest.fixture(scope="module")
def models() -> dict[str, Any]:
    shapes = {name: tiny_shape(name) for name in ("small", "gpt-oss-20b")}
    return model_steps.measure(shapes, tokens=[128], rounds=2, threads=1, documents=(8, 40))


def test_all_sides_are_right_and_timed(models: dict[str, Any]) -> None:
    assert models["complete"]
    dense, experts = models["rows"]
    for row in (dense, experts):
        assert list(row["sides"]) == ["stock", "rebuild", "fastpack"]
        assert row["setting"].endswith("bf16, checkpointing")
        for side in row["sides"].values():
            assert len(side["seconds"]["values"]) == len(side["losses"]) == 2
            assert side["memory"] is None  # there is no device here
        assert set(row["ratios"]) == {"stock", "rebuild"}
        assert row["rebuild_seconds"]["median"] > 0
        for name in ("rebuild", "fastpack"):
            assert row["gate"]["sides"][name]["error"] <= model_gate.TIMES_BUDGET * row["gate"]["budget"]
    assert "leaks" not in dense["gate"]["sides"]["stock"]
    assert "documents see each other" in experts["gate"]["sides"]["stock"]["leaks"]
    out = command.table(models)
    assert "small, 2 of 2 layers, float32 weights, bf16, checkpointing" in out
    assert "documents see each other in stock gpt_oss" in out
    assert "one rebuild of metadata and mask takes" in out


def test_sides_share_one_set_of_parameters_and_one_optimizer(tmp_path: Path) -> None:
    import contextlib

    from fastpack_trl.bench.environment import quiet

    shape = tiny_shape("small")
    run = model_steps.Run(rounds=1, checkpointing=False, device="cpu", seed=0, documents=(8, 40))
    model = build_model(shape, positions=128, seed=0, device="cpu")
    with quiet(), contextlib.ExitStack() as stack:
        sides, paths, failed = model_steps._sides(model, shape, 128, run, str(tmp_path), stack)
        assert not failed
        assert paths["fastpack"] == "per_document"
        assert len({id(side.optimizer.optimizer) for side in sides.values()}) == 1
        pointers = [{p.data_ptr() for p in side.trainer.model.parameters()} for side in sides.values()]
        assert pointers[0] == pointers[1] == pointers[2]
        names = [side.trainer.model.config._attn_implementation for side in sides.values()]
        assert names == ["sdpa", "fastpack_over_torch", "fastpack_over_torch"]
    assert model.config._attn_implementation == "sdpa"


def test_nothing_of_a_row_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next row must not run beside this one's memory."""
    built: list[weakref.ref[Any]] = []

    def build(*args: Any, **kwargs: Any) -> Any:
        model = build_model(*args, **kwargs)
        built.append(weakref.ref(next(model.parameters())))
        return model

    monkeypatch.setattr(model_steps, "build_model", build)
    shapes = {"small": tiny_shape("small")}
    model_steps.measure(shapes, tokens=[128], rounds=1, threads=1, documents=(8, 40), checkpointing=False)
    gc.collect()
    assert [reference() for reference in built] == [None]


def test_a_side_that_is_wrong_is_a_row_and_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    import contextlib

    @contextlib.contextmanager
    def nothing(model: Any) -> Any:
        model.base_model.register_forward_pre_hook(
            lambda _module, args, kwargs: (args, {**kwargs, "position_ids": torch.arange(128)[None]}), with_kwargs=True
        )
        yield

    monkeypatch.setattr(model_steps, "rebuild_per_layer", nothing)
    found = model_steps.measure({"small": tiny_shape("small")}, tokens=[128], rounds=1, threads=1, documents=(8, 40))
    (row,) = found["rows"]
    assert "over 2 x stock's own bf16 error" in row["sides"]["rebuild"]["failed"]
    assert set(row["ratios"]) == {"stock"}
    assert "rebuild: rebuild: the loss of its tokens" in command.table(found)


def test_a_side_out_of_memory_is_a_row_and_leaves_no_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    original = side_turns._step

    def step_of(side: Any, device: str) -> Any:
        if side.trainer.__class__.__name__ == "SFTTrainer":
            next(side.trainer.model.parameters()).grad = torch.full((), float("nan")).expand(64, 32).clone()
            raise torch.OutOfMemoryError("out of memory")
        return original(side, device)

    monkeypatch.setattr(side_turns, "_step", step_of)
    found = model_steps.measure(
        {"small": tiny_shape("small")}, tokens=[128], rounds=1, threads=1, documents=(8, 40), checkpointing=False
    )
    (row,) = found["rows"]
    assert row["sides"]["stock"] == {"failed": "OutOfMemoryError: out of memory"}
    assert all(loss == loss for loss in row["sides"]["fastpack"]["losses"])
    assert row["ratios"] == {}
    assert row["setting"].endswith("no checkpointing")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--case", "packed_attention", "--model", "qwen3-0.6"], "did you mean 'qwen3-0.6b'?"),
        (["--case", "packed_attention", "--model", "small", "--layers", "9"], "layers=9 is outside of 1 to 8"),
        (["--case", "packed_attention", "--model", "small", "--tokens", "512"], "tokens=512 is shorter"),
        (["--case", "packed_attention", "--layers", "2"], "--layers does not go with this case"),
        (["--case", "attention", "--model", "small"], "--model does not go with this case"),
        (["--case", "attention", "--pairs", "0"], "rounds=0"),
        (["--case", "attention", "--backends", "varlan"], "did you mean 'varlen'?"),
        (["--case", "collator", "--seconds", "3"], "--seconds does not go with this case"),
    ],
)
def test_a_wrong_argument_is_one_line(capsys: pytest.CaptureFixture[str], arguments: list[str], part: str) -> None:
    assert command.main(["--device", "cpu", *arguments]) == 2
    assert part in capsys.readouterr().err


def test_the_gate_sees_a_leak_and_another_row() -> None:
    model = tiny_model("llama")
    ids, _, batch = make_row()
    expected = model_gate.reference(model, ids, batch.position_ids)
    right = float(expected.exact.mean())
    with packed_attention(model, compute_dtype=torch.bfloat16):
        inputs = {"input_ids": ids, "position_ids": batch.position_ids, "packed_batch": batch}
        losses = model_gate.token_losses(model, inputs, bf16=True)
    assert expected.verdict("ours", losses, right)[1] == ""
    assert "loss of its step" in expected.verdict("ours", losses, right + 1.0)[1]
    assert "loss of its tokens" in expected.verdict("ours", losses * float("nan"), right)[1]
