"""Devices without bf16 (T4): what is chosen there, and training under the loss scaler of fp16, as stock's."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_material import adapted, quantized
from old_device import T4, add_scaler, forced_capability
from trainer_material import build, callback, figures, make_dataset
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer, apply_lora
from fastpack_trl.attention.backends import choose
from fastpack_trl.features import feature
from fastpack_trl.features.cuda_graph import unavailable
from fastpack_trl.kernels._triton import is_supported
from fastpack_trl.lora import linear
from fastpack_trl.model.facts import read_features
from fastpack_trl.model.precision import emulates_bf16, fit_precision
from fastpack_trl.run import Run
from fastpack_trl.testing import tiny_model

CUDA = torch.device("cuda", 0)
OVERFLOW = 2.0**40
"""A loss scale with which gradients are infinite in fp16."""
UNPACKED = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "gradient_checkpointing": True}
"""TRL's notebooks."""
SKIPPING = {"packing": True, "optim": "adamw_torch"}


def run(cls: type[SFTTrainer], folder: Path, kind: str, *, device: str = "cpu", **more: Any) -> tuple[Any, list[float]]:
    """Six steps of which the fourth overflows, after which the loss scale goes back to what it was; all scales."""
    scales: list[float] = []

    def overflow(state: Any, model: Any) -> None:
        scales.append(trainer.accelerator.scaler.get_scale())
        if state.global_step == 3:
            trainer.accelerator.scaler.update(OVERFLOW)

    given = {"callbacks": [callback("on_step_end", overflow)()]}
    fields = {"fp16": True, "max_steps": 6, "eval_strategy": "no", "use_cpu": device == "cpu", "warmup_steps": 0} | more
    model = MODELS[kind]().to(device)
    trainer = build(cls, folder, model=model, data=make_dataset("text", 120), trainer=given, **fields)
    add_scaler(trainer, init_scale=2.0**12, backoff_factor=2.0**-28)
    for parameter in trainer.model.parameters() if device == "cuda" else ():
        if parameter.requires_grad:  # stock ends in its first step where adapters are in bf16
            parameter.data = parameter.data.float()
    trainer.train()
    return trainer, scales


def run_both(folder: Path, kind: str, **options: Any) -> list[Any]:
    return [run(cls, folder / cls.__name__, kind, **options) for cls in (FastSFTTrainer, SFTTrainer)]


MODELS = {
    "nf4": lambda: quantized("nf4", nested=True, dtype=torch.float16),
    "lora": lambda: adapted("qwen3"),
    "full": lambda: tiny_model("qwen3"),
}


def assert_same_run(ours: Any, stock: Any, rtol: float, norm: float) -> None:
    """Losses within `rtol`, norms of gradients within `norm`, all that counts equal."""
    assert ours[1] == stock[1] == [2.0**12] * 6
    mine, theirs = figures(ours[0]), figures(stock[0])
    assert [row.keys() for row in mine] == [row.keys() for row in theirs]
    for step, (row, expected) in enumerate(zip(mine[:6], theirs[:6], strict=True), start=1):
        for name in ("num_tokens", "learning_rate"):
            assert row[name] == expected[name], (step, name)
        assert row["loss"] == pytest.approx(expected["loss"], rel=rtol)
        assert row["grad_norm"] == pytest.approx(expected["grad_norm"], rel=norm, nan_ok=True)
        assert (row["grad_norm"] - row["grad_norm"] == 0) == (step != 4)
    # A fused optimizer leaves the step out on the device, where the schedule does not see it.
    skipped = "fused" not in str(ours[0].args.optim.value)
    assert (mine[3]["learning_rate"] == mine[4]["learning_rate"]) == skipped


@pytest.mark.parametrize(
    ("kind", "more"),
    [("lora", UNPACKED), ("full", {"packing": True, "gradient_accumulation_steps": 2}), ("lora", SKIPPING)],
)
def test_a_run_under_the_loss_scaler_that_overflows_is_stocks(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    runs = run_both(tmp_path, kind, **more)
    assert_same_run(*runs, rtol=5e-4, norm=5e-3)
    report = runs[0][0].fastpack_report
    on = {line.feature for line in report if line.status == "on"}
    assert {"packed_attention", "sync_free", *(["lora"] if kind == "lora" else [])} <= on
    assert ("merge_accumulation" in on) == ("gradient_accumulation_steps" in more)
    assert "the loss scaler of fp16 synchronizes" in report["sync_free"].reason


def test_documents_run_one_by_one_where_no_kernel_runs_a_row() -> None:
    model = read_features(tiny_model("qwen3"))
    for dtype, capability, path in (
        (torch.float16, T4, "per_document"), (torch.float16, (8, 0), "varlen"),
        (torch.float32, (9, 0), "per_document"),
    ):  # fmt: skip
        features = replace(model, device_type="cuda", capability=capability, compute_dtype=dtype)
        assert choose("auto", features).path == path


def test_graphs_triton_and_experts_are_for_capability_8_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build(FastSFTTrainer, tmp_path, family="qwen3_moe", eval_strategy="no")
    fast = trainer.fastpack_run
    fast.training = True
    monkeypatch.setattr(Run, "device", property(lambda self: CUDA))
    for capability, setting, status in ((T4, "auto", "stock"), ((8, 0), "auto", "on"), (T4, "on", "on")):
        fast.settings = replace(fast.settings, moe=setting)
        with forced_capability(capability), ExitStack() as stack:
            feature("moe").enter(fast, stack)
            is_old = capability == T4
            assert is_supported(CUDA) != is_old == emulates_bf16(CUDA)
            assert unavailable(CUDA) == ("needs compute capability 8.0, this device has 7.5" if is_old else "")
            assert not emulates_bf16(torch.device("cpu"))
            line = fast.report["moe"]
            assert line.status == status
            assert status == "on" or "its kernels need compute capability 8.0" in line.reason


def test_4_bit_layers_stay_peft_s_in_emulated_bf16_and_are_fast_in_fp16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "emulates_bf16", lambda device: True)
    model = quantized("nf4", compute=torch.float16)
    report = apply_lora(model, compute_dtype=torch.bfloat16)
    assert not report.fast
    assert "bf16 is emulated on this device" in str(report)
    assert len(apply_lora(model, compute_dtype=torch.float16).fast) == 14
    assert len(apply_lora(adapted("llama"), compute_dtype=torch.bfloat16).fast) == 14


def test_adapters_in_bf16_become_fp32_where_the_scaler_has_no_kernel_for_them(tmp_path: Path) -> None:
    model = quantized("nf4", compute=torch.float16)
    trainer = build(FastSFTTrainer, tmp_path, model=model, fp16=True, eval_strategy="no")
    adapters = [p for p in trainer.model.parameters() if p.requires_grad]
    assert {p.dtype for p in adapters} == {torch.bfloat16}  # TRL's
    assert fit_precision(trainer) == {}  # no scaler on a CPU
    add_scaler(trainer)
    assert fit_precision(trainer)["adapters"].startswith("28 bf16 -> fp32")
    assert {p.dtype for p in adapters} == {torch.float32}


@pytest.mark.cuda
@pytest.mark.parametrize(("kind", "more"), [("nf4", UNPACKED), ("lora", {"packing": True}), ("full", UNPACKED)])
def test_fp16_on_a_device_that_says_it_is_a_t4_is_stock_s(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    with forced_capability():
        runs = run_both(tmp_path, kind, device="cuda", **more)
    assert_same_run(*runs, rtol=1e-3, norm=2e-2)
    report = runs[0][0].fastpack_report
    assert report["packed_attention"].path == "per_document"
    assert "needs compute capability 8.0" in report["cuda_graph"].reason
    if kind != "full":
        assert report["lora"].path == "fast"


@pytest.mark.cuda
def test_stock_ends_in_its_first_step_with_adapters_in_bf16_and_ours_trains(tmp_path: Path) -> None:
    for cls in (SFTTrainer, FastSFTTrainer):
        model = quantized("nf4", dtype=torch.float16).to("cuda")
        trainer = build(cls, tmp_path, model=model, fp16=True, use_cpu=False, eval_strategy="no", **UNPACKED)
        if cls is SFTTrainer:
            with pytest.raises(NotImplementedError, match="BFloat16"):
                trainer.train()
            continue
        assert "bf16 -> fp32" in trainer.fastpack_report.facts["adapters"]
        trainer.train()
        assert len(trainer.state.log_history) >= 4
