"""Projections of one tensor computed together: PEFT's gradients, fewer operators, and nothing kept or guessed wrong."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from counted_operators import Counted
from lora_material import adapted, any_ids, joint_error, left_in_fp32, quantized, quantized_linear, saved_bytes, step
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastpack_trl import apply_lora
from fastpack_trl.lora.base_weight import BaseWeight, Fp8Weight, from_4bit
from fastpack_trl.lora.nodes import project, stacked
from fastpack_trl.lora.projection import lora_projection
from fastpack_trl.lora.siblings import Part
from fastpack_trl.testing import assert_gradients_close, gradients


def parts_of(kind: str, dtype: torch.dtype, *, bias: bool) -> tuple[Tensor, list[Part]]:
    """An input and three projections with ranks and widths of their own; A of all in one buffer."""
    torch.manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return (torch.randn(shape, dtype=torch.float64) / 4).to(dtype)

    ranks, widths, result = (3, 8, 5), (32, 64, 16), []
    for a, rank, width in zip(draw(16, 64).unsafe_split_with_sizes(ranks), ranks, widths, strict=True):
        base: Any = BaseWeight(draw(width, 64))
        if kind == "nf4":
            linear = torch.nn.Linear(64, width, bias=False)
            base = from_4bit(quantized_linear(linear, kind, dtype=dtype).weight)
        elif kind == "fp8":
            base = Fp8Weight.of(base.weight)
        own = a.requires_grad_(), draw(width, rank).requires_grad_(), draw(width).requires_grad_() if bias else None
        result.append(Part(base, *own, None, dtype, dtype))
    return draw(2, 7, 64).requires_grad_(), result


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("dense", torch.float64), ("nf4", torch.float32), ("fp8", torch.float32)], ids=str
)
def test_joint_projections_are_those_alone(kind: str, dtype: torch.dtype, bias: bool) -> None:
    results = []
    for joint in (False, True):
        x, parts = parts_of(kind, dtype, bias=bias)
        assert stacked([part.a for part in parts]).data_ptr() == parts[0].a.data_ptr()
        with Counted(lambda name, _: name == "amax") as counted:
            if joint:
                outs = project(x, parts)
            else:
                outs = [lora_projection(x, part.frozen, part.a, part.b, part.bias) for part in parts]
        assert counted.count == (0 if kind != "fp8" else 1 if joint else 3)
        leaves = [x, *(leaf for part in parts for leaf in part[1:4] if leaf is not None)]
        losses = [out.sin().sum() for out in outs]
        whole = torch.autograd.grad(sum(losses), leaves, retain_graph=True)
        again = torch.autograd.grad(sum(losses), leaves, retain_graph=True)
        assert all(map(torch.equal, whole, again))
        some = torch.autograd.grad(losses[2], [x, *parts[2][1:3]], retain_graph=True)
        unused = torch.autograd.grad(losses[0], [x, *parts[1][1:3]], allow_unused=True)
        assert unused[1:] == (None, None)
        results.append([*outs, *whole, *some, unused[0]])
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    for alone, together in zip(*results, strict=True):
        torch.testing.assert_close(together, alone, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("count", [1, 3])
def test_a_projection_is_one_node_but_in_a_recompute_and_compares_no_tensor(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node costs the host as much as several launches, and so does `tensor == None`, as in ``None in grads``."""
    x, parts = parts_of("dense", torch.float64, bias=False)
    made = list[str]()

    def run(x: Tensor) -> Tensor:
        outs = project(x, parts[:count])
        made.append(type(outs[0].grad_fn).__name__)
        return torch.cat(outs, -1).sin()

    monkeypatch.setattr(Tensor, "__eq__", lambda *_: pytest.fail("compares tensors"))
    whole = torch.autograd.grad(run(x).sum(), [x, parts[0].a])
    again = torch.autograd.grad(checkpoint(run, x, use_reentrant=False).sum(), [x, parts[0].a])
    assert all(map(torch.equal, whole, again))
    recomputed = "_AddBaseBackward" if count == 1 else "_ProjectionsBackward"
    assert made == ["_ProjectionsBackward", "_ProjectionsBackward", recomputed]


def mlp_of(model: Any) -> Any:
    return model.base_model.model.model.layers[0].mlp


def attention_of(model: Any) -> Any:
    return model.base_model.model.model.layers[0].self_attn


def as_mlp(read: Callable[[Any, Tensor], Tensor]) -> Callable[[Any], Any]:
    """A change of the first layer's MLP: another forward, which calls gate and up in its way."""

    def change(model: Any) -> None:
        mlp = mlp_of(model)
        mlp.forward = lambda x: mlp.down_proj(read(mlp, x))

    return change


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda model: None,
    "another tensor": as_mlp(lambda mlp, x: mlp.gate_proj(x).sigmoid() * mlp.up_proj(x.clone())),
    "other values": as_mlp(lambda mlp, x: mlp.gate_proj(x).sigmoid() * mlp.up_proj(x * 2)),
    "never called": as_mlp(lambda mlp, x: mlp.gate_proj(x).sigmoid()),
    "called twice": as_mlp(lambda mlp, x: mlp.gate_proj(x).sigmoid() * mlp.up_proj(x) + mlp.up_proj(x)),
    "in another order": as_mlp(lambda mlp, x: mlp.up_proj(x) * mlp.gate_proj(x).sigmoid()),
    "without gradients": as_mlp(lambda mlp, x: torch.no_grad()(mlp.up_proj)(x) * mlp.gate_proj(x)),
    "written in place": as_mlp(lambda mlp, x: mlp.gate_proj(x).mul_(2).sigmoid() * mlp.up_proj(x).clamp_(-1, 1)),
    "pre-hook": lambda model: attention_of(model).k_proj.register_forward_pre_hook(lambda _module, args: args[0] * 2),
    "hook": lambda model: attention_of(model).k_proj.register_forward_hook(lambda _module, _args, out: out * 2),
    "backward hook": lambda model: attention_of(model).q_proj.register_full_backward_hook(
        lambda _module, inputs, _out: tuple(each if each is None else each * 2 for each in inputs)
    ),
    "hook on a part": lambda model: (
        attention_of(model).k_proj.lora_B["default"].register_forward_hook(lambda _module, _args, out: out * 2)
    ),
    "frozen factor": lambda model: attention_of(model).q_proj.lora_A["default"].weight.requires_grad_(False),
}
SPLIT = ("another tensor", "other values", "never called", "called twice", "without gradients")


@pytest.mark.parametrize("late", [False, True], ids=["from the start", "later"])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_calls_give_pefts_gradients_and_split_groups(change: str, late: bool) -> None:
    """Two forwards, then their backward passes, so that a recompute comes after a change of the plan."""
    draw = random.Random(f"{change} {late}")
    chosen = {
        "target_modules": draw.choice([["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"], "all-linear"]),
        "rank_pattern": draw.choice([{}, {"k_proj": 3, "up_proj": 12}]),
        "lora_alpha": draw.choice([8, 16]),
        "bias": draw.choice(["none", "lora_only"]),
    }
    autocast, checkpoints, of_input = (draw.random() < 0.5 for _ in range(3))
    four_bit = change in ("nothing", "called twice", "hook") and not autocast
    exact = left_in_fp32(quantized()) if four_bit else adapted("qwen2", **chosen)
    stock, fast = copy.deepcopy(exact), copy.deepcopy(exact)
    report = apply_lora(fast)
    models = [stock, fast] if four_bit else [stock, fast, exact.double()]
    found = []
    for model in models:
        if of_input or checkpoints:
            model.enable_input_require_grads()
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        for number in range(3):
            if number == (1 if late else 0):
                CHANGES[change](model)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast and model is not models[-1]):
                losses = [model(input_ids=any_ids(seed=s), use_cache=False).logits.square().mean() for s in (0, 1)]
            model.zero_grad()
            for loss in losses:
                loss.backward()
        found.append(gradients(model))
    if four_bit:
        assert_gradients_close(found[1], found[0])
    else:
        assert joint_error(found[1], found[2]) <= 2 * joint_error(found[0], found[2])
    assert not report.siblings[0].kept._outputs or change == "never called"
    assert (mlp_of(fast).gate_proj.fastpack_siblings.failed > 0) == (change in SPLIT)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_projections_of_one_input_take_fewer_operators_and_save_no_more(family: str) -> None:
    counts, saved = {}, {}
    for joint in (False, True):
        of_layers = []
        for layers in (1, 2):
            model = adapted(family, dtype=torch.bfloat16, num_hidden_layers=layers)
            report = apply_lora(model)
            for siblings in () if joint else report.siblings:
                siblings._split = 1
            step(model, any_ids(), autocast=True)
            assert (f"{2 * layers} groups of one input computed together" in str(report)) == joint
            with Counted(lambda name, _: name in ("mm", "addmm", "add", "add_", "cat")) as counted:
                step(model, any_ids(), autocast=True)
            of_layers.append(counted.count)
        counts[joint], saved[joint] = of_layers[1] - of_layers[0], saved_bytes(model, any_ids())
    assert counts[True] <= counts[False] - 12
    assert saved[True] <= saved[False]


def test_a_forward_that_raised_leaves_nothing_behind_and_its_layers_stay_joint() -> None:
    model = adapted("llama")
    report = apply_lora(model)
    step(model, any_ids())
    handle = attention_of(model).k_proj.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        step(model, any_ids())
    assert report.siblings[0].kept._outputs
    handle.remove()
    model.zero_grad()
    step(model, any_ids())
    assert not report.siblings[0].kept._outputs
    assert all(not siblings.failed for siblings in report.siblings)
    stock = adapted("llama")
    step(stock, any_ids())
    assert_gradients_close(gradients(model), gradients(stock))
