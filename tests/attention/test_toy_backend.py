"""A backend is one file: that of docs/adding-an-attention-backend.md is listed, tried, proven and trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attention_material import make_row, packed, separate
from toy_backend import Toy

from fastpack_trl.attention.backends import BACKENDS
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.attention.proof import verify_packing
from fastpack_trl.testing import assert_gradients_close, gradients, tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "toy", Toy())


@pytest.mark.parametrize(("family", "needs"), [("qwen3", "plain causal"), ("mistral", "window 5")])
def test_one_training_step_equals_that_on_separate_documents(family: str, needs: str) -> None:
    model = tiny_model(family)
    ids, _, batch = make_row()
    expected_loss, expected = separate(model, ids, batch)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with packed_attention(model, "toy") as attention:
        assert attention.choice.reason == f"asked for; plain torch; {needs}"
        assert verify_packing(model, attention=attention).proven
        loss = packed(model, ids, batch)
        loss.backward()
        optimizer.step()
    assert abs(loss.item() - expected_loss) <= 1e-5
    assert_gradients_close(gradients(model), expected)
    moved = {name: before[name] - 0.1 * gradient for name, gradient in gradients(model).items()}
    assert moved
    for name, value in moved.items():
        torch.testing.assert_close(model.get_parameter(name).detach(), value)


def test_a_model_that_needs_more_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'toy' cannot be used here: toy has no attention sinks"):
        with packed_attention(tiny_model("gpt_oss"), "toy"):
            pass


def test_the_documentation_shows_this_file() -> None:
    source = (ROOT / "tests/support/toy_backend.py").read_text(encoding="utf-8")
    assert f"```python\n{source}```" in (ROOT / "docs/adding-an-attention-backend.md").read_text(encoding="utf-8")
