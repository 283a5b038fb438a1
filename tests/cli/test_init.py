"""``fastpack-trl init``: the shipped files are listed, written, never overwritten; the quickstart's trains as it is."""

from __future__ import annotations

import sysconfig
from functools import partial
from pathlib import Path

import pytest
import yaml

from fastpack_trl import quickstart
from fastpack_trl.cli.configs import shipped
from fastpack_trl.cli.main import main
from fastpack_trl.recipe.methods import METHODS


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder, which is the working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_configs_are_listed_and_files_replaced_only_by_force(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init"]) == 0
    out = capsys.readouterr().out
    assert all(f"{name} " in out for name in shipped())
    assert max(map(len, out.splitlines())) <= 80
    assert "quickstart" in out.splitlines()[0]
    (file := here / "mine.yaml").write_text("mine", encoding="utf-8")
    assert main(["init", "qwen3-8b-lora-8k", "--output", "mine.yaml"]) == 2
    assert file.read_text(encoding="utf-8") == "mine"
    assert main(["init", "qwen3-8b-lora-8k", "--output", "mine.yaml", "--force"]) == 0
    assert "Qwen3-8B" in file.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", shipped())
def test_a_config_names_itself_and_what_is_next(here: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (here / "quickstart-output" / "model").mkdir(parents=True)
    (here / "quickstart-output" / "data").mkdir()
    assert main(["init", name]) == 0
    (file,) = here.glob("*.yaml")
    text = file.read_text(encoding="utf-8")
    assert yaml.safe_load(text) == yaml.safe_load(shipped()[name].read_text(encoding="utf-8"))
    assert f"configs/{name}" not in text
    of_another = name.rpartition("-")[2]
    command = "bench" if name.startswith("bench/") else of_another if of_another in METHODS else "sft"
    assert f"fastpack-trl {command} --config {file.name}" in text
    assert f"fastpack-trl {command} --config {file.name}" in capsys.readouterr().out


def test_the_quickstart_trains(here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # A part of the standard library: all of it takes a minute.
    monkeypatch.setattr(
        quickstart, "collect", partial(quickstart.collect, Path(sysconfig.get_paths()["stdlib"]) / "email")
    )
    monkeypatch.setattr(quickstart, "LEAST", 50)
    assert main(["init", "quickstart"]) == 0
    assert "made quickstart-output/" in capsys.readouterr().out
    short = ["--max_steps", "1", "--eval_on_start", "False", "--eval_strategy", "no"]
    assert main(["sft", "--config", "quickstart.yaml", *short]) == 0
    assert (here / "quickstart-output" / "my-adapter" / "adapter_model.safetensors").is_file()
    assert main(["init", "quickstart"]) == 0
    assert "model and data: those in quickstart-output/" in capsys.readouterr().out
