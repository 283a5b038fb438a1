"""``frozen_base="fp8"``: weights that are copied, moved, loaded, merged or written to in the middle of a run."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_base_material import LAYERS, At, fast_layers, lora_layers, made, weights
from lora_material import adapted
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from fastpack_trl.lora import frozen_base
from fastpack_trl.lora.base_weight import HostWeight

pytestmark = pytest.mark.usefixtures("on_any_device")


def _merged_files(folder: Path, model: Any) -> str:
    copy.deepcopy(model).merge_and_unload().save_pretrained(folder)
    return str(folder)


def test_a_copy_in_the_middle_has_the_weights_and_is_the_users_own(tmp_path: Path) -> None:
    def look(model: Any) -> tuple[str, Any, Any]:
        adapters = copy.deepcopy(get_peft_model_state_dict(model))
        return _merged_files(tmp_path / "merged", model), copy.deepcopy(model), adapters

    model = adapted("qwen3")
    plain, before = copy.deepcopy(model), weights(model)
    at = At(look)
    made(tmp_path / "run", model, [at], max_steps=2).train()
    folder, other, adapters = at.found
    set_peft_model_state_dict(plain, adapters)
    expected = plain.merge_and_unload().state_dict()
    saved = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, weight in saved.items():
        torch.testing.assert_close(weight, expected[name])
    base = lora_layers(other)[0].base_layer
    assert torch.equal(base.weight, before[0])
    with torch.no_grad():
        base.weight.fill_(7.0)
    assert (base.state_dict()["weight"] == 7).all()


def _move(model: Any) -> None:
    model.to(torch.float64)
    model.to(torch.float32)


def _load(model: Any) -> None:
    model.load_state_dict(model.state_dict())


def _merge(model: Any) -> None:
    model.merge_adapter()
    model.unmerge_adapter()


@pytest.mark.parametrize("act", [_move, _load, _merge])
def test_what_touches_the_weights_ends_fp8_there_and_is_counted(tmp_path: Path, act: Any) -> None:
    model = adapted("qwen3")
    before = weights(model)
    trainer = made(tmp_path, model, [At(act)], max_steps=3, gradient_checkpointing=True)
    trainer.train()
    assert f"{LAYERS} of {LAYERS} layers ended the run as loaded" in str(trainer.fastpack_report["frozen_base"])
    for layer, weight in zip(lora_layers(trainer.model), before, strict=True):
        torch.testing.assert_close(layer.base_layer.weight, weight, rtol=1e-5, atol=1e-6)


def test_what_is_written_to_a_weight_stays(tmp_path: Path) -> None:
    def write(model: Any) -> Any:
        base = lora_layers(model)[0].base_layer
        base.weight.data = torch.full_like(base.weight, 0.5)
        return base

    at = At(write)
    trainer = made(tmp_path, None, [at], max_steps=2)
    trainer.train()
    assert (at.found.weight == 0.5).all()
    assert f"1 of {LAYERS} layers ended the run as loaded" in str(trainer.fastpack_report["frozen_base"])


def test_loading_adapters_alone_leaves_weights_on_the_host(tmp_path: Path) -> None:
    def load(model: Any) -> list[bool]:
        set_peft_model_state_dict(model, get_peft_model_state_dict(model))
        return [layer.fastpack_multiplies_in_fp8 and layer.fastpack_on_host.nbytes > 0 for layer in fast_layers(model)]

    at = At(load)
    made(tmp_path, None, [at], max_steps=2).train()
    assert at.found == [True] * LAYERS


def test_weights_without_room_on_the_device_stay_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    restore = HostWeight.restore

    def full(self: HostWeight, *, to_device: bool = True) -> None:
        if to_device:
            raise torch.OutOfMemoryError("full")
        restore(self, to_device=False)

    def stop(model: Any) -> None:
        monkeypatch.setattr(HostWeight, "restore", full)
        raise KeyboardInterrupt

    model = adapted("qwen3")
    before = weights(model)
    with pytest.raises(KeyboardInterrupt):
        made(tmp_path, model, [At(stop)], max_steps=2).train()
    assert f"no room for the weights of {LAYERS} layers, which stay in host memory" in caplog.text
    for layer, weight in zip(lora_layers(model), before, strict=True):
        assert torch.equal(layer.base_layer.weight, weight)


def test_a_second_run_inside_of_one_is_refused_by_name(tmp_path: Path) -> None:
    def nested(model: Any) -> str:
        with pytest.raises(ValueError, match="in FP8 already, of a run that has not ended") as error:
            made(tmp_path / "inner", model, max_steps=1).train()
        return str(error.value)

    at = At(nested)
    made(tmp_path / "outer", None, [at], max_steps=2).train()
    assert at.found.startswith("frozen_base='fp8': no LoRA layer can have it")


def test_the_sample_is_no_longer_than_a_table_of_positions(tmp_path: Path) -> None:
    config = GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=600, n_positions=5)
    trainer = made(tmp_path, GPT2LMHeadModel(config), frozen_base="as_loaded", packing=False)
    assert frozen_base._sample(trainer.fastpack_run).shape == (1, 5)
