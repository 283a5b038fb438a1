"""Towers on a GPU: one kernel for all images, no wait in a layer, errors no larger than those of the loop."""

from __future__ import annotations

import pytest
import torch
from counted_operators import kernels_of
from vision_material import Composite, step

from fastpack_trl.measure.host_syncs import count_host_syncs
from fastpack_trl.vision.tower import one_call_towers

pytestmark = [pytest.mark.cuda, pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])]
WIDE = {"hidden_size": 320, "num_heads": 4}  # heads of 80


@pytest.mark.parametrize("autocast", [False, True])
def test_bf16_has_at_most_twice_the_error_of_the_loop(family: str, autocast: bool) -> None:
    model = Composite(family, torch.float32 if autocast else torch.bfloat16, **WIDE).cuda()
    grids = torch.tensor([[1, 4, 4], [1, 2, 2], [1, 30, 26], [1, 10, 4]], device="cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        loop = step(model, grids)
        model.visual.gradient_checkpointing_enable({"use_reentrant": False})
        with one_call_towers(model, dtype=torch.bfloat16 if autocast else None) as report:
            mine = step(model, grids)
    assert (report.path, str(report)) == ("one call per layer", "2 of 2 layers")
    for name, right in step(model.double(), grids).items():
        off, own = ((found[name] - right).double().norm() for found in (mine, loop))
        assert off <= 2 * own + 1e-3 * right.norm(), name


def test_neither_kernels_nor_waits_of_a_layer_depend_on_the_number_of_images(family: str) -> None:
    def seen(depth: int, images: int) -> tuple[int, int]:
        model = Composite(family, torch.bfloat16, **WIDE, depth=depth).cuda()
        with one_call_towers(model):
            for count in (images + 1, images + 2, images):
                grids = torch.tensor([[1, 4, 4]] * count, device="cuda")
                with count_host_syncs() as waits:
                    step(model, grids)
            return kernels_of(lambda: step(model, grids)), waits.total

    (few, few_waits), (many, many_waits) = (zip(*(seen(depth, n) for depth in (2, 4)), strict=True) for n in (2, 12))
    assert few[1] - few[0] == many[1] - many[0] > 0
    assert len({*few_waits, *many_waits}) == 1
