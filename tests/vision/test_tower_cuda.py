"""Towers on a GPU: one kernel for all images, no wait in a layer, errors no larger than those of the loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counted_operators import kernels_of
from torch import Tensor
from vision_material import Composite

from fastpack_trl.measure.host_syncs import count_host_syncs
from fastpack_trl.testing import gradients
from fastpack_trl.vision.tower import one_call_towers, tower_attention

pytestmark = pytest.mark.cuda
WIDE = {"hidden_size": 320, "num_heads": 4}  # heads of 80
GRIDS = [[1, 4, 4], [1, 2, 2], [1, 30, 26], [1, 10, 4]]


def step(model: Any, grids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    out = model(grids)
    out.float().square().mean().backward()
    return {"out": out.detach(), **gradients(model)}


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_bf16_has_at_most_twice_the_error_of_the_loop(family: str) -> None:
    model, grids = Composite(family, torch.bfloat16, **WIDE).cuda(), torch.tensor(GRIDS, device="cuda")
    loop = step(model, grids)
    with one_call_towers(model) as report:
        assert (report.path, str(report)) == ("one call per layer", "2 of 2 layers")
        mine = step(model, grids)
    exact = step(model.double(), grids)
    for name, right in exact.items():
        off, own = ((found[name] - right).double().norm() for found in (mine, loop))
        assert off <= 2 * own + 1e-3 * right.norm(), name


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_neither_kernels_nor_waits_of_a_layer_depend_on_the_number_of_images(family: str) -> None:
    def seen(depth: int, images: int) -> tuple[int, int]:
        more = {"fullatt_block_indexes": [1]} if family == "qwen2_5_vl" else {}
        model = Composite(family, torch.bfloat16, **WIDE, **more, depth=depth).cuda()
        with one_call_towers(model):
            for fresh in range(3):
                grids = torch.tensor([[1, 4, 4]] * (images + fresh), device="cuda")
                step(model, grids)
            again = torch.tensor([[1, 4, 4]] * images, device="cuda")
            with count_host_syncs() as waits:
                model(again)
            return kernels_of(lambda: step(model, again)), waits.total

    few, many = ([seen(depth, images) for depth in (2, 4)] for images in (2, 12))
    assert few[1][0] - few[0][0] == many[1][0] - many[0][0] > 0
    assert few[0][1] == few[1][1] == many[0][1] == many[1][1]


def test_the_kernel_runs_under_autocast_and_checkpoints_and_fp32_runs_image_by_image() -> None:
    model, grids = Composite("qwen2_5_vl", **WIDE).cuda(), torch.tensor(GRIDS, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loop = step(model, grids)
        model.visual.gradient_checkpointing_enable({"use_reentrant": False})
        with one_call_towers(model, dtype=torch.bfloat16) as report:
            assert report.path == "one call per layer"
            mine = step(model, grids)
    assert all((mine[name] - loop[name]).norm() <= 0.05 * loop[name].norm() for name in loop)
    with one_call_towers(model) as report:
        assert report.switched == len(tower_attention(model))
        assert report.path.startswith("one call per image")
