"""Side by side: which runs there are, figures of both trainers, which times are believed, table and chart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks import row_profile, side_by_side, unsloth_run
from benchmarks.first_screen import ROWS as FIRST_SCREEN
from benchmarks.first_screen import glance
from benchmarks.kernel_kinds import (
    ATTENTION,
    BASE,
    EXPERTS,
    GLUE,
    HEAD,
    OPTIMIZER,
    THIN,
    Facts,
    by_kind,
    launches_of,
)
from benchmarks.row_profile import ENOUGH, profile_of
from benchmarks.side_by_side import COMMAND
from benchmarks.side_table import LOSS_BUDGET, Cell, believed, cells, slower, table, work
from benchmarks.step_bounds import Device, products_seconds
from benchmarks.training_rows import ROWS, SMALL, Row
from benchmarks.training_side import SIDES, decided, train_side
from fastpack_trl.bench.run_watch import RunWatch
from fastpack_trl.errors import UserError
from fastpack_trl.measure.flops import model_flops
from fastpack_trl.measure.record import PACKAGES

FEW = {"warmup": 2, "settling": 2, "longest_warmup": 48, "timed": 4, "profiled": 2, "multiple": 2}
"""Steps of a run here."""


def test_the_sides_of_a_row_take_turns_from_round_to_round() -> None:
    rows = list(ROWS)[:2]
    args = COMMAND.arguments([*rows, "--sides", "stock", "fastpack", "--rounds", "2"])
    order = [("stock", 0), ("fastpack", 0), ("fastpack", 1), ("stock", 1)]
    found = [(run.row["row"], run.side, run.row["round"]) for run in side_by_side.tasks(args)]
    assert found == [(row, *run) for row in rows for run in order]


def test_a_report_that_waits_is_not_decided() -> None:
    features = {"a": {"path": "on"}, "b": {"path": "pending"}}
    assert not decided({"features": features})
    assert decided({"features": {"a": features["a"]}})


@pytest.fixture(scope="module")
def trained() -> dict[str, tuple[Any, RunWatch]]:
    """Stock and ours, few steps."""
    return {
        side: train_side(SMALL, SIDES[side], 0, {**FEW, "shapes": side == "fastpack"}, logging_steps=2)
        for side in ("stock", "fastpack")
    }


@pytest.fixture(scope="module")
def measured(trained: dict[str, tuple[Any, RunWatch]]) -> dict[str, Any]:
    return {side: watch.figures(trainer) for side, (trainer, watch) in trained.items()}


def test_a_whole_run_counts_its_first_steps_and_the_mean_of_the_timed_for_the_rest() -> None:
    run = entry("stock", 2.0, warmup_seconds=50.0)  # 1,200 tokens in 12 steps
    run["step_seconds"] = [1.0, 3.0] * 6
    assert Cell([run]).whole == pytest.approx(500 * 100 / (50 + 494 * 2.0))
    assert Cell([entry("stock", 2.0)]).whole == 50


@pytest.mark.slow
def test_sides_train_the_same_tokens_to_the_same_losses(measured: dict[str, Any]) -> None:
    stock, ours = measured["stock"], measured["fastpack"]
    assert stock["timed_tokens"] == ours["timed_tokens"] > 0
    assert stock["warmup_steps"] == ours["warmup_steps"] == 4
    assert list(stock["losses"]) == list(ours["losses"])[:4] == ["2", "4", "6", "8"]  # ours goes on: it is profiled
    for step, loss in stock["losses"].items():
        assert ours["losses"][step] == pytest.approx(loss, rel=1e-3)
    for found in measured.values():
        assert len(found["step_seconds"]) == 4
        assert min(found["step_seconds"]) > 0
        assert found["warmup_seconds"] > found["first_step_seconds"] > 0
    assert ours["report"]["features"]["packed_attention"]["path"] == "per_document"


@pytest.mark.slow
def test_a_profile_has_a_kind_for_nearly_all_time_and_counts_the_products_of_the_model(
    trained: dict[str, tuple[Any, RunWatch]],
) -> None:
    trainer, watch = trained["fastpack"]
    found = profile_of(trainer, watch, "cpu", Device())
    kinds = found["kinds"]
    assert found["classified"] > ENOUGH
    assert {BASE, THIN, ATTENTION, GLUE, HEAD, OPTIMIZER} <= kinds.keys()
    assert EXPERTS not in kinds
    flops = model_flops(trainer.model)
    # Frozen base: no gradients of weights. The thin products are a few per cent of it here.
    needed = flops.count(found["tokens_per_step"], dict.fromkeys(flops.windows, 0.0), 0.0).hardware
    one = Device(flops=1.0, bandwidth=1e30)
    launches = by_kind(launches_of(watch.events, "cpu"), Facts(int(trainer.model.config.vocab_size)))
    run = sum(products_seconds(launches[kind], one) for kind in (BASE, THIN)) / FEW["profiled"]
    assert run == pytest.approx(needed, rel=0.15)
    assert "| kind | small lora 512 |" in row_profile.table(
        {**record_of([]), "settings": {"tflops": 790, "terabytes_per_second": 4.8},
         "rows": [{"row": "small lora 512", "side": "fastpack", **found}]}
    )  # fmt: skip


def record_of(entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "case": "side_by_side",
        "rows": entries,
        "machine": {"device": "cuda", "gpu": "X"},
        "date": "2026-01-01",
        "source": {"commit": "0123456789"},
    }


def entry(side: str, seconds: float, loss: float = 2.0, row: str = "qwen3", **more: Any) -> dict[str, Any]:
    figures = {
        "timed_tokens": 1200, "step_seconds": [seconds] * 12, "losses": {"6": loss}, "profile": {}, "peak_gib": 1.0,
        "warmup_steps": 6,
    }  # fmt: skip
    return {"row": row, "side": side, "round": 0, **figures, **more}


def test_times_are_believed_where_losses_are_stocks_and_where_stock_leaks() -> None:
    entries = [
        entry("stock", 1.0),
        entry("fastpack", 0.5, 2.0 * (1 + LOSS_BUDGET / 2)),
        entry("stock compiled", 0.8, 2.1),
    ]
    entries += [entry("stock", 1.0, row="gpt-oss"), entry("fastpack", 0.25, 3.0, row="gpt-oss")]
    entries.append({"row": "qwen3", "side": "stock + Liger", "round": 0, "failed": "Traceback\nImportError: no Liger"})
    found = cells(record_of(entries))
    assert believed("qwen3", found["qwen3"]["stock"], found["qwen3"]["fastpack"])
    assert not believed("qwen3", found["qwen3"]["stock"], found["qwen3"]["stock compiled"])
    assert (found["qwen3"]["fastpack"].rate, found["qwen3"]["stock"].rate) == (200, 100)
    text = table(record_of(entries))
    assert "| qwen3 | fastpack | 200 | 200 to 200 | 200 | 2.00 | - |" in text
    assert "| qwen3 | stock compiled | 125 | 125 to 125 | 125 | losses differ | losses differ | 5.0e-02 |" in text
    assert "| gpt-oss | fastpack | 400 | 400 to 400 | 400 | 4.00 | - |" in text
    assert "| qwen3 | stock + Liger | ImportError: no Liger |" in text


@pytest.mark.slow
def test_the_file_grows_run_by_run_and_a_failing_side_is_an_entry(
    tmp_path: Path, measured: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def answer(row: Mapping[str, Any], side: str) -> dict[str, Any]:
        asked.append(side)
        return dict(measured[side]) if side in measured else {"failed": "OutOfMemoryError: too large"}

    monkeypatch.setattr(side_by_side, "OwnProcess", lambda *args, **options: answer)
    file = tmp_path / "sides.json"
    for sides in (["stock", "stock compiled"], ["stock", "stock compiled", "fastpack"]):
        assert COMMAND.main([SMALL.name, "--sides", *sides, "--rounds", "1", "--json", str(file)]) == 0
    assert asked == ["stock", "stock compiled", "fastpack"]
    assert "OutOfMemoryError: too large" in table(json.loads(file.read_text()))
    pytest.importorskip("matplotlib")
    COMMAND.main(["--report", str(file), "--plot", str(tmp_path / "sides.png")])
    assert (tmp_path / "sides.png").read_bytes().startswith(b"\x89PNG")
    for wrong in (["smal lora 512"], [SMALL.name, "--sides", "stok"]):
        with pytest.raises(UserError, match="there is no"):
            COMMAND.main(wrong)
    with pytest.raises(UserError, match="give --unsloth PYTHON"):
        COMMAND.main([SMALL.name, "--sides", "unsloth"])


def test_the_first_screen_has_the_rows_that_stock_and_ours_have_run_from_the_newest_record() -> None:
    first, second = FIRST_SCREEN[-1], FIRST_SCREEN[-2]
    times = {"fastpack": 0.5, "fastpack (same memory)": 0.8, "stock compiled": 0.4, "stock": 1.0}
    entries = [entry(side, seconds, row=first) for side, seconds in times.items()] + [entry("stock", 1.0, row=second)]
    record = {**record_of([{**one, "layers": "4 of 36"} for one in entries]), "versions": dict.fromkeys(PACKAGES, "1")}
    text = glance({"sides.json": record})
    named = "| Qwen3-0.6B (4 of its layers) LoRA, rows of 8,192 tokens |"
    assert f"{named} **2.0x** | 0.8x | 1.0 GiB | 1.0 GiB | 1.0 GiB |" in text
    assert work(record, second) not in text
    newer = {
        **record,
        "date": "2026-01-02",
        "rows": [entry("fastpack", 0.1, row=first), entry("stock", 1.0, row=first)],
    }
    assert "LoRA, rows of 8,192 tokens | **10.0x** | - | 1.0 GiB | - | 1.0 GiB |" in glance(
        {"a.json": newer, "b.json": record}
    )
    differs = [entry("stock", 1.0, row=first), entry("fastpack", 0.5, 3.0, row=first)]
    assert glance({"sides.json": {**record, "rows": differs}}) == "Open."
    below = {"fastpack (same memory)": "0.50", "fastpack": "0.80"}
    assert slower(record) == [
        f"| {first} (4 of 36 layers), X | stock compiled | {side} | {ratio} | slower |" for side, ratio in below.items()
    ]
    assert list(cells(record)[first]) == ["stock", "stock compiled", "fastpack (same memory)", "fastpack"]


UNSLOTH = """
class FastLanguageModel:
    @staticmethod
    def from_pretrained(model_name, max_seq_length, dtype, load_in_4bit, full_finetuning):
        from transformers import AutoModelForCausalLM, AutoTokenizer

        assert not load_in_4bit and not full_finetuning
        return AutoModelForCausalLM.from_pretrained(model_name, dtype=dtype), AutoTokenizer.from_pretrained(model_name)

    @staticmethod
    def get_peft_model(model, use_gradient_checkpointing, random_state, max_seq_length, **config):
        from peft import LoraConfig, get_peft_model

        return get_peft_model(model, LoraConfig(**config))
"""
"""A stand-in for the public functions of Unsloth's README, around transformers and PEFT: it needs a GPU itself."""


def test_an_environment_of_its_own_trains_the_same_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "unsloth.py").write_text(UNSLOTH)
    monkeypatch.setitem(ROWS, "tiny", Row("tiny-qwen3", 128, "lora"))
    unsloth_run.write_folder({"row": "tiny"}, "unsloth", folder=str(tmp_path), seed=0, logged=2)
    found = unsloth_run.train({"row": "tiny"}, "unsloth", folder=str(tmp_path), watched=FEW)
    assert len(found["step_seconds"]) == 4
    assert found["timed_tokens"] > 4 * 100
    assert list(found["losses"]) == ["2", "4", "6", "8"]
    failed = unsloth_run.run({"row": "tiny-gpt-oss experts 256"}, 0, FEW, "python", 1.0)
    assert failed == {"failed": "no experts here: it trains lora, nf4, full"}
