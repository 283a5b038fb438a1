"""README's table and figure and RESULTS.md say what the records say, and claim nothing beyond."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import figure, first_pages, results_page, tables
from benchmarks import records as kept
from benchmarks.cases import CASES
from benchmarks.records import REFERENCE, RESULTS, add, newest, read, tree_now
from benchmarks.sides import Side, sides_of
from benchmarks.tables import FIGURE, MARKS, ROOT
from fastpack_trl.errors import UserError

KEYS = {"case", "row", "side", "round", "steps", "seconds", "tokens", "peak_gib", "report", "command", "commit", "tree",
        "versions", "machine", "date"}  # fmt: skip


def run_of(side: str, seconds: float = 1.0, **more: Any) -> dict[str, Any]:
    return {
        "case": "sft", "row": "qwen3-8b lora 4096", "side": side, "round": 0, "run": 500, "steps": 4,
        "warmup": {"steps": 12, "first": 3.0, "seconds": 20.0}, "losses": {"1": 2.0, "2": 1.9},
        "seconds": [seconds] * 4, "tokens": 4 * 4096, "peak_gib": 10.0, "report": None, "date": "2026-01-01",
        "command": "python -m benchmarks run", "commit": "0123456789", "tree": "aa", "layers": "36 of 36",
        "versions": dict.fromkeys(("torch", "transformers", "trl", "peft"), "1"),
        "machine": {"device": "cuda", "gpu": "X", "threads": 1}, **more,
    }  # fmt: skip


def test_the_pages_are_what_the_records_say() -> None:
    records = read()
    for file, text in tables.pages(records).items():
        assert file.read_text(encoding="utf-8") == text, "run: python -m benchmarks tables"
    assert figure.drawn_from(records) in FIGURE.read_text(encoding="utf-8"), "run: python -m benchmarks tables"


def test_the_page_of_the_three_optimizations_has_the_figures_of_their_records() -> None:
    page = (ROOT / "docs/optimizations.md").read_text(encoding="utf-8")
    for case in ("metadata", "reload", "routing"):
        for row, sides in sides_of(run for run in read() if run["case"] == case).items():
            off = sides[CASES[case].over[0]]
            on = sides[{"metadata": "metadata once", "reload": "fastpack two buffers", "routing": "one sort"}[case]]
            assert f"| {row} | {off.step * 1e3:,.1f} | {on.step * 1e3:,.1f} | {on.times(off):.2f} |" in page


def test_every_record_says_what_measured_it_and_is_the_newest_of_its_row() -> None:
    records = read()
    assert newest(records) == records
    for run in records:
        assert run.keys() >= KEYS, run["row"]
        assert run["case"] in CASES
        assert run["command"].startswith("python -m benchmarks")
        assert len(run["seconds"]) * run.get("window", 1) == run["steps"] or "span" in run or run.get("largest") == 0
        assert re.fullmatch(r"[0-9a-f]{12}", run["commit"])
        assert "/" not in str(run["machine"].values()), "no folder, no name of a host"
    assert {run["case"] for run in records} == {file.stem for file in RESULTS.glob("*.jsonl")}


def test_every_record_is_of_a_commit_in_the_history() -> None:
    git = ["git", "-C", str(ROOT)]
    if not (ROOT / ".git").exists() or (ROOT / ".git" / "shallow").exists():
        pytest.skip("no checkout with its history")
    for commit in {run["commit"] for run in read()}:
        assert subprocess.run([*git, "merge-base", "--is-ancestor", commit, "HEAD"]).returncode == 0, commit


def test_a_whole_run_has_its_measured_steps_and_the_less_favourable_figure_for_the_rest() -> None:
    side = Side([run_of("trl", 2.0)])
    assert (side.whole, Side([run_of("trl", 2.0, warmup={})]).whole) == ((20.0 + (500 - 12) * 2.0) / 500, 2.0)
    seconds = {"seconds": [1.0, 1.0, 1.0, 5.0], "window": 1}
    assert Side([run_of("trl") | seconds]).whole == (20.0 + 8.0 + (500 - 16) * 1.0) / 500
    assert Side([run_of("fastpack") | seconds]).whole == (20.0 + 8.0 + (500 - 16) * 2.0) / 500
    ours = Side([run_of("fastpack", 0.5), run_of("fastpack", 0.7, round=1)])
    assert (ours.step, ours.times(side)) == pytest.approx((0.6, 2.0 / 0.6))
    half = Side([run_of("fastpack", 0.5, tokens=2 * 4096)])
    assert half.times(side) == pytest.approx(2.0), "half of the tokens in a quarter of the time"


def test_no_speed_is_shown_if_losses_differ_early_unless_documents_leak() -> None:
    def pair(wrong: dict[str, float], losses: dict[str, float], **more: Any) -> list[dict[str, Any]]:
        return [run_of("trl", losses=losses, **more), run_of("fastpack", 0.5, losses=wrong, **more)]

    wrong = pair({"1": 2.0, "2": 2.5}, {"1": 2.0, "2": 1.9})
    assert "2.00" not in results_page.table("sft", wrong)
    assert all("losses differ" in text for text in (results_page.table("sft", wrong), first_pages.readme(wrong)))
    assert "| 2.00 |" in results_page.table("sft", pair({"1": 2.0, "30": 1.0}, {"1": 2.0, "30": 9.0}))
    assert "| 2.00 |" in results_page.table("sft", pair({"1": 2.5}, {"1": 2.0}, row="gpt-oss-20b experts 4096"))
    compiled = run_of("trl compiled", 0.8, losses={"1": 2.0, "2": 1.8})
    near = [*pair({"1": 2.0, "2": 1.903}, {"1": 2.0, "2": 1.9}), compiled]
    assert "losses differ" not in results_page.table("sft", near), "nearer to TRL than its own compiled layers"
    assert results_page.table("sft", [*wrong, compiled]).count("losses differ") == 2, "to both: 2e-3 at most"
    assert "losses differ" in results_page.table("sft", pair({"1": 2.0, "2": float("nan")}, {"1": 2.0, "2": 1.9}))
    later = [*near, run_of("fastpack", 0.5, losses={"1": 2.5}, round=1)]
    assert "losses differ" in results_page.table("sft", later), "in any round"
    full = [
        run | {"case": "images", "row": "images gemma3-4b full 4"} for run in pair({"1": 2.0, "2": 1.909}, {"2": 1.9})
    ]
    assert "losses differ" not in results_page.table("images", full), "rounding moves all weights: 5e-3"
    assert "losses differ" in results_page.table("images", [run | {"row": "images gemma3-4b lora 4"} for run in full])
    assert "losses differ" in results_page.table("images", [*full, full[1] | {"losses": {"2": 1.912}, "round": 1}])
    norms = [run_of(s, case="preference", grad_norms={"1": norm}) for s, norm in (("trl", 1.0), ("fastpack", 1.1))]
    assert "losses differ" in results_page.table("preference", norms), "their losses hardly depend on the model"
    more = [run_of("fastpack same memory", losses={"1": 3.0}), run_of("trl flash-attn-4")]
    assert first_pages.readme([*near, *more]).count("losses differ") == 1, "in its cell"
    assert "Measured on one X for 16 or more steps" in first_pages.readme([*near, *more])
    assert "Against tuned TRL, Qwen3-8B LoRA gains 1.9x (FlashAttention-4), " in first_pages.readme([*near, *more])


def test_with_losses_in_float32_ours_may_be_twice_as_far_from_them_as_those_of_trl() -> None:
    exact = run_of(REFERENCE, 2.0, losses={"1": 2.0, "2": 1.9})
    trl = run_of("trl", losses={"1": 2.0, "2": 1.92})
    near, far = (run_of("fastpack", 0.5, losses={"1": 2.0, "2": loss}) for loss in (1.87, 1.85))
    assert "losses differ" in results_page.table("sft", [trl, near])
    assert "losses differ" in results_page.table("sft", [trl, exact, far])
    head, _, *lines = results_page.table("sft", [trl, exact, near]).splitlines()
    columns = [dict(zip(head.split(" | "), line.split(" | "), strict=True)) for line in lines]
    assert [column["from float32"] for column in columns] == ["1.1e-02", "-", "1.6e-02"]
    assert [column["times trl"] for column in columns] == ["-", "-", "2.00"], "float32 is not timed"
    assert [*results_page.little([trl, exact, near])] == []
    assert "for 16 or more" in first_pages.readme(
        [trl, exact | {"steps": 1, "machine": {"device": "cuda", "gpu": "Y"}}, near]
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"losses": {"1": 2.0, "2": float("nan")}}, {"losses": {}}, {"losses": {"30": 1.9}}, {"seed": 1}, {"tree": "bb"},
        {"losses": {"1": 9.0, "2": 9.0}}, {"losses": {"1": 2.0, "2": 1.55}}, {"versions": {}},
    ],
)  # fmt: skip
def test_losses_in_float32_of_another_training_do_not_decide(wrong: dict[str, Any]) -> None:
    far = run_of("fastpack", 0.5, losses={"1": 2.0, "2": 1.2})
    assert "losses differ" in results_page.table("sft", [run_of("trl"), run_of(REFERENCE) | wrong, far])
    near = run_of("fastpack", 0.5)
    assert "| 2.00 |" in results_page.table("sft", [run_of("trl"), run_of(REFERENCE) | wrong, near])


def test_beside_losses_in_float32_those_of_fastpack_must_be_there_and_numbers() -> None:
    for losses in ({"1": float("nan")}, {}, {"30": 1.9}):
        runs = [run_of("trl"), run_of(REFERENCE), run_of("fastpack", 0.5, losses=losses)]
        assert "losses differ" in results_page.table("sft", runs)


def test_what_was_not_measured_or_failed_is_not_shown() -> None:
    assert (first_pages.readme([]), "##" in results_page.page([])) == ("Nothing is measured.", False)
    assert (
        "12,473 (H100, Llama 3 8B) | 2 x 4,096 full rows, mock data | 8,192 (qwen3-8b lora 4096, X) |"
        in results_page.page([run_of("trl"), run_of("fastpack", 0.5)])
    ), "others' figures beside ours"
    text = results_page.table("sft", [run_of("fastpack", peak_gib=None), run_of("trl", peak_gib=None)])
    assert [line.split(" | ")[1] for line in text.splitlines()[2:]] == ["trl", "fastpack"], "in one order"
    assert "peak" not in text
    none = run_of("trl", case="memory_caps") | {"seconds": [], "largest": 0}
    assert "| trl | no row fits |" in results_page.table("memory_caps", [none, run_of("fastpack", case="memory_caps")])
    assert [*results_page.little([none, run_of("fastpack", case="memory_caps")])] == []
    assert sides_of([{key: value for key, value in run_of("trl").items() if key != "seconds"}]) == {}
    with pytest.raises(ValueError, match="the page has no"):
        tables.between("no marks", MARKS, "")


def test_rows_that_gain_little_are_listed() -> None:
    runs = [run_of("trl"), run_of("trl compiled", 0.62), run_of("fastpack", 0.6), run_of("fastpack same memory", 1.1)]
    listed = [(side, other) for _, _, side, other, _ in results_page.little(runs)]
    same = ("fastpack same memory", "trl")
    assert listed == [("fastpack", "trl compiled"), same, (same[0], "trl compiled")]
    assert [*results_page.little([run_of("trl"), run_of("fastpack", 0.9)])] == []
    slow_start = {"warmup": {"steps": 12, "first": 3.0, "seconds": 100.0}}
    assert [*results_page.little([run_of("trl"), run_of("fastpack", 0.9, **slow_start)])], "whole runs count too"


def test_a_new_record_replaces_those_of_its_row_and_device(tmp_path: Path) -> None:
    old = [run_of("trl"), run_of("trl compiled"), run_of("trl", row="other"), run_of("trl", row="cap", cap_gib=8.0)]
    add([*old, *old], tmp_path)
    on_cpu = run_of("trl", date="2026-01-03", machine={"device": "cpu", "threads": 1})
    failed = {key: value for key, value in run_of("fastpack", date="2026-01-02").items() if key != "seconds"}
    capped = run_of("fastpack", row="cap", cap_gib=8.0, date="2026-01-02")
    add([run_of("trl", 0.9, date="2026-01-02"), failed | {"failed": "out of memory"}, on_cpu, capped], tmp_path)
    assert [(run["row"][:5], run["side"][:4], run["date"][-1]) for run in read(tmp_path / "sft.jsonl")] == [
        ("other", "trl", "1"), ("cap", "trl", "1"), ("qwen3", "trl", "2"), ("qwen3", "trl", "3"), ("cap", "fast", "2"),
    ]  # fmt: skip
    exact = run_of(REFERENCE, row="cap", date="2026-01-01")
    add([exact], tmp_path)
    assert exact in read(tmp_path / "sft.jsonl"), "losses in float32 may be of an older command"
    reports = [{"lora": "on"}, {"lora": "on"}, {"lora": "off"}]
    add([run_of("fastpack", round=n, report=one, case="micro") for n, one in enumerate(reports)], tmp_path)
    add([run_of("trl", 1 / 3, row="other", case="micro")], tmp_path)
    kept = read(tmp_path / "micro.jsonl")
    assert [run["report"] for run in kept[:3]] == [reports[0], None, reports[2]], "a repeated one is left out"
    assert kept[3]["seconds"][0] == 0.3333333, "with seven digits"
    (tmp_path / "bad.jsonl").write_text("{")
    with pytest.raises(UserError, match="cannot read the records"):
        read(tmp_path / "bad.jsonl")


def test_a_hash_marks_code(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "docs/figures").mkdir(parents=True)
    (tmp_path / "benchmarks").mkdir()
    for name in ("README.md", "docs/index.md", "docs/images.md", "benchmarks/RESULTS.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(kept, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "FIGURE", tmp_path / "docs/figures/readme.svg")
    runs = [run_of("trl"), run_of("fastpack", 0.5), run_of("trl", row="other", tree=tree_now())]
    (tmp_path / "sft.jsonl").write_text("".join(f"{json.dumps(run)}\n" for run in runs))
    assert tables.main([]) == 0
    assert "1 of 2 rows were measured on other code of the package" in capsys.readouterr().out
    assert "| Qwen3-8B LoRA | **1.9x** |" in (tmp_path / "README.md").read_text()
    assert "## SFT, X" in (tmp_path / "benchmarks/RESULTS.md").read_text()
