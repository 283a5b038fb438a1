"""``fastpack-trl bench --config``: a YAML of the user's own, its options, one-line errors and records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sft_material import Material

from fastpack_trl.bench import ablation, command
from fastpack_trl.bench.ablation import ALL, NEEDS, ablate, ablation_lines, features
from fastpack_trl.bench.baselines import OURS
from fastpack_trl.bench.command import settings_of
from fastpack_trl.bench.compare_tables import table
from fastpack_trl.bench.isolation import isolated, measure_side, yaml_build
from fastpack_trl.bench.parity import LossParityError
from fastpack_trl.bench.side import RoundPlan
from fastpack_trl.cli import main as cli


def _bench(material: Material, *words: str) -> list[str]:
    return ["bench", "--config", str(material.folder / "sft.yaml"), *words]


def test_a_yaml_is_measured_with_its_overrides_into_a_file(
    material: Material, capsys: pytest.CaptureFixture[str]
) -> None:
    material.yaml(eval_on_start=True)
    file = material.folder / "out.json"
    words = ["--pairs", "2", "--warmup", "0", "--gate-steps", "1", "--json", str(file), "--seed", "3"]
    assert cli.main(_bench(material, *words, "--gradient_accumulation_steps", "2", "--max_length=48")) == 0
    record = json.loads(file.read_text(encoding="utf-8"))
    (row,) = record["rows"]
    assert (record["case"], record["complete"], record["seed"]) == ("config", True, 3)
    assert (row["gradient_accumulation_steps"], row["micro_batches"], row["max_length"]) == (2, 2, 48)
    assert row["gate"]["tolerance"] == 1e-5
    assert list(row["sides"]) == ["stock", "fastpack"]
    config = record["settings"]["config"]
    assert config["max_length"] == "48"
    assert config["model_name_or_path"] == "model"
    assert "output_dir" not in config
    assert str(material.folder) not in file.read_text(encoding="utf-8")
    out = capsys.readouterr().out
    assert "fastpack is" in out
    assert "losses agree within 1e-05 (float32) over 1 steps before" in out
    assert not (material.folder / "out").exists()
    same = [*words, "--gradient_accumulation_steps", "2", "--max_length=48"]
    assert cli.main(_bench(material, *same)) == 0
    again = capsys.readouterr().out
    assert "finished before, taken over from" in again
    assert again.splitlines()[-3:] == out.splitlines()[-3:]
    assert json.loads(file.read_text(encoding="utf-8")) == record
    assert cli.main(_bench(material, "--json", str(file))) == 2
    assert "holds another run" in capsys.readouterr().err
    other = material.folder / "other" / "model"  # the last part of a path alone does not make it the same run
    other.parent.mkdir()
    other.symlink_to(material.model)
    assert cli.main(_bench(material, *same, "--model_name_or_path", str(other))) == 2
    assert "settings.asked.hash" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--baseline", "tund"], "there is no baseline 'tund'; did you mean 'tuned'"),
        (["--baseline", "compiled"], "did you mean 'stock_compiled'? (baselines: stock, stock_compiled, rebuild)"),
        (["--case", "lora"], "no part of the package; in a checkout: python -m benchmarks --case lora"),
        (["--report", "x.json"], "--report and --out do not go with --config"),
        (["--device", "cpu"], "--device does not go with --config: use_cpu"),
        (["--ablate", "--isolate"], "--ablate compares fastpack with itself"),
        (["--pairs", "0"], "pairs=0"),
        (["--profile", "/dev/null/traces"], "--profile '/dev/null/traces' cannot be a folder"),
        (["--threads", "0"], "--threads 0"),
        (["--max_lenght", "3"], "unknown option '--max_lenght'; did you mean '--max_length'"),
        (["--packed_attention", "varlne"], "--packed_attention: 'varlne' is not available"),
    ],
)
def test_a_wrong_option_is_one_line(
    material: Material, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    material.yaml()
    assert cli.main(_bench(material, *words)) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert error.count("\n") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ablate"], "--ablate goes with --config FILE only"),
        ([], "nothing to measure: give --config FILE"),
        (["--list"], "in a checkout: python -m benchmarks --list"),
        (["--case", "collator", "--tokens", "256"], "in a checkout: python -m benchmarks --case collator"),
        (["--tokens", "256", "--case", "collator"], "in a checkout: python -m benchmarks --case collator"),
    ],
)
@pytest.mark.parametrize("installed", [False, True])
def test_without_a_config_it_says_what_to_give_and_where_the_cases_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str], message: str, installed: bool
) -> None:
    if installed:
        monkeypatch.setattr(command, "__file__", "/site-packages/fastpack_trl/bench/command.py")
    assert cli.main(["bench", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert error.count("\n") == 0
    assert ("clone the repository" in error) == (installed and "checkout" in message)


def test_each_feature_is_measured_over_what_it_needs_and_one_that_is_not_there_is_named(
    material: Material, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ablation, "features", lambda: ("packed_attention", "sync_free", "layer_compile"))
    build = yaml_build(str(material.yaml()), [], str(material.folder))
    saved: list[int] = []
    plan = RoundPlan(pairs=1, warmup=0, gate_steps=1)
    rows, complete = ablate(build, plan, save=lambda rows: saved.append(len(rows)))
    assert complete
    assert saved == [1, 2, 3, 4]
    assert [row["feature"] for row in rows] == ["packed_attention", "sync_free", "layer_compile", ALL]
    packed, sync_free, compiled, everything = rows
    assert list(packed["sides"]) == ["all off", OURS]
    assert packed["sides"]["all off"]["path"] == "all off"
    assert packed["sides"][OURS]["path"].startswith("packed_attention per_document")
    assert list(sync_free["sides"]) == ["packed_attention", OURS]
    assert "sync_free" in sync_free["sides"][OURS]["path"]
    assert "sync_free" not in sync_free["sides"]["packed_attention"]["path"]
    assert "layer_compile='on' compiles" in compiled["skipped"]
    assert everything["ratios"].keys() == {"all off"}
    text = "\n".join(ablation_lines(rows))
    assert "layer_compile: skipped: on cpu" in text
    assert json.loads(json.dumps(rows)) == rows


def test_what_is_ablated_are_the_switches_of_the_configuration() -> None:
    found = features()
    assert {"packed_attention", "lora", "moe", "sync_free", "activation_memory", "merge_accumulation"} <= set(found)
    assert "verify_packing" not in found
    assert all(name in found for needed in NEEDS.items() for name in (needed[0], *needed[1]))
    on = ablation.settings_of(["lora"], {"lora": "off", "moe": "on"})
    assert on["lora"] == "auto"
    assert all(value == "off" for name, value in on.items() if name != "lora")


def test_sides_of_separate_processes_make_the_same_row(material: Material) -> None:
    plan = RoundPlan(pairs=1, warmup=0, gate_steps=1)
    found: dict[str, Any] = {}

    def launcher(row: Any, side: str) -> dict[str, Any]:
        if side not in found:
            found[side] = json.loads(json.dumps(measure_side(json.loads(json.dumps(row)), side)))
        return dict(found[side])

    def compared(*sides: str) -> dict[str, Any]:
        rows, complete = isolated(str(material.yaml()), [], sides, plan, launcher)
        assert complete
        return rows[0]

    row = compared("stock", "fastpack")
    assert len(row["gate"]["steps"]) == 1
    assert row["ratios"].keys() == {"stock"}
    assert "losses agree" in table({"complete": True, "rows": [row]})

    found["rebuild"] = json.loads(json.dumps(found["stock"]))
    found["rebuild"]["steps"][0][1] *= 1.01
    assert "the loss of step 1 is" in compared("stock", "rebuild", "fastpack")["sides"]["rebuild"]["failed"]
    found["fastpack"]["steps"][0][1] *= 1.01
    with pytest.raises(LossParityError, match="the loss of step 1 is"):
        compared("stock", "fastpack")
    found["fastpack"]["steps"][0][0] = "other"
    with pytest.raises(LossParityError, match="different micro-batches in step 1"):
        compared("stock", "fastpack")


def test_a_record_names_no_path_and_no_token(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("model_name_or_path: /data/me/Qwen3-8B\nhub_token: hf_x\ndatasets: [{path: ~/x/train.jsonl}]\n")
    found = settings_of(str(file), ["--dataset_name", "trl-lib/Capybara", "--packing", "--run_name", "mine"])
    assert found == {
        "model_name_or_path": "Qwen3-8B",
        "datasets": [{"path": "train.jsonl"}],
        "dataset_name": "trl-lib/Capybara",
        "packing": "true",
    }
