"""`flash_attention_4`: its choice by what is installed and the device; its kernel on CUDA."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import flash4_interface
import pytest
import torch
from attention_material import HOPPER, PLAIN, assert_as_near_as_dense, attend, prepared
from flash4_interface import INTERFACE, in_place_of_the_twin, put_in

from fastpack_trl.attention import backends, flash_attention_4
from fastpack_trl.attention.backends import BACKENDS, choose, failure
from fastpack_trl.attention.flash_attention_4 import FlashAttention4
from fastpack_trl.cli import doctor
from fastpack_trl.packing.packed_batch import PackedBatch

NAME = "flash_attention_4"
WINDOW = {"windows": frozenset({128})}
RIGHT = flash4_interface._flash_attn_fwd


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both functions are there, as far as the choice asks; none is called."""
    put_in(monkeypatch, flash4_interface)
    yield
    flash_attention_4._function.cache_clear()


def test_version_that_means_something_else_fails_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_further(*args: Any, window_size_left: int, **more: Any) -> Any:
        return RIGHT(*args, window_size_left=window_size_left + 1, **more)

    features, reasons = replace(PLAIN, head_dim=16, kv_heads=2, windows=frozenset({5}), sinks=True), []
    for function in (RIGHT, one_further):
        backends._failure.cache_clear()
        with in_place_of_the_twin():
            monkeypatch.setattr(flash4_interface, "_flash_attn_fwd", function)
            reasons.append(failure(BACKENDS[NAME], features))
    backends._failure.cache_clear()
    assert not reasons[0]
    assert "off those of plain torch)" in reasons[1]


WRONG, RIGHT_SIZES = (4, 16, 36, 40, 48, 72, 80, 112), (24, 32, 56, 60, 64, 96, 128, 136, 144, 192, 208, 256)


@pytest.mark.parametrize(
    ("changes", "path", "reason"),
    [
        ({}, NAME, "flash-attn-4, bfloat16, sm90; plain causal"),
        ({"capability": (10, 0), "sinks": True, **WINDOW}, NAME, "sinks"),
        ({"softcap": True}, NAME, "softcap"),
        ({"capability": (8, 0)}, "varlen", "torch's flash kernel, bfloat16, sm80; plain causal"),
        ({"compute_dtype": torch.float32}, "per_document", f"{NAME} needs bf16 or fp16"),
        ({"dropout": 0.1}, "sdpa", f"{NAME} does not support dropout (the model's is 0.1)"),
        ({"head_dim": 320}, "per_document", f"head_dim 320 is over {NAME}'s limit of 256"),
        *(({"head_dim": size}, "varlen", f"computes wrong gradients for head_dim {size} on") for size in WRONG),
        *(({"head_dim": size}, NAME, "") for size in RIGHT_SIZES),
        *(({"capability": (10, 0), "head_dim": size}, NAME, "") for size in (8, 16, 80, 128, 256)),
    ],
)
def test_auto_takes_it_or_names_what_it_lacks(installed: None, changes: dict[str, Any], path: str, reason: str) -> None:
    features = replace(HOPPER, **changes)
    choice = choose("auto", features)
    assert (choice.path, reason in choice.reason) == (path, True), choice.reason
    if path != NAME and NAME in choice.reason:
        message = f"cannot be used here: .*{re.escape(reason)}.*; use packed_attention='auto'"
        with pytest.raises(ValueError, match=message):
            choose(NAME, features)


@pytest.mark.parametrize("error", ["OSError('libtvm_ffi.so')", "ModuleNotFoundError('cutlass', name='cutlass')"])
def test_without_libraries_varlen_runs_and_says_so(error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn/cute").mkdir(parents=True)
    (tmp_path / "flash_attn/cute/interface.py").touch()
    (tmp_path / "flash_attn/__init__.py").write_text(f"raise {error}")
    put_in(monkeypatch, flash4_interface)
    monkeypatch.delitem(sys.modules, INTERFACE)
    monkeypatch.syspath_prepend(str(tmp_path))
    choice = choose("auto", HOPPER)
    assert choice.path == "varlen"
    assert f"{INTERFACE} cannot be imported: " + error.split("'")[1] in choice.reason
    assert not doctor._is_there("flash_attn.cute")


def test_missing_package_is_said_where_the_device_could_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, None)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.delitem(sys.modules, INTERFACE)
    assert "pip install --pre 'fastpack-trl[fa4]'" in choose("auto", HOPPER).reason
    for features in (PLAIN, replace(HOPPER, capability=(8, 9)), replace(HOPPER, capability=(13, 0))):
        assert NAME not in choose("auto", features).reason
    with pytest.raises(ValueError, match=r"9\.0 or higher, below 13, this device has 13\.0"):
        choose(NAME, replace(HOPPER, capability=(13, 0)))


@pytest.mark.cuda
@pytest.mark.parametrize(("window", "sinks"), [(None, False), (4, True), (4, False), (None, True)])
@pytest.mark.parametrize("head_dim", [24, 128])
def test_on_a_device_within_twice_the_error_of_dense_attention(window: int | None, sinks: bool, head_dim: int) -> None:
    windows, capability = frozenset({window} if window else ()), torch.cuda.get_device_capability()
    features = replace(HOPPER, windows=windows, sinks=sinks, head_dim=head_dim, capability=capability)
    if reason := FlashAttention4().refuses(features):
        pytest.skip(reason)
    batch, how = PackedBatch.from_lengths((1, 7, 20, 2), num_padding=3), {"sinks": sinks, "head_dim": head_dim}
    ours = attend(prepared(NAME, batch, device="cuda"), window, None, "cuda")
    assert_as_near_as_dense(batch, ours, window, dtype=torch.bfloat16, floor=torch.finfo(torch.bfloat16).eps, **how)


@pytest.mark.cuda
@pytest.mark.parametrize("head_dim", [16, 80])
def test_heads_refused_for_wrong_gradients_are_wrong(head_dim: int) -> None:
    """Once a version computes them, they need not be refused any more."""
    features = replace(HOPPER, capability=torch.cuda.get_device_capability())
    if reason := FlashAttention4().refuses(features):
        pytest.skip(reason)
    reason = FlashAttention4().refuses(replace(features, head_dim=head_dim))
    said = failure(BACKENDS[NAME], replace(features, head_dim=head_dim, kv_heads=2))
    assert bool(said) == ("wrong gradients" in reason), (said, reason)
