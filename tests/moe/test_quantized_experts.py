"""Expert stacks in four bits under expert LoRA: the figures of the dequantized model, nothing dense kept."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from moe_material import STACKS, adapted, assert_as_stock, distance, experts_of, input_ids, moe_model, step
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from torch import Tensor
from trainer_material import build
from trl import SFTTrainer

from fastpack_trl import FastSFTConfig, FastSFTTrainer
from fastpack_trl.moe.apply import apply_moe
from fastpack_trl.moe.layout import experts_modules
from fastpack_trl.moe.quantized import has_quantized_experts, quantize_experts, read_stack

bitsandbytes = pytest.importorskip("bitsandbytes")


def _pair(family: str, **options: Any) -> tuple[Any, Any]:
    """A model with packed stacks, and the same model with the dense stacks that these stand for."""
    packed, dense = adapted(family, **options), adapted(family, **options)
    quantize_experts(packed)
    for ours, theirs in zip(experts_modules(packed).values(), experts_modules(dense).values(), strict=True):
        for name in ("gate_up_proj", "down_proj"):
            getattr(theirs, name).data.copy_(getattr(ours, name))
    return packed, dense


@pytest.mark.parametrize("how", ["plain", "checkpointed", "compiled"])
@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_moe"])
def test_training_step_equals_the_dequantized_model(family: str, how: str) -> None:
    packed, dense = _pair(family)
    expected = step(dense)
    with apply_moe(packed) as report, _compiled_experts(packed) if how == "compiled" else nullcontext():
        assert {line.path for line in report.layers + report.adapters} == {"fastpack"}, report
        if how == "checkpointed":
            packed.enable_input_require_grads()
            packed.gradient_checkpointing_enable({"use_reentrant": False})
        for _ in range(2):  # the second forward is where PEFT's own path fails
            assert_as_stock(packed, expected)


def test_frozen_experts_without_lora_and_decoding() -> None:
    packed, dense = _pair("qwen3_moe")
    with apply_moe(packed), packed.disable_adapter(), dense.disable_adapter():
        ids = input_ids()
        found, expected = (model(input_ids=ids, use_cache=False).logits for model in (packed, dense))
        assert distance(found, expected) <= 1e-5
    with apply_moe(packed.eval()):
        how = {"input_ids": input_ids(6), "max_new_tokens": 5, "do_sample": False}
        assert torch.equal(*(model.eval().generate(**how) for model in (packed, dense)))


@contextmanager
def _compiled_experts(model: Any) -> Iterator[None]:
    """Compile the experts of every layer as Inductor would split their graph, which decides what is kept."""
    torch._dynamo.reset()
    for layer in model.get_base_model().model.layers:
        layer.mlp.compile(backend="aot_eager_decomp_partition", fullgraph=True)
    try:
        yield
    finally:
        torch._dynamo.reset()


@pytest.mark.parametrize("compiled", [False, True])
def test_no_dense_stack_is_kept_for_backward(compiled: bool) -> None:
    packed, _ = _pair("qwen3_moe", num_experts=16)
    stacks = {read_stack(experts_of(packed), name)[1].shape for name in ("gate_up_proj", "down_proj")}  # type: ignore[union-attr]
    saved: list[tuple[int, ...]] = []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    around = _compiled_experts(packed) if compiled else nullcontext()
    with apply_moe(packed), around, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        packed(input_ids=input_ids(), use_cache=False)
    assert saved
    assert not {tuple(shape) for shape in stacks} & set(saved)


def test_trainer_quantizes_reports_and_saves_adapters_that_stock_loads(tmp_path: Path) -> None:
    trainer = _trainer(
        tmp_path, max_steps=2, save_strategy="steps", save_steps=2, gradient_checkpointing=True, eval_strategy="steps"
    )
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0  # by itself: PEFT's own forward would fail
    assert has_quantized_experts(trainer.model)
    assert trainer.fastpack_report.facts["quantized experts"].startswith("4 stacks")
    before, after = (trainer.state.log_history[i]["loss"] for i in (0, 1) if "loss" in trainer.state.log_history[i])
    assert before != after
    stored = load_file(tmp_path / "checkpoint-2" / "adapter_model.safetensors")
    assert all("lora_" in name for name in stored)
    loaded = PeftModel.from_pretrained(moe_model("qwen3_moe"), tmp_path / "checkpoint-2")
    assert all(torch.equal(loaded.state_dict()[name.replace(".weight", ".default.weight")], value)
               for name, value in stored.items())  # fmt: skip


def test_stacks_are_packed_before_stock_moves_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense, they may be larger than the device."""
    stock, packed_when_moved = SFTTrainer._move_model_to_device, []

    def watched(self: Any, model: Any, device: torch.device) -> None:
        packed_when_moved.append(has_quantized_experts(model))
        stock(self, model, device)

    monkeypatch.setattr(SFTTrainer, "_move_model_to_device", watched)
    trainer = _trainer(tmp_path)
    assert packed_when_moved == [True]
    assert trainer.fastpack_report.facts["quantized experts"].startswith("4 stacks")


def test_where_stocks_experts_would_run_four_bits_are_refused_before_the_first_step(tmp_path: Path) -> None:
    trainer = _trainer(tmp_path, model_init_kwargs={"experts_implementation": "eager"})
    with pytest.raises(ValueError, match=r"experts_implementation='eager' was chosen, and TRL's .* use DDP"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.cuda
def test_on_cuda_one_dense_stack_is_there_at_a_time(tmp_path: Path) -> None:
    wide = {"num_experts": 64, "moe_intermediate_size": 512, "hidden_size": 256}
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    trainer = _trainer(tmp_path, use_cpu=False, model=moe_model("qwen3_moe", **wide))
    peak = torch.cuda.max_memory_allocated() - before
    dense = 2 * 64 * 3 * 512 * 256 * 4
    largest = dense // 3  # gate and up of one of two layers
    assert peak < largest * 1.2 + dense * 0.14, (peak, dense)
    trainer.train()
    assert all(p.device.type == "cuda" for p in trainer.model.parameters())


def _trainer(folder: Path, model: Any = None, **more: Any) -> FastSFTTrainer:
    return build(
        FastSFTTrainer, folder, model=moe_model("qwen3_moe") if model is None else model, packing=True,
        trainer={"peft_config": LoraConfig(r=4, target_parameters=STACKS)}, fast={"moe_quantize_experts": "on"},
        **{"max_steps": 1, "eval_strategy": "no"} | more,
    )  # fmt: skip


def test_memory_is_about_an_eighth_of_fp32() -> None:
    model = moe_model("qwen3_moe", num_experts=16, moe_intermediate_size=64)
    model.requires_grad_(False)
    done = quantize_experts(model)
    assert done.stacks == 4
    assert done.bytes_before == 2 * 4 * 16 * 3 * 64 * 32
    assert 7 < done.bytes_before / done.bytes_after < 8
    assert quantize_experts(model).stacks == 0  # a second call finds nothing to do


def test_experts_that_train_and_models_without_experts_are_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match=r"is trained and cannot be quantized: train LoRA on it"):
        quantize_experts(moe_model("qwen3_moe"))
    from fastpack_trl.testing import tiny_model

    with pytest.raises(ValueError, match="the model has no expert stacks: switch it off"):
        quantize_experts(tiny_model("qwen3"))
    with pytest.raises(ValueError, match="moe_quantize_experts='on' needs moe"):
        FastSFTConfig(output_dir="unused", use_cpu=True, bf16=False, moe_quantize_experts="on", moe="off")
