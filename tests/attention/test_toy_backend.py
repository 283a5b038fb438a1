"""A backend is one file: that of docs/adding-an-attention-backend.md is listed, tried, proven and trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from attention_material import assert_packed_equals_separate
from toy_backend import Toy
from trainer_material import assert_same_log, both, train

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention.backends import BACKENDS
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.attention.interface import Backend
from fastpack_trl.attention.proof import verify_packing
from fastpack_trl.config import _CHOICES, PACKED_ATTENTION_CHOICES
from fastpack_trl.model.facts import read_features
from fastpack_trl.packing.buckets import Bucket
from fastpack_trl.testing import gradients, tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "toy", Toy())
    monkeypatch.setitem(_CHOICES, "packed_attention", (*PACKED_ATTENTION_CHOICES, "toy"))


@pytest.mark.parametrize(("family", "needs"), [("qwen3", "plain causal"), ("mistral", "window 5")])
def test_one_training_step_equals_that_on_separate_documents(family: str, needs: str) -> None:
    model = tiny_model(family)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with packed_attention(model, "toy") as attention:
        assert attention.choice.reason == f"asked for; plain torch; {needs}"
        assert verify_packing(model, attention=attention).proven
    assert assert_packed_equals_separate(model, "toy") == "toy"
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(model.get_parameter(name).detach(), before[name] - 0.1 * gradient)


def test_a_trainer_takes_it_by_name_proves_it_and_logs_what_stock_logs(tmp_path: Path) -> None:
    ours, stock = both(tmp_path, packing=True, fast={"packed_attention": "toy"})
    line = ours.fastpack_report["packed_attention"]
    assert (line.status, line.path, line.reason) == ("on", "toy", "asked for; plain torch; plain causal")
    assert ours.fastpack_proof is not None
    assert ours.fastpack_proof.proven
    assert_same_log(ours, stock)


def test_what_other_rooms_ask_a_backend_has_an_answer_without_a_line_of_its_own() -> None:
    toy, features = Toy(), read_features(tiny_model("qwen3"))
    assert (toy.tried, toy.flattens, toy.refuses_compile(features)) == (True, False, "")
    reason = Backend.refuses_static(toy, Bucket(64, 4, 64, 64), features)
    assert reason == "toy makes what its layers read from the documents of one batch"


@pytest.mark.parametrize("flattens", [False, True])
def test_it_says_itself_which_batches_it_takes_and_whether_its_layers_are_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flattens: bool
) -> None:
    monkeypatch.setattr(Toy, "flattens", flattens)
    monkeypatch.setattr(Toy, "refuses_compile", lambda _toy, features: f"toy is eager on {features.device_type}")
    fast: dict[str, Any] = {"packed_attention": "toy"}
    ours = train(FastSFTTrainer, tmp_path, packing=False, fast=fast)
    assert isinstance(ours, FastSFTTrainer)
    assert ours.fastpack_run.plan.kind == ("padding_free" if flattens else "stock")
    assert ours.fastpack_report["packed_attention"].path == ("toy" if flattens else "stock")
    assert ours.fastpack_run.choice.refuses_compile == "toy is eager on cpu"


def test_a_model_that_needs_more_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'toy' cannot be used here: toy has no attention sinks"):
        with packed_attention(tiny_model("gpt_oss"), "toy"):
            pass


def test_the_documentation_shows_this_file() -> None:
    source = (ROOT / "tests/support/toy_backend.py").read_text(encoding="utf-8")
    assert f"```python\n{source}```" in (ROOT / "docs/adding-an-attention-backend.md").read_text(encoding="utf-8")
