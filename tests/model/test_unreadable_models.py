"""A model that a feature cannot read trains all the same: that part runs as stock, and the report says why."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from trainer_material import assert_same_log, train
from transformers import AutoConfig, AutoModelForCausalLM
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer, verify_packing
from fastpack_trl.lora.linear import FastLora
from fastpack_trl.measure.flops import model_flops
from fastpack_trl.model.facts import layer_values, read_features

READERS = {
    "lora.feature.has_lora": "lora",
    "lora.linear.backbones": "lora",
    "moe.feature.experts_modules": "moe",
    "step.sync_free.head_of": "sync_free",
    "step.merge_accumulation.rope_follows_length": "merge_accumulation",
    "checkpointing.activation_memory.checkpointable_layers": "activation_memory",
    "compile.layers.decoder_layers": "layer_compile",
    "model.facts._gaps": "packed_attention",
}


def unreadable(*_args: Any, **_kwargs: Any) -> Any:
    raise AttributeError("no such field")


@pytest.mark.parametrize("reader", READERS)
def test_what_a_reader_cannot_read_runs_as_stock_named(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"packing": True, "max_steps": 3, "gradient_accumulation_steps": 2}
    options["trainer"] = {"peft_config": LoraConfig(r=4, target_modules=["q_proj"])}
    stock = train(SFTTrainer, tmp_path / "stock", **options)
    monkeypatch.setattr(f"fastpack_trl.{reader}", unreadable)
    feature = READERS[reader]
    fast: dict[str, Any] = {"moe": "auto", "activation_memory_gib": 1.0}
    # On the CPU nothing is compiled unless it is asked for by name, and then an error is one.
    if feature == "layer_compile":
        monkeypatch.setattr("fastpack_trl.compile.layer_compile.why_not", lambda _: "")
    ours = train(FastSFTTrainer, tmp_path / "ours", fast=fast, **options)
    assert isinstance(ours, FastSFTTrainer)
    assert_same_log(ours, stock, rtol=2e-5, atol=1e-5)
    line = ours.fastpack_report[feature]
    assert "cannot be read" in line.reason
    assert "AttributeError: no such field" in line.reason
    if feature == "packed_attention":
        assert line.path == "padded_rows"
    else:
        assert (line.status, line.path) == ("stock", "stock")
    assert not any(isinstance(module, FastLora) for module in ours.model.modules())


def test_a_feature_that_was_switched_on_by_name_says_what_it_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fastpack_trl.moe.feature.experts_modules", unreadable)
    with pytest.raises(ValueError, match=r"moe='on': Qwen3ForCausalLM cannot be read: .*; set moe='auto' to train"):
        train(FastSFTTrainer, tmp_path, packing=True, fast={"moe": "on"})


def test_the_error_behind_it_is_in_the_log_for_who_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("fastpack_trl.lora.feature.has_lora", unreadable)
    with caplog.at_level(logging.DEBUG, logger="fastpack_trl.features"):
        train(FastSFTTrainer, tmp_path, packing=True)
    (record,) = [record for record in caplog.records if record.exc_info]
    assert "lora failed while it was entered" in record.getMessage()
    assert "in unreadable" in caplog.text, "with its traceback"


@pytest.mark.parametrize("error", [torch.AcceleratorError, torch.OutOfMemoryError])
def test_an_error_of_the_device_is_no_matter_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[RuntimeError]
) -> None:
    def fails(*_args: Any, **_kwargs: Any) -> Any:
        raise error("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("fastpack_trl.lora.feature.has_lora", fails)
    with pytest.raises(error, match="illegal memory access"):
        train(FastSFTTrainer, tmp_path, packing=True)


def _gemma(family: str = "gemma4_text", **more: Any) -> Any:
    config = AutoConfig.for_model(
        family, vocab_size=96, vocab_size_per_layer_input=96, hidden_size=32, hidden_size_per_layer_input=8,
        intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        sliding_window=5, max_position_embeddings=128, num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"], pad_token_id=0, bos_token_id=1, eos_token_id=2, **more,
    )  # fmt: skip
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).float()


def _gemma4() -> Any:
    """Layers with heads of two widths, which its config gives per layer only."""
    return _gemma(global_head_dim=16)


def test_fields_that_differ_from_layer_to_layer_are_read_per_layer() -> None:
    model = _gemma4()
    assert layer_values(model.config, "head_dim") == [8, 16]
    features = read_features(model)
    assert (features.head_dim, features.num_heads, features.windows, features.gap) == (16, 4, {5}, "")
    flops = model_flops(model)
    assert [flops.pairs[window].forward for window in (5, None)] == [4 * 4 * 8, 4 * 4 * 16]


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_a_model_whose_layers_differ_trains_as_stock(tmp_path: Path, packing: bool) -> None:
    ours, stock = (
        train(cls, tmp_path / cls.__name__, model=_gemma4(), packing=packing, max_steps=3)
        for cls in (FastSFTTrainer, SFTTrainer)
    )
    assert_same_log(ours, stock, rtol=2e-5, atol=1e-5)
    assert ours.fastpack_report["packed_attention"].path == "per_document"


def test_a_norm_without_a_gradient_at_zero_is_no_leak() -> None:
    """gemma3n, whose padding is a vector of zeros as long as nobody trained it."""
    model = _gemma("gemma3n_text")
    assert not model.get_input_embeddings().weight[0].any()
    for seed in range(3):
        proof = verify_packing(model, seed=seed)
        assert proof.proven, proof
