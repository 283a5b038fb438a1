"""The examples of docs/contributing/: a family, a trainer, an option and a backend, each added as its page says."""

from __future__ import annotations

import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import preference_material
import pytest
import torch
import trl
from attention_material import assert_packed_equals_separate
from pages import ROOT
from preference_material import assert_changed_alike, assert_same, pairs
from trainer_material import assert_line, assert_same_log, both, callback
from transformers import AutoConfig, AutoModelForCausalLM

import fastpack_trl
from fastpack_trl.attention.backends import BACKENDS
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.attention.proof import verify_packing
from fastpack_trl.cli.main import main
from fastpack_trl.config import _CHOICES, Settings
from fastpack_trl.features import FEATURES
from fastpack_trl.features.feature import Feature
from fastpack_trl.testing import _COMMON, gradients, tiny_model
from fastpack_trl.trainers import featured


def example(page: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write the example of a page to a file, as a reader would, and import it as module `name`."""
    guide = (ROOT / "docs/contributing" / page).read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    (file := folder / f"{name.rpartition('.')[2]}.py").write_text(source, encoding="utf-8")
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def parallel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model of the guide's family; registered once, for it cannot be taken back."""
    with pytest.MonkeyPatch.context() as patch:
        example("adding-a-model-family.md", "modeling_parallel", tmp_path_factory.mktemp("guide"), patch)
        torch.manual_seed(0)
        config = AutoConfig.for_model("parallel", **_COMMON | {"num_key_value_heads": 4, "head_dim": 8})
        yield AutoModelForCausalLM.from_config(config).float()


def test_the_family_of_the_guide_is_verified(parallel: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parallel.save_pretrained(tmp_path)
    assert main(["verify", "--model", str(tmp_path)]) == 0
    assert re.search(r"path +per_document.*passed: documents are isolated", capsys.readouterr().out, re.DOTALL)


def test_the_family_of_the_guide_packs_and_trains_as_stock(parallel: Any, tmp_path: Path) -> None:
    ours, stock = both(tmp_path, model=parallel, packing=True)
    assert_same_log(ours, stock)
    report = ours.fastpack_report
    assert [report[name].path for name in ("batches", "packed_attention")] == ["packed", "per_document"]
    assert report["verify_packing"].status == report["sync_free"].status == "on"
    assert not [line for line in report if "cannot be read" in line.reason]


@pytest.mark.parametrize("home", ["fastpack_trl.trainers.simpo", "my_simpo"])
def test_the_trainer_of_the_guide_trains_as_its_stock_class_and_on_rows_inside_of_the_package(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    added = example("adding-a-trainer.md", home, tmp_path, monkeypatch)
    monkeypatch.setattr(fastpack_trl, "FastSimPOTrainer", added.FastSimPOTrainer, raising=False)
    monkeypatch.setattr(trl, "SimPOTrainer", added.SimPOTrainer, raising=False)
    monkeypatch.setitem(preference_material.DATA, "SimPO", pairs)
    steps = {"max_steps": 2, "eval_steps": 2}
    ours, stock = preference_material.both("SimPO", tmp_path, config=added.FastSimPOConfig, **steps)
    assert_same(ours, stock)
    assert_changed_alike(ours, stock)
    assert [row["margin"] for row in ours.state.log_history if "margin" in row]
    batches, is_ours = ours.fastpack_report["batches"], home != "my_simpo"
    assert batches.path == ("padding-free" if is_ours else "stock")
    assert is_ours or batches.reason == "_compute_loss of FastSimPOTrainer may expect the rows that TRL makes"
    assert not is_ours or ours.fastpack_report["share_prefixes"].path == "prompts once"
    assert bool(ours._fastpack_rows.ran) == is_ours, "the model was called on rows"


def test_the_guides_option_trains_as_stock_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    added, seen = example("adding-an-option.md", "deterministic", tmp_path, monkeypatch), []
    guide = (ROOT / "docs/contributing/adding-an-option.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"```text\n(Feature\(.*?\)),\n```", guide, re.DOTALL)
    monkeypatch.setattr(Settings, "deterministic", "auto", raising=False)
    monkeypatch.setattr(featured, "FEATURES", (*FEATURES, eval(line, {"Feature": Feature, "deterministic": added})))
    watch = callback("on_step_begin", lambda *_: seen.append(torch.are_deterministic_algorithms_enabled()))
    ours, stock = both(tmp_path, packing=True, max_steps=3, trainer={"callbacks": [watch()]})
    assert_same_log(ours, stock, rtol=2e-5, atol=1e-5)
    assert_line(ours, "deterministic", status="on", path="torch", reason="on cpu; slower")
    assert seen == [True] * 3 + [False] * 3, "ours, then stock"
    assert not torch.are_deterministic_algorithms_enabled()
    monkeypatch.setattr(Settings, "deterministic", "off")
    ours.train()
    assert ours.fastpack_report["deterministic"].reason == "switched off"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend of its guide is listed: one file."""
    added = example("adding-an-attention-backend.md", "toy_backend", tmp_path, monkeypatch)
    monkeypatch.setitem(BACKENDS, "toy", added.Toy())
    monkeypatch.setitem(_CHOICES, "packed_attention", (*_CHOICES["packed_attention"], "toy"))


@pytest.mark.parametrize(("family", "needs"), [("qwen3", "plain causal"), ("mistral", "window 5")])
def test_a_step_with_the_guides_backend_equals_that_on_separate_documents(family: str, needs: str, toy: None) -> None:
    model = tiny_model(family)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with packed_attention(model, "toy") as attention:
        assert attention.choice.reason == f"asked for; plain torch; {needs}"
        assert not attention.choice.flattens
        assert verify_packing(model, attention=attention).proven
    assert assert_packed_equals_separate(model, "toy") == "toy"
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(model.get_parameter(name).detach(), before[name] - 0.1 * gradient)


def test_a_trainer_takes_the_guides_backend_by_name_and_checks_it(toy: None, tmp_path: Path) -> None:
    ours, stock = both(tmp_path, packing=True, fast={"packed_attention": "toy"})
    assert_line(ours, "packed_attention", status="on", path="toy", reason="asked for; plain torch; plain causal")
    assert ours.fastpack_proof.proven
    assert_same_log(ours, stock)


def test_every_file_in_a_figure_exists() -> None:
    text = "".join(figure.read_text(encoding="utf-8") for figure in (ROOT / "docs/figures").glob("*.svg"))
    named = set(re.findall(r"[\w/]+\.py", text))
    assert len(named) > 20
    assert not [name for name in named if not (ROOT / "fastpack_trl" / name).exists()]
