"""``python -m benchmarks --case host_overhead``: what counts as overhead, and a miniature run of the real loops."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import host_overhead, packed_attention
from benchmarks.__main__ import table
from benchmarks.cases import Run
from benchmarks.host_overhead import ARITHMETIC, LoopSteps, Workload, measure
from benchmarks.model_shapes import ModelShape
from fastpack_trl.bench.environment import quiet
from fastpack_trl.bench.gaps import covered

SHAPE = ModelShape(
    "qwen3",
    {
        "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 64, "tie_word_embeddings": True,
    },
)  # fmt: skip
ONE = Run(rounds=1, threads=1)
MINIATURE = Workload("miniature", SHAPE, (4, 16), ((32, 1), (32, 2)), bf16=False, rank=2)


@pytest.fixture(scope="module")
def miniature() -> dict[str, Any]:
    return measure(ONE, workload=MINIATURE)


def test_a_step_is_its_arithmetic_and_its_overhead(miniature: dict[str, Any]) -> None:
    assert miniature["complete"]
    assert [(row["tokens"], row["micro_batches"]) for row in miniature["rows"]] == [(32, 1), (32, 2)]
    for row in miniature["rows"]:
        for side in ("stock", "fastpack"):
            figures = row[side]
            phases = figures["phases"]
            assert list(phases) == [*ARITHMETIC, "overhead"]
            assert all(seconds > 0 for seconds in phases.values()), phases
            values = figures["seconds"]["values"][0]
            assert len(values) == host_overhead._STEPS
            # Medians of parts do not add up exactly to the median of the whole.
            assert sum(phases.values()) == pytest.approx(sorted(values)[len(values) // 2], rel=0.5)
            assert figures["tokens_per_second"]["median"] * figures["seconds"]["median"] <= 32 * row["micro_batches"]
        assert row["stock"]["losses"] == pytest.approx(row["fastpack"]["losses"], rel=1e-5)
    assert miniature["rows"][1]["features"]["merge_accumulation"].startswith("on")
    assert json.loads(json.dumps(miniature)) == miniature
    assert "2 micro-batches per step" in table(miniature)


def test_overhead_is_what_the_arithmetic_leaves() -> None:
    inside = dict(zip(ARITHMETIC, (0.4, 0.3, 0.1, 0.1), strict=True))
    assert LoopSteps(seconds=[1.0, 1.5], inside=[inside, inside]).outside == pytest.approx([0.1, 0.6])


def _state(trainer: Any) -> tuple[object, ...]:
    return (
        trainer.maybe_activation_offload_context,
        len(trainer.callback_handler.callbacks),
        vars(trainer.model).get("forward"),
        "backward" in vars(trainer.accelerator),
        len(trainer.model._forward_hooks),
    )


def test_a_trainer_is_left_as_it_was(tmp_path: Path) -> None:
    with quiet():
        for trainer in host_overhead._trainers(MINIATURE, 32, 1, "cpu", 0, str(tmp_path)).values():
            before = _state(trainer)
            first = host_overhead._run(trainer, "cpu")
            second = host_overhead._run(trainer, "cpu")
            assert first.loss == second.loss > 0  # a learning rate of 0: each run computes the same
            assert _state(trainer) == before


def test_other_losses_stop_the_measurement() -> None:
    pair = {"stock": LoopSteps(loss=4.0), "fastpack": LoopSteps(loss=4.001)}
    with pytest.raises(packed_attention.ParityError, match="different work"):
        host_overhead._check(pair, tokens=256, bf16=False)


def test_covered_is_the_length_of_the_union() -> None:
    assert covered([(1, 3), (0, 2), (5, 6)]) == 4
    assert covered([(0, 10), (2, 3), (4, 12)]) == 12
    assert covered([]) == 0
