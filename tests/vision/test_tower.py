"""Towers in one call per layer: their own loop's results, lengths read once per batch, own code by name, restored."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLVisionAttention
from vision_material import TOWERS, Composite, composite, step

from fastpack_trl.attention.install import packed_attention
from fastpack_trl.layers.replace import fused_layers
from fastpack_trl.testing import gradients
from fastpack_trl.vision.tower import one_call_towers, tower_attention

GRIDS = torch.tensor([[1, 4, 4], [1, 2, 2], [1, 6, 8], [1, 10, 4]])
MANY = torch.tensor([[1, 2, 2]] * 39 + [[1, 4, 2]])
VIDEO = torch.tensor([[1, 4, 2], [3, 4, 4]])


def assert_equal(mine: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


class Reads(TorchFunctionMode):
    """Counts reads of tensors in attention modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = self.in_layers = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.tolist, Tensor.item, Tensor.__int__, Tensor.__bool__, Tensor.__index__):
            self.in_layers += self.inside
        return func(*args, **(kwargs or {}))


@contextmanager
def reads(model: Any) -> Iterator[Reads]:
    with Reads() as seen:
        for module in tower_attention(model):
            module.register_forward_pre_hook(lambda *_: setattr(seen, "inside", 1))
            module.register_forward_hook(lambda *_: setattr(seen, "inside", 0))
        yield seen


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", TOWERS)
def test_a_tower_equals_its_loop_and_its_layers_read_nothing(family: str, dtype: torch.dtype) -> None:
    model = Composite(family, dtype)
    batches = (GRIDS, MANY) if family == "glm4v" else (GRIDS, MANY, VIDEO)  # its tower gets videos as images
    with reads(model) as seen:
        expected = step(model, *batches)
        assert seen.in_layers >= 2 * len(batches)
    with one_call_towers(model) as report, reads(model) as seen:
        assert_equal(step(model, *batches), expected)
        assert seen.in_layers == 0
    assert (str(report), report.reasons) == ("2 of 2 layers", {})


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_recompute_finds_the_lengths_of_its_forward(family: str, reentrant: bool) -> None:
    model = Composite(family, torch.float64)
    expected = step(model, GRIDS, MANY)
    model.visual.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with one_call_towers(model), reads(model) as seen:
        model.visual.patch_embed.register_forward_hook(lambda _m, _a, out: out.requires_grad_())
        assert_equal(step(model, GRIDS, MANY), expected)
        assert seen.in_layers == 0


def test_grids_of_one_patch_and_grids_that_change_in_place() -> None:
    model = Composite("qwen3_vl", spatial_merge_size=1)
    grids = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 3, 1]])
    with one_call_towers(model):
        step(model, grids)
        grids[2, 2] = 2
        mine = step(model, grids)
        with torch.inference_mode():
            assert torch.equal(model(grids.clone()), mine["out 0"])
    assert_equal(mine, step(model, grids))


class Scaled(Qwen2_5_VLVisionAttention):
    def forward(self, hidden_states: Tensor, cu_seqlens: Tensor, **kwargs: Any) -> Any:
        factor = 1 if ALL_ATTENTION_FUNCTIONS and self.config._attn_implementation == "sdpa" else 1.001
        return super().forward(hidden_states, cu_seqlens=cu_seqlens, **kwargs) * factor


class Whole(Qwen2_5_VLVisionAttention):
    def forward(self, hidden_states: Tensor, cu_seqlens: Tensor, **kwargs: Any) -> Any:
        own = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return own(self, *[hidden_states[None, None]] * 3, None, is_causal=False)[0][0, :, 0] + 0 * cu_seqlens[0]


def own_forward(module: Any) -> None:
    module.forward = lambda *args, **kwargs: type(module).forward(module, *args, **kwargs) * 2


OWN = {
    "it has a replaced forward": own_forward,
    "one call is not its loop: ": lambda module: setattr(module, "__class__", Scaled),
    "its forward has no call with the ends of images": lambda module: setattr(module, "__class__", Whole),
}


@pytest.mark.parametrize("reason", OWN)
def test_what_differs_runs_its_own_code_and_is_named(reason: str) -> None:
    model = Composite("qwen2_5_vl")
    for module in tower_attention(model):
        OWN[reason](module)
    expected = step(model, GRIDS)
    with one_call_towers(model) as report:
        assert_equal(step(model, GRIDS), expected)
    assert report.switched == 0
    assert reason in str(report)


def test_hooks_run_copies_work_and_all_is_restored_after_an_exception() -> None:
    model, other = Composite("qwen2_5_vl"), Composite("qwen2_5_vl")
    expected, seen = step(model, GRIDS), list[Any]()
    before = [vars(module) | {} for module in model.modules()]
    home = vars(__import__(type(model.visual).__module__, fromlist=["_"]))
    functions = dict(home)
    with pytest.raises(RuntimeError, match="stop"), one_call_towers(model), one_call_towers(other):
        with one_call_towers(model) as again:  # by a trainer in the context of another
            assert again.switched == 0
        copied = copy.deepcopy(model)
        handle = next(iter(tower_attention(model))).register_forward_hook(lambda *args: seen.append(args[2]))
        assert_equal(step(model, GRIDS), expected)
        handle.remove()
        raise RuntimeError("stop")
    assert len(seen) == 1
    assert [vars(module) | {} for module in model.modules()] == before
    assert {name: value for name, value in home.items() if functions.get(name) is not value} == {}
    assert_equal(step(copied, GRIDS), expected)


def test_packed_attention_brings_it_and_restores_it() -> None:
    model = composite("qwen3_vl")
    own = model.config.vision_config
    with packed_attention(model):
        assert all(module.config is not own for module in tower_attention(model))
    assert all(module.config is own for module in tower_attention(model))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_rotations_of_towers_are_fused(family: str) -> None:
    """Their q and k are (tokens, heads, dim). At most twice the error of the model's own code against float64."""
    model, grids = composite(family), GRIDS
    exact = copy.deepcopy(model).double()
    with fused_layers(model, dtype=torch.float32, autocast=False) as report:
        fused = tower_step(model, grids)
    own, exact = tower_step(model, grids), tower_step(exact, grids)
    assert report.fused["rotary"] == report.found["rotary"]
    assert fused.pop("rotations") - own.pop("rotations") == 2
    for name, right in exact.items():
        if name != "rotations":
            errors = [float((found[name] - right).norm() / right.norm().clamp_min(1e-9)) for found in (fused, own)]
            assert errors[0] <= 2 * errors[1] + 1e-6, (name, errors)


def tower_step(model: Any, grids: Tensor) -> dict[str, Any]:
    """Return features, gradients and the number of fused rotations in the graph of a tower."""
    model.zero_grad()
    weight = model.model.visual.patch_embed.proj.weight
    pixels = torch.randn(int(grids.prod(-1).sum()), weight[0].numel(), generator=torch.Generator().manual_seed(1))
    out = torch.cat(model.model.get_image_features(pixels.to(weight), grids, return_dict=True).pooler_output)
    nodes, todo = set[Any](), [out.grad_fn]
    while todo:
        if (node := todo.pop()) is not None and node not in nodes:
            nodes.add(node)
            todo += [before for before, _ in node.next_functions]
    (out * torch.arange(out.shape[-1])).mean().backward()
    return {"rotations": sum("_Rotary" in node.name() for node in nodes), "out": out.detach(), **gradients(model)}
