"""The case ``moe`` of ``fastpack-trl bench``: a miniature run, its gate and its table."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks import moe, moe_sides, readme
from benchmarks.case_tables import table
from benchmarks.cases import Run
from fastpack_trl.measure.host_syncs import count_host_syncs
from fastpack_trl.moe.layout import experts_modules


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> str:
    shape = moe_sides.SHAPES["gpt_oss-small"]
    smaller = {"hidden_size": 64, "intermediate_size": 32, "num_attention_heads": 1, "num_hidden_layers": 2}
    fields = {**shape.fields, **smaller, "layer_types": ["sliding_attention", "full_attention"]}
    monkeypatch.setitem(moe_sides.SHAPES, "tiny", replace(shape, fields=fields))
    return "tiny"


def _run(tiny: str, **options: Any) -> dict[str, Any]:
    return moe.measure(Run(rounds=2, threads=1), rows=[tiny], tokens=[48], **options)


def test_decoder_row_of_the_cpu_and_its_table(tiny: str) -> None:
    record = _run(tiny)
    (row,) = record["rows"]
    assert (row["part"], row["mode"], row["attention"]) == ("decoder", "lora", "per_document")
    assert set(row["sides"]) == {"stock", "fastpack"}
    assert row["ratios"]["stock"]["saved_bytes"] > 1
    text = table(record)
    assert "2 decoder layers without the head, lora r=16, float32" in text
    assert "MiB kept for backward" in text
    json.dumps(record)


@pytest.mark.parametrize("mode", moe_sides.MODES)
def test_block_rows_of_cuda_run_on_the_cpu_too(tiny: str, mode: str) -> None:
    found = moe.measure_row(moe.Row("block", tiny, 1, mode, 40, skewed=True), Run(rounds=2), 60.0)
    assert found["gate"]["fastpack"] <= 1e-4
    assert not any("failed" in side for side in found["sides"].values())


def test_checkpointed_decoder_sorts_once_per_layer_and_forward(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reports: list[Any] = []

    def noted(model: nn.Module) -> Any:
        reports.append(moe_sides.apply_moe(model))
        return reports[-1]

    monkeypatch.setitem(moe_sides.SIDES, "fastpack", noted)
    row = moe.Row("decoder", tiny, 2, "lora", 40, checkpointing=True)
    found = moe.measure_row(row, Run(rounds=1), 60.0)
    assert not any("failed" in side for side in found["sides"].values())
    assert reports[-1].sorts == 2 * 2


def test_a_side_that_computes_something_else_is_not_timed(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def wrong(model: nn.Module) -> Iterator[None]:
        module = next(iter(experts_modules(model).values()))
        before = module.down_proj.data.clone()
        module.down_proj.data.mul_(1.1)
        yield
        module.down_proj.data.copy_(before)

    monkeypatch.setitem(moe_sides.SIDES, "wrong", wrong)
    found = moe.measure_row(moe.Row("block", tiny, 1, "frozen", 40), Run(rounds=1), 60.0)
    assert "differs from stock by" in found["sides"]["wrong"]["failed"]
    assert "seconds" in found["sides"]["fastpack"]


def test_readme_table_of_a_record(tiny: str) -> None:
    text = readme.numbers({"moe.json": _run(tiny)})
    assert "| tiny, 2 decoder layers without the head, lora r=16, float32" in text
    assert "`python -m benchmarks.moe --rows tiny --rounds 2 --json FILE`" in text


def test_plan_of_cuda_names_every_configuration() -> None:
    rows = moe.plan("cuda", ["gpt-oss-20b", "qwen3-30b-a3b"], [8192], 2)
    assert len(rows) == 2 * (3 * 2 + 2 * 2)
    assert len({row.describe()["setting"] for row in rows}) == len(rows)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("mode", moe_sides.MODES)
def test_block_in_bf16_on_cuda(tiny: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(moe_sides.SHAPES, "tiny", replace(moe_sides.SHAPES["tiny"], weights=torch.bfloat16))
    found = moe.measure_row(moe.Row("block", tiny, 1, mode, 512), Run(rounds=2, device="cuda"), 60.0)
    assert "seconds" in found["sides"]["fastpack"], found["sides"]["fastpack"]


def counted(tiny: str, side: Any, checkpointing: bool) -> tuple[int, int, int]:
    """Sorts, searches for an expert's tokens, and host syncs of a forward and backward pass."""
    row = moe.Row("decoder", tiny, 2, "lora", 48, checkpointing=checkpointing)
    with moe.decoder(row, "cpu", 0) as subject, side(subject.model):
        # One after the other: the profiler would see what the counter of waits dispatches again.
        with count_host_syncs() as syncs:
            subject.forward().backward(subject.upstream)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            subject.forward().backward(subject.upstream)
    counts = {event.key: event.count for event in seen.key_averages()}
    return counts.get("aten::sort", 0), counts.get("aten::nonzero", 0), syncs.total


@pytest.mark.parametrize("checkpointing", [False, True], ids=["kept", "checkpointed"])
def test_tokens_are_sorted_once_per_layer_and_forward_without_a_search(tiny: str, checkpointing: bool) -> None:
    forwards, experts = 1 + checkpointing, moe_sides.SHAPES[tiny].fields["num_local_experts"]
    sorts, lookups, syncs = counted(tiny, partial(moe_sides.implementation, name="eager"), checkpointing)
    assert sorts == 0
    # One search for the experts that were hit, and one for the tokens of each.
    assert 2 * forwards < lookups <= 2 * forwards * (1 + experts)
    assert syncs >= lookups
    assert counted(tiny, partial(moe_sides.implementation, name="grouped_mm"), checkpointing) == (2 * forwards, 0, 0)
    assert counted(tiny, moe_sides.apply_moe, checkpointing) == (2 * forwards, 0, 0)
