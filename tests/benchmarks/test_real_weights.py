"""`real_weights` trains every side alike, goes on where it ended, and its pages say what the records say."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from benchmarks import accuracy
from benchmarks.__main__ import main
from benchmarks.accuracy import AGAIN, FLOAT32, SDPA, Training, interval
from benchmarks.models import build_model, shape_of, word_tokenizer
from benchmarks.real_weights import KNOWN, TASKS, prefix_reward, train_seeds
from benchmarks.records import read, tree_now
from benchmarks.run import SIDES

ABOUT: dict[str, Any] = {
    "command": "python -m benchmarks real_weights run", "commit": "0123456789", "tree": tree_now(),
    "versions": dict.fromkeys(("torch", "transformers", "trl", "peft"), "1"), "machine": {"threads": 1},
}  # fmt: skip
OPTIONS: dict[str, Any] = {"threads": 1, "share": 1.0, "until": math.inf, "about": ABOUT}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("tiny")
    build_model(shape_of("tiny-qwen3"), positions=1024, seed=0, device="cpu").save_pretrained(found)
    word_tokenizer(512).save_pretrained(found)
    pairs = [
        {"prompt": f"t{index} t{index % 7 + 2}", "completion": f" t{index // 7 + 2}", "name": f"t{index // 7 + 2}"}
        for index in range(4, 500)
    ]
    texts = {"train": pairs[8:], "held": pairs[:4], "unseen": pairs[4:8]}
    (found / "names.json").write_text(json.dumps(texts))
    return found


@pytest.fixture(scope="module")
def records(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    file = tmp_path_factory.mktemp("records") / "mine.jsonl"
    options: dict[str, Any] = {"data": str(folder), "json_file": str(file), "steps": 2, **OPTIONS}
    train = partial(train_seeds, {"task": "names", "mode": "lora"}, **options)
    train("trl", seeds=[0, 1])
    train("fastpack", seeds=[0, 1])
    train(AGAIN, seeds=[0])
    train(FLOAT32, seeds=[0])
    return read(file)


def test_sides_train_alike_from_the_same_weights(records: list[dict[str, Any]]) -> None:
    assert [run["side"] for run in records] == ["trl", "trl", "fastpack", "fastpack", AGAIN, FLOAT32]
    for trl, ours in zip((records[0], records[1], records[0], records[0]), records[2:], strict=True):
        assert len(trl["losses"]) == len(trl["grad_norms"]) == 2
        for key in ("losses", "grad_norms"):
            assert ours[key] == pytest.approx(trl[key], rel=1e-3)
        assert ours["after"]["loss"] == pytest.approx(trl["after"]["loss"], rel=1e-3)
    assert records[0]["losses"] != records[1]["losses"], "another order"
    assert records[0]["after"]["loss"] < records[0]["before"]["loss"]


def test_the_list_names_what_has_no_record(
    records: list[dict[str, Any]], folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(f"{json.dumps(run)}\n" for run in records))
    words = ["run", "--data", str(folder), "--json", str(file), "--tasks", "names", "--modes", "lora", "--list"]
    assert main(["real_weights", *words, "--seeds", "3", "--steps", "2"]) == 0
    listed = capsys.readouterr().out
    assert "names lora, fastpack: seeds [2]" in listed
    assert AGAIN not in listed
    assert "11 runs are left" in listed, "one of TRL and ours, three of three other sides"
    assert main(["real_weights", *words, "--sides", "trl", FLOAT32]) == 0
    assert "10 runs are left" in capsys.readouterr().out, "shorter runs are no whole ones, float32 runs if asked for"


def test_the_pages_are_rendered_from_the_records(records: list[dict[str, Any]], tmp_path: Path) -> None:
    for _ in range(2):
        accuracy.add(records, tmp_path / "kept" / "records.jsonl")
    kept = read(tmp_path / "kept" / "records.jsonl")
    assert kept == records
    accuracy.draw(kept, tmp_path / "figure.svg")
    accuracy.draw_curves(kept, tmp_path / "figure.png")
    assert accuracy.page(kept).startswith("**No single training differs significantly from TRL's**: 0 of 0")
    details = accuracy.details(kept)
    assert f"| country names, LoRA | base |  |  | {records[0]['before']['loss']:.4g} |" in details
    assert "(median) and, in 2 of 2 pairs, at most 0." in " ".join(details.split())
    assert "TRL again" in details


def test_the_kept_pages_are_what_the_kept_records_say() -> None:
    kept = read(accuracy.RECORDS)
    for file, text in accuracy.pages(kept).items():
        assert file.read_text(encoding="utf-8") == text, "run: python -m benchmarks real_weights tables"
    with Image.open(accuracy.CURVES) as picture:
        assert picture.text["Description"] == accuracy.drawn_from(kept)  # type: ignore[attr-defined]
    assert accuracy.drawn_from(kept) in accuracy.FIGURE.read_text(encoding="utf-8")


def test_every_side_is_one_of_the_benchmarks() -> None:
    assert {*KNOWN} - {AGAIN, FLOAT32} <= SIDES.keys()
    assert {*KNOWN} <= accuracy.SIDES.keys()


def test_the_interval_is_students() -> None:
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2.0, 4.303 / math.sqrt(3)), rel=1e-4)
    assert interval([0.1, -0.1, 0.05, 0.0, 0.05]) == pytest.approx((0.02, 2.776 * 0.0758288 / math.sqrt(5)), rel=1e-4)
    versions = dict.fromkeys(("torch", "transformers", "trl", "peft"), "1")
    same: dict[str, Any] = {"row": "names lora", "date": "", "tree": "1", "versions": versions, "grad_norms": [1.0]}
    same |= {"command": "", "commit": ""}
    runs = [{**same, "machine": {}, "side": side, "seed": seed, "after": {"loss": loss}, "losses": [2.0, loss]}
            for side, losses in {"trl": (1.0, 2.0, 3.0), "fastpack": (1.1, 2.0, 3.2)}.items()
            for seed, loss in enumerate(losses)]  # fmt: skip
    assert Training(runs).compared("fastpack", "loss") == pytest.approx((0.1, 0.2484), rel=1e-3)
    assert Training(runs).apart("fastpack") == pytest.approx((0.0, 0.0, 0.1, 0.1 / 6 + 0.2 / 18), rel=1e-3)
    ((*line, _, _, _),) = accuracy.verdict({"names lora": Training(runs)})
    assert line == ["fastpack", "0 of 1", "0.1", "0.3484", "-0.14843 to +0.34843"]
    for run in runs:
        run |= {"row": "code lora", "before": {"loss": 4.0}, "report": None, "limit": 15}
        loss = 2 + 0.1 * run["seed"] + (run["side"] == "fastpack") * (0.1 + 0.01 * run["seed"])
        run["after"] = {"loss": loss, "float32": 1.0}
    exact = [{**run, "side": FLOAT32, "after": {"loss": run["after"]["loss"] - 0.2, "float32": 1}} for run in runs[:3]]
    again = [{**run, "date": "2", "grad_norms": [2.0 + (run["side"] == "trl")]} for run in runs]
    sdpa = [{**run, "side": SDPA} for run in runs[:3]]
    for said in ("15 steps, losses are 1", "in float32 | +0.28516", "TRL in float32 1.", "as logged"):
        assert said in " ".join(accuracy.details([*runs, *exact, *again, *sdpa]).split())
    assert "logged" not in accuracy.details([*runs, *({**run, "losses": [2.1, *run["losses"][1:]]} for run in sdpa)])
    page = " ".join(accuracy.page([*runs, *sdpa]).split())
    assert " is 5.24% higher" in page
    assert page.startswith("**These differ from TRL's: source code, LoRA, held-out loss**: 1 of 1 intervals")
    runs = [run | {"row": "names lora"} for run in runs]
    assert not accuracy.trainings([*runs[:3], other := {**runs[3], "machine": {"gpu": "other"}}]), "not one machine"
    assert len(accuracy.trainings([other, *runs])["names lora"].pairs("fastpack")) == 3


def test_a_reward_is_the_share_of_the_name() -> None:
    assert prefix_reward([" Allema", "x", "Allemagne et"], name=["Allemagne"] * 3) == pytest.approx([6 / 9, 0, 1])


@pytest.mark.slow
@pytest.mark.parametrize("task", ["dpo", "grpo"])
def test_other_trainers_and_micro_batches_run(folder: Path, task: str) -> None:
    options: dict[str, Any] = {"data": str(folder), "json_file": None, "steps": 1, **OPTIONS}
    row = {"task": task, "mode": "lora"}
    found = [train_seeds(row, side, seeds=[0], **options)["records"][0] for side in TASKS[task].sides]
    assert found[0]["losses"] == pytest.approx(found[1]["losses"], rel=1e-3, abs=1e-5)
    if task == "dpo":
        assert found[0]["losses"][0] == pytest.approx(math.log(2), abs=1e-4)
