"""Changes to foreign objects: restored, shared, in no copy; isolated runs leave modes, buffers and random states."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainer_material import assert_same_log, train
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.model.changes import isolated_run, patch_attribute, restore_buffers, shared
from fastpack_trl.testing import tiny_model


class Owner:
    value: Any = "of the class"


def test_an_attribute_is_as_before_unless_somebody_else_has_set_it() -> None:
    owner = Owner()
    with pytest.raises(KeyError), patch_attribute(owner, "value", "ours"):
        with patch_attribute(owner, "value", "inner"), patch_attribute(Owner, "value", "changed"):
            assert (owner.value, Owner.value) == ("inner", "changed")
        assert (owner.value, Owner.value) == ("ours", "of the class")
        raise KeyError
    with patch_attribute(owner, "value", "ours"):
        del owner.value
    assert vars(owner) == {}
    with patch_attribute(owner, "value", "ours"):
        owner.value = "theirs"
    assert owner.value == "theirs"
    compiled = torch.compile(inner := nn.Linear(1, 1))
    with patch_attribute(compiled, "train", "ours"):
        assert (vars(compiled)["train"], "train" in vars(inner)) == ("ours", False)
    assert "train" not in vars(compiled)


def test_a_shared_change_is_made_once_and_goes_with_its_last_holder() -> None:
    owner, seen = nn.Linear(1, 1), list[str]()

    @contextlib.contextmanager
    def change() -> Iterator[str]:
        seen.append("made")
        yield "it"
        seen.append("taken back")

    first, second = contextlib.ExitStack(), contextlib.ExitStack()
    assert [stack.enter_context(shared(owner, "_held", change)) for stack in (first, second)] == ["it", "it"]
    for duplicate in (copy.deepcopy(owner), pickle.loads(pickle.dumps(owner))):
        with shared(duplicate, "_held", contextlib.nullcontext):
            assert seen == ["made"]
    first.close()
    assert seen == ["made"]
    second.close()
    assert (seen, "_held" in vars(owner)) == (["made", "taken back"], False)


class Observed(nn.Module):
    """A layer whose observer writes in every mode, whose running statistics are those of training, and a counter."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.norm = layer, nn.BatchNorm1d(32)
        for name, value in {"largest": torch.zeros(()), "calls": torch.tensor(0), "seen": torch.zeros(0)}.items():
            self.register_buffer(name, value)

    def forward(self, hidden: Tensor) -> Tensor:
        self.largest.mul_(0.9).add_(hidden.detach().abs().max(), alpha=0.1)
        self.calls: Any = self.calls + 1  # another object
        if not self.seen.numel():
            self.seen.resize_(3).fill_(1.0)
        out: Tensor = self.norm(self.layer(hidden).flatten(0, -2)).view_as(hidden)
        return out


def observed() -> Any:
    model = tiny_model("qwen3")
    model.model.layers[0].mlp = Observed(model.model.layers[0].mlp)
    nn.utils.parametrizations.spectral_norm(model.model.layers[1].mlp.down_proj)
    return model


@pytest.mark.parametrize("fast", [{}, {"activation_memory": "checkpoint"}], ids=["proof", "plan"])
def test_proof_and_plan_leave_the_buffers_of_layers_to_the_steps(tmp_path: Path, fast: dict[str, Any]) -> None:
    options: dict[str, Any] = {"packing": True, "gradient_checkpointing": bool(fast), "eval_strategy": "no"}
    stock, ours = (
        train(cls, tmp_path / cls.__name__, model=observed(), fast=given, max_steps=3, **options)
        for cls, given in ((SFTTrainer, None), (FastSFTTrainer, fast))
    )
    assert_same_log(ours, stock)
    assert ours.fastpack_report["verify_packing"].path == "passed"
    for (name, buffer), theirs in zip(ours.model.named_buffers(), stock.model.buffers(), strict=True):
        torch.testing.assert_close(buffer, theirs, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("training", [True, False])
def test_a_model_and_the_random_state_are_as_before_also_after_an_exception(training: bool) -> None:
    model, calls = observed(), list[bool]()
    model.model.layers[1].eval().register_forward_hook(lambda *_: calls.append(True))
    before = [(name, buffer, buffer.clone()) for name, buffer in model.named_buffers()]
    modes, state = [module.training for module in model.modules()], torch.get_rng_state()
    with contextlib.suppress(KeyboardInterrupt), isolated_run(model, training=training):
        assert {module.training for module in model.modules()} == {training}
        model(input_ids=torch.arange(8)[None])
        assert (int(model.model.layers[0].mlp.calls), calls) == (1, [])
        torch.rand(3)
        raise KeyboardInterrupt
    for (name, buffer, content), (after, same) in zip(before, model.named_buffers(), strict=True):
        assert (after, same is buffer, torch.equal(same, content)) == (name, True, True)
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)


def test_a_graph_may_hold_the_buffers_and_weights_are_left() -> None:
    model, leaf = nn.Module(), torch.tensor([3.0], requires_grad=True)
    with torch.inference_mode():
        model.register_buffer("inference", torch.zeros(3))
    for name, values in {"scale": torch.tensor([2.0]), "none": None, "meta": torch.zeros(3, device="meta")}.items():
        model.register_buffer(name, values)
    for name, dtype in {"weights": torch.int8, "fp8": torch.float8_e4m3fn, "large": torch.bfloat16}.items():
        model.register_buffer(name, torch.zeros(2**17, dtype=dtype))
    product = leaf * model.scale
    with restore_buffers(model):
        model.scale.data.mul_(5)
        for weights in (model.weights, model.fp8, model.large):
            weights.fill_(1)
    assert torch.autograd.grad(product, leaf)[0].item() == 2
    # Weights of quantized layers are not copied.
    assert [float(weights[0]) for weights in (model.weights, model.fp8, model.large)] == [1, 1, 0]
