"""Runs beside the training leave buffers as they were: those of a user's layers, and those that cannot be copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainer_material import assert_same_log, train
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.model.aside import buffers_kept, run_aside
from fastpack_trl.testing import tiny_model


class Observed(nn.Module):
    """A layer whose observer writes in every mode, whose running statistics are those of training, and a counter."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.norm = layer, nn.BatchNorm1d(32)
        self.register_buffer("largest", torch.zeros(()))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, hidden: Tensor) -> Tensor:
        self.largest.mul_(0.9).add_(hidden.detach().abs().max(), alpha=0.1)
        self.calls = self.calls + 1  # another object
        if not self.seen.numel():
            self.seen.resize_(3).fill_(1.0)
        out: Tensor = self.norm(self.layer(hidden).flatten(0, -2)).view_as(hidden)
        return out


def observed() -> Any:
    model = tiny_model("qwen3")
    model.model.layers[0].mlp = Observed(model.model.layers[0].mlp)
    torch.nn.utils.parametrizations.spectral_norm(model.model.layers[1].mlp.down_proj)
    return model


@pytest.mark.parametrize("fast", [{}, {"activation_memory": "checkpoint"}], ids=["proof", "plan"])
def test_proof_and_plan_leave_the_buffers_of_layers_to_the_steps(tmp_path: Path, fast: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = observed()
    options: dict[str, Any] = {
        "packing": True, "gradient_checkpointing": "activation_memory" in fast, "max_steps": 3, "eval_strategy": "no",
    }  # fmt: skip
    torch.manual_seed(0)
    stock = train(SFTTrainer, tmp_path / "stock", model=observed(), **options)
    ours = train(FastSFTTrainer, tmp_path / "ours", model=model, fast=fast, **options)
    assert_same_log(ours, stock)
    assert ours.fastpack_report["verify_packing"].path == "proof"
    theirs = dict(stock.model.named_buffers())
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, theirs[name], rtol=1e-4, atol=1e-5, msg=name)


def test_buffers_are_the_same_objects_with_the_same_content_also_after_an_exception() -> None:
    model = observed()
    before = {name: (buffer, buffer.clone()) for name, buffer in model.named_buffers()}
    modes = [module.training for module in model.modules()]
    state = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt), run_aside(model, training=True):
        model(input_ids=torch.arange(8)[None])
        assert int(model.model.layers[0].mlp.calls) == 1
        torch.rand(3)
        raise KeyboardInterrupt
    after = dict(model.named_buffers())
    assert after.keys() == before.keys()
    for name, (buffer, content) in before.items():
        assert after[name] is buffer
        assert torch.equal(buffer, content), name
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)


def test_a_graph_may_hold_the_buffers_and_kinds_that_cannot_be_written_are_left() -> None:
    model = nn.Module()
    model.register_buffer("scale", torch.tensor([2.0]))
    model.register_buffer("none", None)
    model.register_buffer("meta", torch.zeros(3, device="meta"))
    model.register_buffer("weights", torch.zeros(2**17, dtype=torch.int8))
    with torch.inference_mode():
        model.register_buffer("inference", torch.zeros(3))
    leaf = torch.tensor([3.0], requires_grad=True)
    product = leaf * model.scale
    with buffers_kept(model):
        model.scale.data.mul_(5)
        model.weights.add_(1)
    (gradient,) = torch.autograd.grad(product, leaf)
    assert gradient.item() == 2
    assert model.weights.max() == 1, "weights of quantised layers are not copied"
