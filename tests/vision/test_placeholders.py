"""Features of images are put into a row at places that the host knows; results and errors are the model's own."""

from __future__ import annotations

import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from counted_operators import Counted
from torch import Tensor
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling
from vision_material import composite, image_data, processor

from fastpack_trl.attention.install import packed_attention
from fastpack_trl.measure.host_syncs import count_host_syncs
from fastpack_trl.testing import gradients
from fastpack_trl.vision.lengths import on_host
from fastpack_trl.vision.placeholders import _places, placeholders_on_host
from fastpack_trl.vision.rows import ImageRows

FAMILIES = ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "llava", "mistral3", "internvl"]


def row_of(family: str, model: Any) -> Any:
    collate = ImageRows(DataCollatorForVisionLanguageModeling(processor(family), completion_only_loss=True), model)
    row = collate([dict(each) for each in image_data(6, family=family)])
    row.pop("labels")
    return row


def step(model: Any, row: Any) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    logits = model(**row, use_cache=False).logits
    logits.float().pow(2).mean().backward()
    return logits.detach(), gradients(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_equal_those_of_the_model_bit_by_bit(family: str) -> None:
    model = composite(family)
    row = row_of(family, model)
    with packed_attention(model):
        logits, grads = step(model, row)
        with placeholders_on_host(model), Counted(lambda name, _: "masked_scatter" in name) as scattered:
            ours, mine = step(model, row)
    assert scattered.count == 0
    assert torch.equal(ours, logits)
    torch.testing.assert_close(mine, grads, rtol=0, atol=0)
    assert all("get_placeholder_mask" not in vars(module) for module in model.modules())


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_features_that_do_not_fit_raise_as_in_the_model(family: str) -> None:
    model = composite(family).model
    ids, embeddings = torch.full((1, 5), model.config.image_token_id), torch.zeros(1, 5, 32)
    said = []
    for context in (nullcontext(), placeholders_on_host(model)):
        with context, pytest.raises(ValueError, match="do not match") as raised:
            model.get_placeholder_mask(ids, embeddings, image_features=torch.zeros(1, 4, 32))
        said.append(str(raised.value))
    assert said[0] == said[1]


def test_a_mask_is_a_plain_tensor_for_all_else() -> None:
    model = composite("llava").model
    ids = torch.tensor([[3, model.config.image_token_id, 4]])
    with placeholders_on_host(model):
        mask = model.get_placeholder_mask(ids, torch.zeros(1, 3, 8), image_features=torch.ones(1, 1, 8))
    assert mask.tolist() == [[[False], [True], [False]]]
    assert mask.fastpack_read[1][_places].tolist() == [1]
    assert {type(mask[..., 0]), type(~mask), type(torch.zeros(1, 3, 8) * mask)} == {Tensor}
    batch = torch.zeros(2, 3, 8)  # not the rows of the mask: the library's own
    assert type(batch.masked_scatter(mask, torch.ones(16))) is Tensor


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "llava"])
def test_features_of_another_width_or_device_are_left_to_the_model(family: str) -> None:
    model = composite(family).model
    ids, embeddings = torch.full((1, 2), model.config.image_token_id), torch.zeros(1, 2, 32)
    with placeholders_on_host(model):
        with pytest.raises(ValueError, match="do not match"):
            model.get_placeholder_mask(ids, embeddings, image_features=torch.zeros(1, 2, 64))
        far = model.get_placeholder_mask(ids, embeddings.to("meta"), image_features=embeddings.to("meta"))
        assert all(mask.is_meta for mask in (far if isinstance(far, tuple) else (far,)))
        assert "get_placeholder_mask" in vars(model)
        assert type(pickle.loads(pickle.dumps(model))) is type(model)


@pytest.mark.parametrize("infers", [False, True])
def test_a_mask_that_was_changed_is_read_again(infers: bool) -> None:
    model = composite("llava").model
    ids = torch.full((1, 3), model.config.image_token_id)
    with torch.inference_mode(infers), placeholders_on_host(model):
        row, features = torch.zeros(1, 3, 8), torch.ones(1, 3, 8)
        for change in (lambda mask: mask.__setitem__((0, 1), False), lambda mask: mask.logical_and_(~mask)):
            mask = model.get_placeholder_mask(ids, row, image_features=features)
            change(mask)
            assert torch.equal(row.masked_scatter(mask, features)[..., :1] == 1, mask)


@pytest.mark.parametrize(("family", "name"), [("qwen2_5_vl", "image_grid_thw"), ("mistral3", "image_sizes")])
def test_sizes_and_ids_of_a_moved_row_are_known_on_the_host(family: str, name: str) -> None:
    row = row_of(family, composite(family))
    moved = row.to("meta")
    assert moved[name].is_meta == (name == "image_grid_thw")
    for each in ("input_ids", name):
        assert on_host(moved[each]) is row[each]


@pytest.mark.cuda
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_waits_less_often(family: str) -> None:
    """Without two waits in the forward pass, and the one in backward after which the tower's begins."""
    model = composite(family, torch.bfloat16).cuda()
    row = row_of(family, model).to("cuda")
    with packed_attention(model):
        counts = []
        for context in (nullcontext(), placeholders_on_host(model)):
            with context:
                step(model, row)
                with count_host_syncs() as waits:
                    step(model, row)
            counts.append(waits.total)
    assert counts[1] <= counts[0] - 3, counts
