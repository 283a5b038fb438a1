"""``python -m benchmarks --case host_overhead``: what counts as overhead, in a miniature run of the real loops."""

from __future__ import annotations

import json

import pytest

from benchmarks.__main__ import table
from benchmarks.cases import Run
from benchmarks.host_overhead import Workload, measure
from benchmarks.model_shapes import ModelShape

SHAPE = ModelShape(
    "qwen3",
    {
        "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 64, "tie_word_embeddings": True,
    },
)  # fmt: skip
MINIATURE = Workload("miniature", SHAPE, (4, 16), ((32, 1), (32, 2)), bf16=False, rank=2)


def test_a_step_is_its_arithmetic_and_its_overhead() -> None:
    miniature = measure(Run(rounds=3, threads=1), workload=MINIATURE)
    assert miniature["complete"]
    assert [(row["tokens"], row["micro_batches"]) for row in miniature["rows"]] == [(32, 1), (32, 2)]
    for row in miniature["rows"]:
        for figures in row["sides"].values():
            spent = {name: seconds["values"] for name, seconds in figures["phase_seconds"].items()}
            rest = [sum(parts) for parts in zip(*(spent.pop(name) for name in ("data", "other")), strict=True)]
            assert figures["overhead_seconds"]["values"] == rest
            whole = [sum(parts) for parts in zip(rest, *spent.values(), strict=True)]
            assert whole == pytest.approx(figures["seconds"]["values"])
        assert row["overhead"]["median"] > 0
        assert row["loss_difference"] < 1e-5
    report = miniature["rows"][1]["sides"]["fastpack"]["report"]
    assert report["features"]["merge_accumulation"]["status"] == "on"
    assert json.loads(json.dumps(miniature)) == miniature
    assert "2 micro-batches per step" in table(miniature)
