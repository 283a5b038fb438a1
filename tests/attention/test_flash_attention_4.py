"""`flash_attention_4`: its choice by what is installed, the device and the length of the run; its kernel on CUDA."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_material import HOPPER, PLAIN, assert_as_near_as_dense, attend, prepared
from trainer_material import train

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention import flash_attention_4
from fastpack_trl.attention.backends import choose
from fastpack_trl.model.facts import ModelFeatures
from fastpack_trl.packing.buckets import RowSize, choose_buckets
from fastpack_trl.packing.packed_batch import PackedBatch


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both functions are there, as far as the choice asks; none is called."""
    monkeypatch.setattr(flash_attention_4, "_is_installed", lambda: True)
    monkeypatch.setattr(flash_attention_4, "found", lambda path: path)


@pytest.mark.parametrize(
    ("changes", "elements", "path", "reason"),
    [
        ({}, math.inf, "flash_attention_4", "flash-attn-4, bfloat16, sm90; plain causal"),
        ({"capability": (10, 0), "sinks": True, "windows": frozenset({128})}, math.inf, "flash_attention_4", "sinks"),
        ({"softcap": True}, math.inf, "flash_attention_4", "softcap"),
        ({"capability": (8, 0)}, math.inf, "varlen", "torch's flash kernel, bfloat16, sm80; plain causal"),
        ({"compute_dtype": torch.float32}, math.inf, "per_document", "flash_attention_4 needs bf16 or fp16"),
        ({"dropout": 0.1}, math.inf, "sdpa", "flash_attention_4 has no dropout, the model's is 0.1"),
        ({"head_dim": 320}, math.inf, "per_document", "head_dim 320 is over flash_attention_4's limit of 256"),
        # 100 rows of 8,192 tokens save 0.6 s in 28 layers of 16 heads of 128, and compiling takes 6.
        ({}, 100 * 8192 * 16 * 128 * 28, "varlen", "would be compiled for longer than it saves in this run"),
        ({}, 2000 * 8192 * 16 * 128 * 28, "flash_attention_4", "flash-attn-4"),
    ],
)
def test_auto_takes_it_where_it_is_right_and_pays(
    installed: None, changes: dict[str, Any], elements: float, path: str, reason: str
) -> None:
    choice = choose("auto", replace(HOPPER, **changes), elements=elements)
    assert (choice.path, reason in choice.reason) == (path, True), choice.reason


def test_where_it_fails_its_trial_varlen_runs_and_the_reason_is_named(installed: None) -> None:
    def attempt(backend: Any, features: ModelFeatures) -> str:
        return "flash_attention_4 failed its trial" if backend.name == "flash_attention_4" else ""

    choice = choose("auto", HOPPER, attempt=attempt)
    assert (choice.path, "failed its trial" in choice.reason) == ("varlen", True)
    with pytest.raises(ValueError, match="cannot be used here: flash_attention_4 failed its trial"):
        choose("flash_attention_4", HOPPER, attempt=attempt)


def test_a_version_whose_functions_moved_is_refused_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attention_4, "_is_installed", lambda: True)
    monkeypatch.setattr(flash_attention_4, "found", lambda path: None if path.endswith("bwd") else path)
    choice = choose("auto", HOPPER)
    assert choice.path == "varlen"
    assert "flash-attn-4 has no flash_attn.cute.interface._flash_attn_bwd, or cannot be imported" in choice.reason


def test_not_installed_is_said_where_the_device_could_run_it() -> None:
    assert "pip install --pre 'fastpack-trl[fa4]'" in choose("auto", HOPPER).reason
    for features in (PLAIN, replace(HOPPER, capability=(8, 9))):
        assert "flash_attention_4" not in choose("auto", features).reason


def test_one_bucket_serves_rows_for_which_torchs_kernel_needs_two() -> None:
    """Segments without tokens cost its kernel nearly nothing (4 % of attention with 64 of them on an H200)."""
    long = [RowSize(8192, 2 + row % 3, 6000 + 64 * row, 8192, 1) for row in range(16)]
    short = [RowSize(8192, 40 + row, 400 + 8 * row, 8192, 1) for row in range(16)]
    ours = flash_attention_4.FlashAttention4.block_cost
    assert (len(choose_buckets([*long, *short])), len(choose_buckets([*long, *short], block_cost=ours))) == (2, 1)


def test_a_run_knows_how_much_attention_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def considered(_: Any, features: ModelFeatures) -> bool:
        return True

    monkeypatch.setattr(flash_attention_4.FlashAttention4, "considered", considered)
    monkeypatch.setattr(flash_attention_4.FlashAttention4, "refuses", lambda *_: "")
    monkeypatch.setattr(
        flash_attention_4.FlashAttention4, "too_costly", lambda _, features, elements: asked.append(elements) or "dear"
    )
    trainer = train(FastSFTTrainer, tmp_path, packing=True, max_steps=2)
    config = trainer.model.config
    rows = 2 * trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps
    width = config.num_attention_heads * config.head_dim * config.num_hidden_layers
    assert asked == [rows * trainer.args.max_length * width]
    assert "dear" in trainer.fastpack_report["packed_attention"].reason


@pytest.mark.cuda
@pytest.mark.parametrize(("window", "sinks"), [(None, False), (4, True), (4, False), (None, True)])
@pytest.mark.parametrize("head_dim", [8, 64])
def test_on_the_device_within_twice_the_error_of_dense_attention(
    window: int | None, sinks: bool, head_dim: int
) -> None:
    features = replace(
        HOPPER, windows=frozenset({window} if window else ()), sinks=sinks, head_dim=head_dim,
        capability=torch.cuda.get_device_capability(),
    )  # fmt: skip
    if reason := flash_attention_4.FlashAttention4().refuses(features):
        pytest.skip(reason)
    batch = PackedBatch.from_lengths((1, 7, 20, 2), num_padding=3)
    ours = attend(prepared("flash_attention_4", batch, device="cuda"), window, None, "cuda")
    assert_as_near_as_dense(
        batch, ours, window, dtype=torch.bfloat16, floor=torch.finfo(torch.bfloat16).eps, sinks=sinks, head_dim=head_dim
    )
