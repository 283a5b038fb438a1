"""Runs on images whose decoder is captured below its eager tower: equal to eager runs and to TRL, step by step."""

from __future__ import annotations

import copy
import gc
import weakref
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from captured_images import LORA, train
from captured_material import At
from side_by_side import assert_equal
from trainer_material import assert_line, figures
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel
from trl import SFTTrainer
from vision_material import image_data

from fastpack_trl.model.facts import backbones

RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{family: (family, {}, {}) for family in ("qwen2_5_vl", "llava", "qwen3_5", "qwen3_vl", "gemma3")},
    "qwen3_vl-lora": ("qwen3_vl", LORA, {}),
    "qwen2_5_vl-lora": ("qwen2_5_vl", LORA, {"fused_layers": "on"}),
    "llava-lora": ("llava", LORA | {"gradient_checkpointing": True}, {}),
    "accumulated": ("qwen2_5_vl", {"gradient_accumulation_steps": 2, "max_steps": 14}, {}),
    "projector": ("llava", {"freeze": True}, {}),
    "evaluated": ("mistral3", {"eval_strategy": "steps", "eval_steps": 5, "eval_dataset": image_data(4)}, {}),
}
"""Family, options of a run, and fields of ours."""


@pytest.mark.parametrize("case", RUNS)
def test_a_captured_run_on_images_trains_as_an_eager_one_and_as_trl(case: str, tmp_path: Path, devices: Any) -> None:
    """Gradients of each step, also None of a tower in a step without images: AdamW would decay it for zeros."""
    family, fields, fast = RUNS[case]
    ours, mine = train(tmp_path / "on", devices, family, **fields, **fast)
    without = devices.without
    eager, theirs = train(tmp_path / "off", devices, family, cuda_graph="off", **fields, **fast)
    stock, _ = train(tmp_path / "trl", devices, family, SFTTrainer, **fields)
    assert_line(ours, "cuda_graph", "graphs of 3.00 GiB", status="on", path="captured")
    assert devices.made[0].log.count("replay") >= 8, devices.made[0].log
    assert without or case == "accumulated"
    assert "forward" not in vars(backbones(ours.model)[-1])
    for found, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert_equal(figures(ours), figures(eager), rtol=1e-5, atol=1e-6)
    assert_equal(figures(ours), figures(stock), rtol=2e-3, atol=1e-5)


def put(self: Any, hidden: Any, places: Any, features: Any) -> Any:
    return hidden.masked_scatter(places[..., None], features.to(hidden))


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("qwen3_vl", {}, "puts its features between layers in another way than by adding them"),
        ("llava", {"vision_rows": "off"}, "padded batches are not recorded"),
    ],
)
def test_eager_runs_are_named(
    family: str, fields: dict[str, Any], reason: str, tmp_path: Path, devices: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Qwen3VLTextModel, "_deepstack_process", put)
    with pytest.raises(ValueError, match=f"cuda_graph='on': .*{reason}"):
        train(tmp_path, devices, family, max_steps=1, **fields)
    ours, _ = train(tmp_path, devices, family, **fields | {"cuda_graph": "auto"})
    assert_line(ours, "cuda_graph", reason, status="off", path="eager")
    assert not devices.made


@pytest.mark.parametrize("moment", [0, 9])
def test_a_replaced_forward_of_the_decoder_runs_once(moment: int, tmp_path: Path, devices: Any) -> None:
    """Before the run it is refused by name; in the middle, around ours, it ends the recordings."""

    def replace(model: Any, **_: Any) -> None:
        decoder = backbones(model)[-1]
        found = vars(decoder).get("forward")

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = (found or partial(type(self).forward, self))(*args, **kwargs)
            return BaseModelOutputWithPast(last_hidden_state=1.5 * outputs.last_hidden_state)

        decoder.forward = MethodType(forward, decoder)

    fields = {"callbacks": [At(moment, replace)]} if moment else {"prepare": replace}
    if not moment:
        with pytest.raises(ValueError, match="cuda_graph='on': the forward of the decoder was replaced"):
            train(tmp_path, devices, "llava", **fields)
        return
    ours, mine = train(tmp_path / "on", devices, "llava", **fields)
    _, theirs = train(tmp_path / "off", devices, "llava", cuda_graph="off", **fields)
    assert_line(ours, "cuda_graph", "the forward of the decoder was replaced", status="off", path="eager")
    for found, expected in zip(mine, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("where", ["language_model.layers.0", "multi_modal_projector"])
def test_a_hook_in_the_decoder_ends_it_and_one_in_the_tower_runs(where: str, tmp_path: Path, devices: Any) -> None:
    seen = list[int]()

    def hook(model: Any, **_: Any) -> None:
        model.get_submodule(f"model.{where}").register_forward_hook(lambda *_: seen.append(1))

    ours, steps = train(tmp_path, devices, "llava", callbacks=[At(9, hook)])
    images = sum("model.multi_modal_projector.linear_1.weight" in found for found in steps[9:])
    assert 0 < images < 9
    path, calls = ("eager", 9) if "layers" in where else ("captured", images)
    assert_line(ours, "cuda_graph", path=path)
    assert len(seen) == calls


def test_a_copy_of_the_model_runs_its_own_layers_and_keeps_none(tmp_path: Path, devices: Any) -> None:
    """As an average of weights does, made and called in the middle of a captured run."""
    made = list[Any]()

    @torch.no_grad()
    def make(model: Any, **_: Any) -> None:
        made.append(copy.deepcopy(model.model))  # TRL's forward of a copied model would hold the other
        made[0].language_model.norm.weight.mul_(2.0)
        own, doubled = (each(torch.tensor([[5, 6, 7]])).last_hidden_state for each in (model.model, made[0]))
        torch.testing.assert_close(doubled, 2 * own)

    ours, _ = train(tmp_path, devices, "llava", callbacks=[At(9, make)])
    assert_line(ours, "cuda_graph", path="captured")
    decoder = weakref.ref(backbones(ours.model)[-1])
    devices.made.clear()
    devices.options.clear()
    del ours, devices.run
    gc.collect()
    assert decoder() is None
