"""A backend is one file: that of adding-an-attention-backend.md is listed, tried, checked and trained."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch
from attention_material import assert_packed_equals_separate
from trainer_material import assert_line, assert_same_log, both

from fastpack_trl.attention.backends import BACKENDS
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.attention.proof import verify_packing
from fastpack_trl.config import _CHOICES
from fastpack_trl.testing import gradients, tiny_model

PAGE = Path(__file__).parents[2] / "docs/contributing/adding-an-attention-backend.md"


@pytest.fixture(autouse=True)
def _listed(monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = re.findall(r"```python\n(\"{3}Packed attention in .*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    module = ModuleType("toy_backend")
    exec(compile(source, str(PAGE), "exec"), vars(module))
    monkeypatch.setitem(BACKENDS, "toy", module.Toy())
    monkeypatch.setitem(_CHOICES, "packed_attention", (*_CHOICES["packed_attention"], "toy"))


@pytest.mark.parametrize(("family", "needs"), [("qwen3", "plain causal"), ("mistral", "window 5")])
def test_one_training_step_equals_that_on_separate_documents(family: str, needs: str) -> None:
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


def test_trainer_takes_it_by_name_checks_it_and_logs_what_stock_logs(tmp_path: Path) -> None:
    ours, stock = both(tmp_path, packing=True, fast={"packed_attention": "toy"})
    assert_line(ours, "packed_attention", status="on", path="toy", reason="asked for; plain torch; plain causal")
    assert ours.fastpack_proof.proven
    assert_same_log(ours, stock)
