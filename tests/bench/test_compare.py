"""`fastpack_trl.bench.compare` and ``fastpack-trl bench``: sides of a user's run, their table, JSON and picture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from sft_material import Material
from shared_material import prefixed
from trainer_material import make_dataset, make_tokenizer, settings
from trl import SFTTrainer

from fastpack_trl.bench.command import measure_side, settings_of
from fastpack_trl.bench.compare import compare, table
from fastpack_trl.bench.picture import draw
from fastpack_trl.bench.sides import NEEDS, ablations, features, side_of
from fastpack_trl.cli import main as cli
from fastpack_trl.errors import UserError
from fastpack_trl.testing import tiny_model

Build = Callable[..., Any]


def _build(folder: Path, data: Any = None, **more: Any) -> Build:
    """Packed rows, two micro-batches of one row per step."""
    own = settings(folder, packing=True, gradient_accumulation_steps=2, per_device_train_batch_size=1)
    own |= {"eval_strategy": "no"} | more
    del own["eval_steps"]

    def build(trainer_class: Any, config_class: Any, **changes: Any) -> Any:
        return trainer_class(
            tiny_model("qwen3"), args=config_class(**(own | changes)), train_dataset=data or make_dataset("text"),
            processing_class=make_tokenizer(),
        )  # fmt: skip

    return build


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    sides = ("stock", "rebuild", "fastpack")
    return compare(_build(tmp_path_factory.mktemp("compare")), timed=2, warmup=2, sides=sides, progress=False)


def test_every_side_has_its_figures_and_the_same_losses(record: dict[str, Any]) -> None:
    (row,) = record["rows"]
    stock, rebuild, ours = row["sides"].values()
    assert row["order"] == ["stock", "rebuild", "fastpack", "fastpack", "rebuild", "stock"]
    assert [set(step) for step in row["gate"]["steps"]] == [{"stock", "rebuild", "fastpack"}] * 2
    for side in (stock, rebuild, ours):
        assert len(side["seconds"]["values"]) == 2 * 2
        assert side["tokens_per_second"] > 0
        assert side["losses"] == pytest.approx(stock["losses"], rel=1e-5)
        assert side["setting"] == "qwen3, 2 layers of 32, checkpointing, 1 x 2 rows per step, max_length 48"
    pairs = [pair for side in (rebuild, ours) for pair in zip(side["losses"][2:], stock["losses"][2:], strict=True)]
    assert 0 < row["loss_difference"] == max(abs(a - b) / b for a, b in pairs) < 1e-5
    assert row["ratios"].keys() == {"stock", "rebuild"}
    assert row["ratios"]["stock"]["median"] == stock["seconds"]["median"] / ours["seconds"]["median"]
    assert len(row["ratios"]["stock"]["rounds"]) == 2
    assert 0 == ours["host_syncs"] < stock["host_syncs"] < rebuild["host_syncs"]
    assert json.loads(json.dumps(record)) == record
    lines = table(record).splitlines()
    assert lines[1].startswith("losses agree within 1e-05 (float32) in the first 2 steps; largest difference in later")
    assert [line.split()[0] for line in lines[2:6]] == ["side", "stock", "rebuild", "fastpack"]
    assert len(lines) <= 10
    assert max(map(len, lines[1:6])) <= 110


def test_the_picture_shows_every_side(record: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = draw(record, tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    times, rates, losses = figure.axes
    assert [label.get_text() for label in times.get_xticklabels()] == ["stock", "rebuild", "fastpack"]
    assert len(rates.patches) == 3
    drawn = {line.get_label(): list(line.get_ydata()) for line in losses.get_lines()}
    assert drawn == {name: side["losses"] for name, side in record["rows"][0]["sides"].items()}


def test_rows_with_shared_prefixes_have_the_tokens_and_losses_of_trl(tmp_path: Path) -> None:
    """The gate compares hashes of the tokens, also where each prefix lies in a row once."""
    found = compare(_build(tmp_path, prefixed(), max_length=120), timed=1, warmup=2, rounds=1, progress=False)
    assert "share_prefixes" in found["rows"][0]["sides"]["fastpack"]["path"]
    assert found["rows"][0]["ratios"].keys() == {"stock"}


def test_a_build_that_ignores_its_arguments_is_named(tmp_path: Path) -> None:
    build = _build(tmp_path)
    with pytest.raises(UserError, match=r"build ignored max_steps=10000 .*config_class"):
        compare(lambda trainer_class, config_class, **_: build(trainer_class, config_class), progress=False)
    with pytest.raises(UserError, match="build returned a SFTTrainer: it must return a FastSFTTrainer"):
        compare(lambda _, config_class, **changes: build(SFTTrainer, config_class, **changes), progress=False)
    with pytest.raises(UserError, match=r"no side 'fastpak'; did you mean 'fastpack'"):
        compare(build, sides=("stock", "fastpak"), progress=False)


@pytest.mark.slow
def test_a_yaml_is_measured_in_processes_with_its_overrides(
    material: Material, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    file, picture, traces = (material.folder / name for name in ("out.json", "out.png", "traces"))
    words = ["bench", "--config", str(material.yaml(eval_on_start=True))]
    words += ["--json", str(file), "--plot", str(picture), "--profile", str(traces)]
    words += ["--rounds", "1", "--steps", "1", "--warmup", "0", "--gate-steps", "1", "--seed", "3"]
    assert cli.main([*words, "--gradient_accumulation_steps", "2", "--max_length=48"]) == 0
    record = json.loads(file.read_text(encoding="utf-8"))
    (row,) = record["rows"]
    assert (record["case"], record["complete"], record["seed"]) == ("config", True, 3)
    assert row["sides"]["stock"]["setting"].endswith("2 rows per step, max_length 48")
    assert row["gate"]["tolerance"] == 1e-5
    assert list(row["sides"]) == ["stock", "fastpack"]
    config = record["settings"]["config"]
    assert (config["max_length"], config["model_name_or_path"]) == ("48", "model")
    assert str(material.folder) not in file.read_text(encoding="utf-8")
    out = capsys.readouterr().out
    assert "losses agree within 1e-05" in out
    assert out.splitlines()[-1] == f"picture: {picture}"
    assert picture.stat().st_size > 10_000
    assert {path.name for path in traces.iterdir()} == {"stock.json", "fastpack.json"}
    assert not (material.folder / "out").exists()


def test_each_feature_is_a_side_with_what_it_needs_at_its_configured_value(material: Material) -> None:
    found = features()
    assert {"packed_attention", "lora", "moe", "sync_free", "activation_memory", "merge_accumulation"} <= set(found)
    assert all(name in found for needed in NEEDS.items() for name in (needed[0], *needed[1]))
    names = ablations()
    assert names[:2] == ["off", "packed_attention"]
    assert "packed_attention + sync_free" in names
    changes = side_of("lora", configured={"lora": "off", "moe": "on"}).changes
    assert changes["lora"] == "auto"
    assert all(value == "off" for name, value in changes.items() if name != "lora")
    steps = {"warmup": 0, "timed": 1, "gate": 0, "seed": 0}
    row = {"config": str(material.yaml()), "flags": [], "trace": None, "threads": 1, "steps": steps}
    assert measure_side(row, "off")["path"] == ""
    assert "sync_free" in measure_side(row, "packed_attention + sync_free")["path"]


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


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_memory_kernels_and_idle_time_are_there(tmp_path: Path) -> None:
    build = _build(tmp_path, use_cpu=False, bf16=True)
    found = compare(build, timed=3, sides=("stock", "fastpack", "fastpack_plan"), progress=False)
    for name, side in found["rows"][0]["sides"].items():
        assert "failed" not in side, (name, side)
        assert 0 < side["peak_gib"] <= side["reserved_gib"] < 1
        assert side["profile"]["launches"] > 0
        assert side["profile"]["busy_seconds"] > 0
