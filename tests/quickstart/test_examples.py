"""Examples for the notebooks: chosen by the machine, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoTokenizer

from fastpack_trl.errors import UserError
from fastpack_trl.quickstart import corpus, examples
from fastpack_trl.quickstart.corpus import source_files
from fastpack_trl.quickstart.examples import PUBLIC, choose_example

STOPPED = ".small-qwen3.partial"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With what a call that was broken off left behind."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / STOPPED).mkdir()
    (folder / STOPPED / "config.json").write_text('{"model_type": ', encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def one_file_in_six(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "source_files", lambda folder: source_files(folder)[::6])
    monkeypatch.setattr(examples, "EVERY", 1)


def files(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


def test_an_unknown_example_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no example 'Qwen/Qwen3-0.8B'; did you mean 'Qwen/Qwen3-0.6B'"):
        choose_example("Qwen/Qwen3-0.8B", tmp_path)
    assert not files(tmp_path)


@pytest.mark.parametrize("name", PUBLIC)
def test_without_a_device_or_the_hub_a_small_model_of_the_family_is_made_once(name: str, folder: Path) -> None:
    example = choose_example(name, folder)
    assert name in example.reason
    config = AutoConfig.from_pretrained(example.model)
    assert config.model_type == PUBLIC[name].family
    assert len(AutoTokenizer.from_pretrained(example.model)) <= config.vocab_size
    assert config.max_position_embeddings >= example.settings["max_length"]
    assert example.settings.get("use_cpu", False) is not torch.cuda.is_available()
    assert not (folder / STOPPED).exists()
    before = files(folder)
    assert choose_example(name, folder) == example
    assert files(folder) == before


@pytest.mark.cuda
def test_a_device_without_the_hub_gets_the_small_model(folder: Path) -> None:
    example = choose_example("Qwen/Qwen3-0.6B", folder)
    assert "hub does not answer" in example.reason or "are needed" in example.reason
    assert "use_cpu" not in example.settings
