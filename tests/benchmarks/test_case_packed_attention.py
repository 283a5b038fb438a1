"""The case ``packed_attention``: its parity gate, its record and table, and a miniature run."""

from __future__ import annotations

import json
import math
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import __main__ as command
from benchmarks import packed_attention, steps
from benchmarks.cases import Run
from benchmarks.packed_attention import ParityError, check_parity
from benchmarks.workload import OURS, PLAIN, STOCK, TRL_DEFAULTS, Setting, Shape, Workload, make_trainers
from fastpack_trl.bench.environment import limited_threads, quiet
from fastpack_trl.measure import record
from fastpack_trl.measure.timing import WallClock
from fastpack_trl.model.hooks import BATCH_METHODS, replaced_methods
from fastpack_trl.trainer import FastSFTTrainer

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
    assert measured["machine"]["threads"] == 1
    assert measured["machine"]["device"] == "cpu"
    assert measured["settings"]["layers"] == 2
    assert [row["mixed_precision"] for row in measured["rows"]] == ["no", "bf16"]
    assert [row["gradient_checkpointing"] for row in measured["rows"]] == [False, True]
    plain = measured["rows"][0]
    assert plain[OURS]["losses"] == pytest.approx(plain[STOCK]["losses"], rel=1e-5)
    for row in measured["rows"]:
        assert row["path"] == "per_document"
        assert row["tokens"] == 128
        assert row["order"] == [STOCK, OURS, OURS, STOCK]
        assert min(row["batch_documents"]) > 1
        assert row["parity"]["difference"] <= row["parity"]["bound"]
        for side in (STOCK, OURS):
            figures = row[side]
            assert len(figures["seconds"]["values"]) == len(figures["losses"]) == 2
            assert set(figures["phases"]) == set(steps.PHASES)
            assert min(figures["phases"].values()) > 0
            total = sum(figures["phases"].values())
            assert total == pytest.approx(figures["seconds"]["median"], rel=0.5)
            for tokens, seconds in zip(row["batch_tokens"], figures["seconds"]["values"], strict=True):
                assert 0 < tokens <= 128
                assert seconds > 0
        assert len(row["ratio"]["values"]) == 2
        assert row["other_load"] is None or row["other_load"] >= 0


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
    assert "data, ms | forward, ms | backward, ms | optimizer, ms" in out
    busy = command.table(measured | {"rows": [first | {"other_load": 0.8}]})
    assert "128 tokens: other processes kept 0.8 cores busy" in busy
    assert "other processes" not in command.table(measured | {"rows": [first | {"other_load": None}]})


def test_a_wrong_side_fails_loudly_before_anything_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = FastSFTTrainer.compute_loss

    def wrong(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        # Every document sees the others: positions run on over the row and no packed metadata arrives.
        inputs.pop("packed_batch")
        inputs["position_ids"] = torch.arange(inputs["input_ids"].shape[1])[None]
        return original(self, model, inputs, *args, **kwargs)

    def timed(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("was timed")

    monkeypatch.setattr(FastSFTTrainer, "compute_loss", wrong)
    monkeypatch.setattr(packed_attention, "take_turns", timed)
    with pytest.raises(ParityError, match=r"with fastpack and .* with stock"):
        packed_attention.measure(Run(rounds=1, threads=1), workload=MINIATURE)


def test_other_rows_fail_loudly(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_rows(*args: Any) -> Any:
        trainers = make_trainers(*args)
        rows = trainers[OURS].train_dataset
        trainers[OURS].train_dataset = rows.select(range(len(rows) - 1, -1, -1))
        return trainers

    monkeypatch.setattr(packed_attention, "make_trainers", other_rows)
    with pytest.raises(ParityError, match="different rows"):
        packed_attention.measure(Run(rounds=1, threads=1), workload=MINIATURE)


@pytest.mark.parametrize(
    ("ours", "tokens", "bf16", "passes"),
    [
        (8.0 + 7e-5, 256, False, True),
        (8.0 + 9e-5, 256, False, False),
        (8.0 + 1e-3, 256, True, True),
        (8.0 + 2e-3, 256, True, False),
        (8.0 + 1e-3, 4096, True, False),
        (math.nan, 256, True, False),
    ],
)
def test_parity_bounds(ours: float, tokens: int, bf16: bool, passes: bool) -> None:
    if passes:
        found = check_parity(8.0, ours, tokens=tokens, bf16=bf16)
        assert found["difference"] <= found["bound"]
    else:
        with pytest.raises(ParityError):
            check_parity(8.0, ours, tokens=tokens, bf16=bf16)


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


@pytest.mark.parametrize("setting", MINIATURE.settings, ids=lambda setting: setting.name)
@pytest.mark.parametrize("name", [STOCK, OURS])
def test_a_measured_step_is_a_step_of_train(tmp_path: Path, setting: Setting, name: str) -> None:
    """Same losses as `train()` over the same rows: nothing of a training step is left out."""
    count = 4

    def trainer() -> Any:
        return make_trainers(MINIATURE, setting, 128, count, "cpu", 0, str(tmp_path))[name]

    with quiet():
        whole = trainer()
        whole.args.logging_steps, whole.args.save_strategy = 1, "no"
        whole.train()
        measured = trainer()
        with measured._fastpack_features() if name == OURS else nullcontext():
            side = steps.SteppedTrainer(measured, WallClock(), count)
            losses = [float(side.step().loss) for _ in range(count)]
            assert not replaced_methods(measured, BATCH_METHODS)  # timing it changes no path
    assert side.model.is_gradient_checkpointing == setting.gradient_checkpointing
    logged = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert losses == pytest.approx(logged, rel=1e-6)
    trained, stepped = (dict(t.model.named_parameters()) for t in (whole, measured))
    assert all(torch.equal(trained[key], stepped[key]) for key in trained)
