"""``python -m benchmarks run`` in miniature, on the CPU: each case trains, and its sides have the same losses."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from benchmarks import images, models, rows, run, scaling, several_gpus
from benchmarks.__main__ import COMMANDS, main
from benchmarks.cases import CASES, README_ROWS
from benchmarks.images import IMAGE_MODELS
from benchmarks.models import MODELS, build_model
from benchmarks.results_page import PUBLISHED
from benchmarks.rows import ROWS
from benchmarks.run import SIDES, Windows, train, watch_of
from fastpack_trl import FastSFTConfig

TINY = {
    "tiny-qwen3 full 256": ("trl", "fastpack", "fastpack same memory"),
    "tiny-gpt-oss nf4-experts 256": ("fastpack", "fastpack same memory"),
    "tiny-gpt-oss experts 256": ("fastpack", "fastpack eager"),  # under TRL its documents see each other
    "hybrid tiny": ("trl", "fastpack"),
    "prefix tiny": ("trl", "fastpack", "fastpack whole documents"),
    "dpo tiny-qwen3 8": ("trl", "fastpack"),
    "grpo tiny-qwen3 8": ("trl", "fastpack"),
    "metadata tiny-qwen3 full 256": ("metadata per layer", "metadata once", "packed kernel"),
    "images tiny-qwen2.5-vl lora 4": ("trl", "fastpack"),
    "routing tiny-gpt-oss frozen 64": ("expert by expert", "one sort"),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", TINY)
def test_sides_of_a_row_train_the_same_rows_to_the_same_losses(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"COMPLETIONS": (8, 12), "GROUP": 4, "MICRO_BATCHES": 2}.items():
        monkeypatch.setattr(rows, name, value)
    monkeypatch.setitem(ROWS, row, replace(ROWS[row], prompts=(10, 40)))
    found = [train({"row": row}, side, seed=0, steps=2, threads=1, profiled=0) for side in TINY[row]]
    for one in found:
        assert len(one["seconds"]) == one["steps"] == 2
        assert one["warmup"]["seconds"] >= one["warmup"]["first"] > 0
        assert one["tokens"] == found[0]["tokens"]
        name = "grad_norms" if row.startswith("grpo") else "losses"  # of a learner alone losses are near 0
        assert one[name] == pytest.approx(found[0][name], rel=1e-3 if name == "grad_norms" else 1e-4, abs=1e-6)


def test_on_images_all_sides_time_the_same_documents_after_warm_ups_of_other_lengths(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    row, data = ROWS["images gemma3-4b full 4"], Dataset.from_dict({"number": range(300)})
    sides = {ours: run.documents_of(data, row, ours)["number"][:] for ours in (True, False)}
    warmups = {ours: 4 * watch_of(row, 8, ours).warmup for ours in (True, False)}
    assert warmups == {True: 160, False: 32}
    assert sides[True][:32] == sides[False][:32]
    timed = {ours: sides[ours][warmups[ours] :] for ours in (True, False)}
    assert timed[True] == timed[False]
    assert timed[True][:60] == [*range(160, 220)]


def test_images_of_gemma_reach_the_loss_and_the_loss_reaches_the_tower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "EXAMPLES", 2)
    shape = IMAGE_MODELS["gemma3-4b"]
    thin = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    text = shape.text | thin | {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 9000}
    small = replace(
        shape, text=text, tower=shape.tower | thin | {"image_size": 56},
        more=shape.more | {"mm_tokens_per_image": 4}, pixels=56,
    )  # fmt: skip
    monkeypatch.setitem(IMAGE_MODELS, "gemma3-4b", small)
    found = images.image_material("gemma3-4b", "full", 20, "cpu", seed=0)
    example = found["train_dataset"][1]
    batch = found["processing_class"](text=example["prompt"], images=example["images"], return_tensors="pt")
    found["model"](**batch, labels=batch["input_ids"]).loss.backward()
    assert found["model"].model.vision_tower.embeddings.patch_embedding.weight.grad.abs().max() > 1e-9


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
def test_speed_per_gpu_is_that_of_one_gpu_over_that_of_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert scaling.counts_up_to(6) == [1, 2, 4, 6]
    words = ["--gpus", "2", "--rows", "ddp tiny-qwen3 full 256", "--sides", "fastpack", "--steps", "2"]
    assert several_gpus.main([*words, "--threads", "1", "--json", str(tmp_path / "runs.jsonl")]) == 0
    records = [json.loads(line) for line in (tmp_path / "runs.jsonl").read_text().splitlines()]
    assert [(record["processes"], len(record["seconds"])) for record in records] == [(1, 2), (1, 2), (2, 2)]
    _, one, two = (line.split(" | ") for line in capsys.readouterr().out.splitlines()[-3:])
    assert (one[2], one[4], one[6], two[2]) == ("1", "100%", "100%", "2")
    assert float(two[4][:-1]) == pytest.approx(100 * float(one[3]) / float(two[3]), abs=1)
    assert float(two[6][:-1]) == pytest.approx(50 * float(one[5]) / float(two[5]), abs=1)


@pytest.mark.slow
def test_a_whole_run_is_all_timed_and_its_kernels_are_listed(tmp_path: Path) -> None:
    found = train({"row": "start tiny-qwen3 full 256, 20 steps"}, "fastpack", seed=0, steps=0, threads=1)
    assert (found["run"], found["warmup"]["steps"], found["steps"]) == (20, 10, 10)
    listed = tmp_path / "kernels.txt"
    train({"row": "tiny-qwen3 full 256", "tokens": 128}, "trl", seed=0, steps=1, threads=1, profile=str(listed))
    assert "aten::" in listed.read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("least", "windows"), [(0.0, 2), (1e9, 4)])
def test_steps_between_logs_are_timed_at_once(least: float, windows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = list[int]()
    monkeypatch.setattr(run, "LEAST_SECONDS", least)
    monkeypatch.setattr(Windows, "_synchronize", lambda watch: waits.append(len(watch.result.losses)))
    monkeypatch.setattr(run, "watch_of", lambda _row, _steps, _ours: Windows(warmup=2, timed=2, window=3, most=4))
    found = train({"row": "tiny-qwen3 full 256"}, "fastpack", seed=0, steps=6, threads=1, profiled=0)
    assert (len(found["seconds"]), found["steps"], [*found["losses"]]) == (windows, 3 * windows, ["1", "2"])
    assert found["tokens"] == pytest.approx(3 * windows * 256, rel=0.05)
    assert waits == [0, *range(2 + windows)], "at the start and after each logged step"


@pytest.mark.parametrize(("steps", "window", "warmup"), [(60, 10, 24), (24, 6, 24), (2, 1, 6)])
def test_windows_on_a_gpu(steps: int, window: int, warmup: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    watch = run.watch_of(ROWS["qwen3-8b lora 4096"], steps)
    assert (watch.window, watch.timed, watch.warmup) == (window, steps // window, warmup)
    assert (watch.most > watch.timed) == (window > 1), "more where steps are fast"
    assert run.watch_of(ROWS["ddp qwen3-8b lora 4096"], steps).most == 0, "each rank would choose for itself"


def test_texts_of_a_command_are_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [*islice(models.definitions(), 40)]
    monkeypatch.setattr(models, "definitions", lambda: iter(few))
    monkeypatch.setenv(models.TEXTS, str(tmp_path))
    made, texts = models.source_text.__wrapped__(500, 400, 64)
    monkeypatch.delattr(models, "_encoded")
    read, same = models.source_text.__wrapped__(500, 400, 64)
    assert same["input_ids"] == texts["input_ids"]
    assert read("def f(x):")["input_ids"] == made("def f(x):")["input_ids"]
    assert read.pad_token_id == made.pad_token_id == models.PAD


@pytest.mark.slow
def test_a_run_resumes_with_the_losses_of_one_that_went_through_and_its_checkpoint_loads(tmp_path: Path) -> None:
    row = {"model": "tiny-qwen3", "tokens": 64, "layers": None, "engine": "ddp"}
    found = several_gpus.check(row, "fastpack", folder=str(tmp_path), sharded=False, seed=0)
    assert found.keys() == {"losses", "loaded"}
    assert max(found.values()) <= several_gpus.BUDGETS["ddp"]


def test_rounds_alternate_failures_are_said_and_the_same_command_goes_on_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = "ddp tiny-qwen3 full 256"
    ran, good = list[tuple[str, str]](), {"steps": 1, "seconds": [1.0], "peak_gib": None}
    answers = dict.fromkeys(("trl", "fastpack warm caches"), good)
    answers["fastpack"] = {"failed": "OutOfMemoryError: too large", "last_lines": ["a line"]}

    def launcher(_row: Any, _side: str, args: Any, caches: str, **_options: Any) -> Any:
        assert args.processes == 2
        return lambda row, side: ran.append((side, caches)) or answers[side]

    monkeypatch.setattr(run, "launcher", launcher)
    file, sides = tmp_path / "runs.jsonl", ["trl", "fastpack", "fastpack warm caches"]
    words = ["run", "--rows", row, "--launcher", "accelerate", "--sides", *sides, "--json", str(file)]
    assert main(words) == 1
    assert f"{row}, fastpack: failed: OutOfMemoryError: too large a line" in capsys.readouterr().err
    assert [side for side, _ in ran] == [*sides, *sides[::-1]]
    folders = [caches for _, caches in ran]
    assert folders[0] != folders[1] == folders[2], "filled caches are those of the run before"
    first = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["round"] for record in first] == [0, 0, 0, 1, 1, 1]
    assert {(record["case"], record["processes"]) for record in first} == {("several_gpus", 2)}
    ran.clear()
    assert main(words) == 1
    assert [side for side, _ in ran] == ["fastpack"] * 2, "those that failed"
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert len({run.get("begun", run["date"]) for run in records}) == len({run["tree"] for run in records}) == 1
    file.write_text(file.read_text().replace(first[0]["tree"], "0" * 12))
    ran.clear()
    assert main(words) == 1
    assert len(ran) == 6, "of other code"
    file.write_text(file.read_text().replace('"threads":', '"threads":1'))
    with pytest.raises(run.UserError, match="another machine"):
        [*run.measure(run.parse(words[1:]))]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("nosuch", "command 'nosuch' is unknown"),
        ("run", "the following arguments are required: --rows"),
        ("run --rows qwen3-8b-lora", "row 'qwen3-8b-lora' is unknown"),
        ("run --rows tiny-qwen3 --sides stok", "side 'stok' is unknown"),
        ("run --rows tiny-qwen3 --launcher accelerate", "--launcher accelerate does not fit 'tiny-qwen3 full 256'"),
        ("run --rows fsdp2", "--launcher process does not fit 'fsdp2"),
        ("run --rows qwen3-8b --sides trl_float32", "side 'trl float32' does not fit 'qwen3-8b lora 4096'"),
        ("run --rows tiny-qwen3 --json /nosuch/x.jsonl", "the folder '/nosuch' does not exist"),
        ("micro --rows nosuch", "row 'nosuch' is unknown"),
        ("memory_caps --models nosuch", "model 'nosuch' is unknown"),
        ("several_gpus --model tiny-qwen3 --layers 9", "layers=9: this model has 1 to 3"),
        ("several_gpus --engine fsdp2", "fsdp2 needs CUDA devices"),
        ("tables --add /nosuch.jsonl", "cannot read the records"),
    ],
)
def test_what_is_wrong_is_one_line(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word.replace("_float32", " float32") for word in words.split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"python -m benchmarks {words.split()[0]}: error: ")
    assert says in line


def test_every_row_has_a_model_fields_sides_and_a_table() -> None:
    others = json.loads(PUBLISHED.read_text(encoding="utf-8"))["figures"]
    assert README_ROWS.keys() | {one["row"] for one in others} <= ROWS.keys()
    for name, row in ROWS.items():
        assert (set(row.sides) <= SIDES.keys(), row.case in CASES) == (True, True), name
        if row.model in IMAGE_MODELS:
            continue
        shape = MODELS[row.model].cut_to(row.layers)
        assert row.arguments("cpu")["max_steps"] >= 20, name
        assert row.depth.split(" of ")[0] == str(shape.layers)
    for shape in MODELS.values():
        assert build_model(shape.cut_to(1), positions=32, seed=0, device="meta").config.num_hidden_layers == 1


def test_sides_that_are_ours_have_fields_of_ours() -> None:
    assert {name for name, side in SIDES.items() if side.ours} == {n for n in SIDES if n.startswith("fastpack")}
    for side in filter(lambda side: side.ours, SIDES.values()):
        FastSFTConfig(output_dir="out", use_cpu=True, bf16=False, **side.fields)
    with pytest.raises((ImportError, ValueError), match=r"(?i)flash.?attention.?4"):
        train({"row": "tiny-qwen3 full 256"}, "trl flash-attn-4", seed=0, steps=1, threads=1)


def test_the_package_stands_alone_and_the_benchmarks_list_their_commands(capsys: pytest.CaptureFixture[str]) -> None:
    files = [path for path in (Path(run.__file__).parents[1] / "fastpack_trl").rglob("*") if path.is_file()]
    assert not [path for path in files if path.suffix in (".json", ".jsonl", ".png", ".csv")], "no results"
    texts = {path: path.read_text(encoding="utf-8") for path in files if path.suffix == ".py"}
    assert not [path for path, text in texts.items() if re.search(r"^\s*(from|import) benchmarks\b", text, re.M)]
    assert main(["--help"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]] == [*COMMANDS]
