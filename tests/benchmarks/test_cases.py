"""What the cases share: record and table of a miniature run of whole steps, and their command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import host_overhead, step_turns
from benchmarks.case_tables import table
from benchmarks.cases import Run
from benchmarks.host_overhead import Workload
from benchmarks.lora_models import LoraModel, build, shared_copy
from benchmarks.model_shapes import decoder_shape
from benchmarks.step_turns import OURS, STOCK
from fastpack_trl.bench.environment import limited_threads, quiet
from fastpack_trl.bench.parity import LossParityError
from fastpack_trl.measure import record

SHAPE = decoder_shape("qwen3", (2, 16, 32), (2, 1, 8), 64, tied=True)
MINIATURE = Workload("miniature", SHAPE, (4, 16), ((32, 1), (32, 2)), bf16=False, rank=2)


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return host_overhead.measure(Run(rounds=2, threads=1), workload=MINIATURE)


def test_a_miniature_run_has_the_whole_record(measured: dict[str, Any]) -> None:
    assert json.loads(json.dumps(measured, allow_nan=False)) == measured
    assert measured["schema"] == record.SCHEMA
    assert (measured["case"], measured["complete"], measured["seed"]) == ("host_overhead", True, 0)
    assert measured["date"].endswith("+00:00")
    assert set(measured["versions"]) >= {"torch", "transformers", "trl", "peft", "accelerate", "fastpack_trl"}
    assert (measured["machine"]["threads"], measured["machine"]["device"]) == (1, "cpu")
    assert [(row["tokens"], row["micro_batches"]) for row in measured["rows"]] == [(32, 1), (32, 2)]
    for row in measured["rows"]:
        assert "per_document" in row["sides"][OURS]["path"]
        assert row["dtype"] == "float32"
        assert row["order"] == [STOCK, OURS, OURS, STOCK]
        assert row["documents"]["count"] > 2
        assert row["loss_difference"] <= min(row["gate"]["tolerance"], 1e-5)
        assert len(row["ratios"][STOCK]["values"]) == 2
        assert row["overhead"]["median"] > 0
        for figures in row["sides"].values():
            assert len(figures["seconds"]["values"]) == len(figures["losses"]) == 2
            assert min(figures["phases"].values()) > 0
    report = measured["rows"][1]["sides"]["fastpack"]["report"]
    assert report["features"]["merge_accumulation"]["status"] == "on"


def test_a_step_is_its_arithmetic_and_its_overhead(measured: dict[str, Any]) -> None:
    for figures in (side for row in measured["rows"] for side in row["sides"].values()):
        spent = {name: seconds["values"] for name, seconds in figures["phase_seconds"].items()}
        rest = [sum(parts) for parts in zip(*(spent.pop(name) for name in ("data", "other")), strict=True)]
        assert figures["overhead_seconds"]["values"] == rest
        whole = [sum(parts) for parts in zip(rest, *spent.values(), strict=True)]
        assert whole == pytest.approx(figures["seconds"]["values"])


def test_sides_share_the_frozen_base_and_have_adapters_of_their_own() -> None:
    model = build(LoraModel("small", "fp32"), layers=1, positions=16, seed=0, device="cpu")
    ours = dict(shared_copy(model, trained=False).named_parameters())
    for name, parameter in model.named_parameters():
        assert (ours[name] is parameter) == (not parameter.requires_grad)
        assert torch.equal(ours[name], parameter)


def test_the_memory_of_a_side_has_the_base_that_it_shares() -> None:
    memory = {"peak_bytes": 5, "reserved_bytes": 7, "before_bytes": 2, "pinned_bytes": 1}
    sides: dict[str, Any] = {"stock": {"memory": memory}, "tuned": {"failed": "no compiler"}, OURS: {"memory": None}}
    step_turns.with_shared({"sides": sides}, 100)
    assert memory == {"peak_bytes": 105, "reserved_bytes": 107, "before_bytes": 102, "pinned_bytes": 1}


def test_the_record_names_neither_host_nor_path(measured: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import platform
    import socket

    for module, name in ((platform, "node"), (socket, "gethostname"), (socket, "getfqdn")):
        monkeypatch.setattr(module, name, lambda *args: "name-of-this-host")
    found = record.make_record(case="x", settings={}, rows=measured["rows"], complete=True, threads=1, seed=0)
    text = json.dumps(found).replace(json.dumps(found["machine"]["processor"]), "")
    assert "name-of-this-host" not in text
    assert "/" not in text


def test_the_table_says_what_was_found(measured: dict[str, Any]) -> None:
    first, *others = measured["rows"]
    out = table(measured | {"rows": [first, first, *others], "complete": False})
    assert "INCOMPLETE: interrupted; 3 row(s) were finished" in out
    assert "2 micro-batches per step" in out
    assert "1 thread of" in out
    assert f"torch {torch.__version__}" in out
    assert ", 50.0%)" in out  # what an interval of two pairs covers
    assert "data, ms | forward, ms | backward, ms | optimizer, ms | other, ms" in out
    busy = table(measured | {"rows": [first | {"other_load": 0.8}]})
    assert "32 tokens: other processes kept 0.8 cores busy" in busy
    assert "other processes" not in table(measured | {"rows": [first | {"other_load": None}]})


def test_other_rows_end_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def other_rows(rows: Any) -> Any:
        seen.append(rows)
        return rows.select(range(len(rows) - 1, -1, -1) if len(seen) % 2 == 0 else range(len(rows)))

    monkeypatch.setattr(step_turns, "without_emptiest", other_rows)
    with pytest.raises(LossParityError, match="different micro-batches in step 1"):
        host_overhead.measure(Run(rounds=1, threads=1), workload=MINIATURE)


def test_threads_and_logging_are_as_before(measured: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    import logging

    import datasets

    # Nothing is drawn while the tests run; here it would be.
    bars = sys.modules[datasets.are_progress_bars_disabled.__module__]
    monkeypatch.setattr(bars, "HF_DATASETS_DISABLE_PROGRESS_BARS", None)
    monkeypatch.setattr(bars, "_hf_datasets_progress_bars_disabled", False)
    assert logging.root.manager.disable == logging.NOTSET
    before = torch.get_num_threads()
    with limited_threads(before + 1), quiet():
        assert torch.get_num_threads() == before + 1
        assert datasets.are_progress_bars_disabled()
    assert torch.get_num_threads() == before
    assert not datasets.are_progress_bars_disabled()


def bench(*arguments: str) -> int:
    return command.main(arguments)


def test_an_interrupt_keeps_what_was_finished(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, measured: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    rows = iter([measured["rows"][0]])

    def row(*args: Any) -> dict[str, Any]:
        found = next(rows, None)
        if found is None:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(host_overhead, "_measure_row", row)
    file = tmp_path / "bench.json"
    arguments = ["--case", "host_overhead", "--tokens", "256", "512", "--threads", "1"]
    assert bench(*arguments, "--json", str(file)) == 130
    found = json.loads(file.read_text())
    assert not found["complete"]
    assert len(found["rows"]) == 1
    assert "INCOMPLETE" in capsys.readouterr().out


def test_the_collator_case_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "collator.json"
    assert bench("--case", "collator", "--tokens", "256", "--pairs", "2", "--json", str(file)) == 0
    out = capsys.readouterr().out
    assert "PackingCollator" in out
    found = json.loads(file.read_text())
    assert found["complete"]
    (row,) = found["rows"]
    assert len(row["stock"]["seconds"]) == len(row["fastpack"]["seconds"]) == 2
    for statistic in (row["stock"]["tokens_per_second"], row["fastpack"]["tokens_per_second"], row["ratio"]):
        assert 0 < statistic["low"] <= statistic["median"] <= statistic["high"]
    assert bench("--case", "collator", "--tokens", "256", "--pairs", "2", "--json", str(file)) == 0
    assert "1 finished row(s) taken over" in capsys.readouterr().out
    assert json.loads(file.read_text())["rows"] == [row]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--tokens 256", "there is no case '--tokens'"),
        ("--case host_overhed", "there is no case 'host_overhed'; did you mean 'host_overhead'?"),
        ("host_overhead --tokens 8", "tokens=8 is shorter than the longest document (64 tokens)"),
        ("host_overhead --layers 2", "unrecognized arguments: --layers"),
        ("host_overhead qwen3", "there is no row 'qwen3'"),
        ("moe --rounds 0", "rounds=0"),
        ("moe --threads 0", "threads=0"),
        ("moe --seconds 0", "seconds=0"),
        ("collator --tokens 8", "tokens=8 is shorter"),
        ("collator --json absent/x.json", "'absent/x.json' cannot be written: the folder"),
        ("moe --tokens 0", "tokens=0 is below 1"),
        ("moe --model gpt_oss-smal", "did you mean 'gpt_oss-small'"),
        ("activation_memory --tokens 64 128", "takes one row length"),
        ("activation_memory --model qwen9", "there is no row 'qwen9'"),
    ],
)
def test_a_wrong_argument_is_one_line_and_2(
    arguments: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench(*arguments.split()) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert said in line
