"""Does LoRA learn over a base in FP8: the measurement in miniature, by the reference on the CPU."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import fp8_accuracy
from benchmarks.fp8_accuracy import Plan, gradient_errors, judged, measure, plot, table, with_outliers
from benchmarks.model_shapes import ModelShape, build_model
from fastpack_trl.lora import frozen_base
from fastpack_trl.lora.linear import LoraLayer

TINY = ModelShape(
    "qwen3",
    {
        "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 600, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
)  # fmt: skip
PLAN = Plan(
    shape=TINY, row=64, batch=2, pretrain_seconds=42.0, pretrain_tokens=4000, steps=4, evaluations=2, documents=40,
    gradient_tokens=32,
)  # fmt: skip


def test_outlier_channels_change_what_layers_read_and_not_what_is_computed() -> None:
    model = build_model(TINY, positions=64, seed=0, device="cpu").double()
    other = with_outliers(model, 10)
    ids = torch.arange(2, 42)[None]
    read: dict[str, dict[str, torch.Tensor]] = {"plain": {}, "outliers": {}}
    for name, each in (("plain", model), ("outliers", other)):
        for path, module in each.model.layers[1].named_modules():
            if path.endswith("_proj"):
                module.register_forward_pre_hook(
                    lambda module, args, path=path, name=name: read[name].update({path: args[0]})
                )
    with torch.no_grad():
        torch.testing.assert_close(other(ids).logits, model(ids).logits)
    assert len(read["plain"]) == 7
    for path, plain in read["plain"].items():
        times = (read["outliers"][path] / plain).median(1).values
        assert (times > 29).any(), path
        assert 0.8 < (times < 1.001).float().mean() < 1, path


def test_fp8_passes_within_the_spread_of_seeds_and_of_nf4() -> None:
    def curves(bf16: list[float], nf4: list[float], fp8: list[float]) -> dict[str, Any]:
        sides = {"bf16": bf16, "nf4": nf4, "fp8": fp8}
        return {side: {at: {"held_out": [[9, loss]]} for at, loss in enumerate(of)} for side, of in sides.items()}

    good = judged(curves([2.0, 2.1], [2.05, 2.15], [2.01, 2.11]))
    assert good["passes"]
    assert good["spread"] == pytest.approx(0.1)
    assert good["mean_apart"] == {"fp8": pytest.approx(0.01), "nf4": pytest.approx(0.05)}
    assert not judged(curves([2.0, 2.1], [2.05, 2.15], [2.06, 2.16]))["passes"]  # further than NF4
    assert not judged(curves([2.0, 2.01], [2.9, 2.9], [2.1, 2.1]))["passes"]  # further than the seeds
    assert judged(curves([2.0, 2.1], [1.95, 2.05], [1.99, 2.09]))["passes"]  # better than bf16


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_miniature_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    monkeypatch.setattr(frozen_base, "_refused_by_device", lambda run: "")
    ticks = map(float, count())  # a second per step, however busy the machine is
    monkeypatch.setattr(fp8_accuracy, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    record = measure(PLAN, seeds=[0], device="cpu")
    assert record["complete"]
    assert [row["model"] for row in record["rows"]] == list(fp8_accuracy.MODELS)
    for row in record["rows"]:
        for side, seeds in row["curves"].items():
            (found,) = seeds.values()
            assert [step for step, _ in found["held_out"]] == [0, 2, 4], side
            assert (found["frozen_base"] is not None) == (side == "fp8")
        assert all(len(errors) == TINY.fields["num_hidden_layers"] for errors in row["errors"].values())
        assert max(row["errors"]["bf16"]) < min(row["errors"]["fp8"])
        starts = [seeds["0"]["held_out"][0][1] for side, seeds in row["curves"].items() if side != "nf4"]
        assert starts[0] == starts[1]  # the base as loaded, before training
    losses = record["settings"]["pretraining"]["losses"]
    assert losses[-1][1] < losses[0][1]
    text = table(record)
    assert text.count("FP8 within the spread of bf16's seeds") == 2
    pytest.importorskip("matplotlib")
    plot(record).savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_gradients_of_a_side_are_of_the_same_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(TINY, positions=64, seed=0, device="cpu").bfloat16()
    firsts = [
        next(
            module for module in fp8_accuracy.adapted(model, side, "cpu", 3).modules() if isinstance(module, LoraLayer)
        )
        for side in ("bf16", "fp8")
    ]
    weights = [layer.lora_A["default"].weight for layer in firsts]
    assert torch.equal(*weights)
    assert weights[0].dtype == torch.float32
    pytest.importorskip("bitsandbytes")
    errors = gradient_errors(model, PLAN, "cpu", 0)
    assert 0 < max(errors["bf16"]) < 0.05 < max(errors["fp8"]) < 0.3
