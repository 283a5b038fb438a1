"""The case ``packed_attention``: its record and table, a miniature run, and the command line of all cases."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import packed_attention, step_turns
from benchmarks.cases import Run
from benchmarks.step_turns import OURS, STOCK
from benchmarks.workload import PLAIN, TRL_DEFAULTS, Shape, Workload
from fastpack_trl.bench.environment import limited_threads, quiet
from fastpack_trl.bench.parity import LossParityError
from fastpack_trl.measure import record

MINIATURE = Workload(
    Shape(layers=2, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=8, vocabulary=64),
    shortest=8,
    longest=40,
    tokens=(128,),
    settings=(PLAIN, TRL_DEFAULTS),
    quick_tokens=(),
)


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return packed_attention.measure(Run(rounds=2, threads=1), workload=MINIATURE)


def test_a_miniature_run_has_the_whole_record(measured: dict[str, Any]) -> None:
    assert json.loads(json.dumps(measured, allow_nan=False)) == measured
    assert measured["schema"] == record.SCHEMA
    assert (measured["case"], measured["complete"], measured["seed"]) == ("packed_attention", True, 0)
    assert measured["date"].endswith("+00:00")
    assert set(measured["versions"]) >= {"torch", "transformers", "trl", "peft", "accelerate", "fastpack_trl"}
    assert (measured["machine"]["threads"], measured["machine"]["device"]) == (1, "cpu")
    assert measured["settings"]["layers"] == 2
    assert [row["setting"] for row in measured["rows"]] == [PLAIN.name, TRL_DEFAULTS.name]
    assert [row["dtype"] for row in measured["rows"]] == ["float32", "bfloat16"]
    for row in measured["rows"]:
        assert "per_document" in row["sides"][OURS]["path"]
        assert row["tokens"] == 128
        assert row["order"] == [STOCK, OURS, OURS, STOCK]
        assert row["documents"]["count"] > 2
        assert row["loss_difference"] <= row["gate"]["tolerance"]
        for figures in row["sides"].values():
            assert len(figures["seconds"]["values"]) == len(figures["losses"]) == 2
            assert min(figures["phases"].values()) > 0
        assert len(row["ratios"][STOCK]["values"]) == 2


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
    out = command.table(measured | {"rows": [first, first, *others], "complete": False})
    assert "INCOMPLETE: interrupted; 3 row(s) were finished" in out
    assert "1 thread of" in out
    assert f"torch {torch.__version__}" in out
    assert ", 50.0%)" in out  # what an interval of two pairs covers
    assert "data, ms | forward, ms | backward, ms | optimizer, ms | other, ms" in out
    busy = command.table(measured | {"rows": [first | {"other_load": 0.8}]})
    assert "128 tokens: other processes kept 0.8 cores busy" in busy
    assert "other processes" not in command.table(measured | {"rows": [first | {"other_load": None}]})


def test_other_rows_end_the_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def other_rows(rows: Any) -> Any:
        seen.append(rows)
        return rows.select(range(len(rows) - 1, -1, -1) if len(seen) % 2 == 0 else range(len(rows)))

    monkeypatch.setattr(step_turns, "without_emptiest", other_rows)
    with pytest.raises(LossParityError, match="different micro-batches in step 1"):
        packed_attention.measure(Run(rounds=1, threads=1), workload=MINIATURE)


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

    monkeypatch.setattr(packed_attention, "_measure_row", row)
    file = tmp_path / "bench.json"
    arguments = ["--case", "packed_attention", "--device", "cpu", "--tokens", "256", "512", "--threads", "1"]
    assert bench(*arguments, "--json", str(file)) == 130
    found = json.loads(file.read_text())
    assert not found["complete"]
    assert len(found["rows"]) == 1
    assert "INCOMPLETE" in capsys.readouterr().out


def test_quick_leaves_out_most_lengths_of_the_defaults(
    monkeypatch: pytest.MonkeyPatch, measured: dict[str, Any]
) -> None:
    seen: list[tuple[str, int]] = []

    def row(run: Run, work: Any, setting: Any, tokens: int, *args: Any) -> dict[str, Any]:
        seen.append((setting.name, tokens))
        return dict(measured["rows"][0])

    monkeypatch.setattr(packed_attention, "_measure_row", row)
    packed_attention.measure(quick=True)
    assert [tokens for name, tokens in seen if name == PLAIN.name] == [256, 512, 1024, 2048, 4096, 8192]
    assert [tokens for name, tokens in seen if name != PLAIN.name] == [2048, 4096]


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
        ("--tokens 256", "no case: give --case, one of packed_attention"),
        ("--case packed_atention", "there is no case 'packed_atention'; did you mean 'packed_attention'?"),
        ("packed_attention --tokens 8", "tokens=8 is shorter than the longest document (240 tokens)"),
        ("packed_attention --layers 2", "--layers does not go with the case"),
        ("packed_attention --device cuda", "torch sees no CUDA device"),
        ("attention --pairs 0", "rounds=0"),
        ("attention --threads 0", "threads=0"),
        ("attention --seconds 0", "seconds=0"),
        ("attention --backends varlan", "did you mean 'varlen'?"),
        ("collator --threads 2", "one core"),
        ("collator --tokens 8", "tokens=8 is shorter"),
        ("collator --json absent/x.json", "'absent/x.json' cannot be written: the folder"),
        ("moe --tokens 0", "tokens=0 is below 1"),
        ("moe --model gpt_oss-smal", "did you mean 'gpt_oss-small'"),
        ("lora --model qwen3-8", "did you mean 'qwen3-8b'"),
        ("host_overhead --tokens 8", "longest document"),
        ("host_overhead --quick", "--quick does not go with the case"),
        ("activation_memory --tokens 64 128", "takes one row length"),
        ("activation_memory --model qwen9", "there is no workload 'qwen9'"),
        ("nf4 nosuch", "there is no row 'nosuch'"),
    ],
)
def test_a_wrong_argument_is_one_line_and_2(
    arguments: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bench(*arguments.split()) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "benchmarks: error" in line]
    assert said in line
