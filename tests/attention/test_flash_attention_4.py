"""`flash_attention_4`: its choice by what is installed, the device and the length of the run; its kernel on CUDA."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import flash4_interface
import pytest
import torch
from attention_material import (
    HOPPER,
    PLAIN,
    assert_as_near_as_dense,
    attend,
    dense_attention,
    make_inputs,
    prepared,
    run,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st
from shared_material import tree_row, trees
from trainer_material import train

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention import backends, flash_attention_4, varlen_common
from fastpack_trl.attention.backends import BACKENDS, choose, failure
from fastpack_trl.cli import doctor
from fastpack_trl.model.facts import ModelFeatures
from fastpack_trl.packing.packed_batch import PackedBatch

INTERFACE = "flash_attn.cute.interface"


def put_in(patch: pytest.MonkeyPatch, interface: Any) -> None:
    """Let an import find `interface` as flash-attn-4's."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "flash_attn"]:
        patch.delitem(sys.modules, name)
    patch.setitem(sys.modules, INTERFACE, interface)
    flash_attention_4._function.cache_clear()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both functions are there, as far as the choice asks; none is called."""
    put_in(monkeypatch, flash4_interface)
    yield
    flash_attention_4._function.cache_clear()


@pytest.fixture(scope="module")
def in_place_of_the_twin() -> Iterator[None]:
    """The operator runs what it runs on CUDA, over a loop in plain torch that takes the kernel's arguments."""
    with pytest.MonkeyPatch.context() as patch:
        put_in(patch, flash4_interface)
        patch.setattr(varlen_common, "_twin", flash_attention_4.flash4_attention)
        patch.setattr(varlen_common, "_twin_backward", flash_attention_4.flash4_attention_backward)
        yield
    flash_attention_4._function.cache_clear()


@settings(max_examples=60, deadline=None)
@given(
    tree=trees(), padding=st.integers(0, 2), window=st.sampled_from([None, 1, 4]), sinks=st.booleans(),
    softcap=st.sampled_from([None, 2.0]), value_dim=st.sampled_from([8, 4, 12]),
)  # fmt: skip
@example(tree=([120, 5, 100], [-1, 0, 0]), padding=1, window=None, sinks=True, softcap=None, value_dim=8)
def test_what_the_kernel_is_told_gives_output_and_gradients_of_a_dense_mask(
    in_place_of_the_twin: None, tree: Any, padding: int, window: int | None, sinks: bool, softcap: float | None,
    value_dim: int,
) -> None:  # fmt: skip
    """Segments, longest lengths, windows, sinks, softcap and scale, with shared prefixes and without; in float64."""
    for batch in (
        tree_row(*tree, num_padding=padding), PackedBatch.from_lengths(tree[0], num_padding=padding)
    ):  # fmt: skip
        inputs = make_inputs(batch, torch.float64, sinks=sinks, value_dim=value_dim)
        expected = run(lambda tensors, batch=batch: dense_attention(batch, tensors, window, softcap), inputs)
        layer = prepared("flash_attention_4", batch, *([window] if window else []))
        for one, other in zip(run(attend(layer, window, softcap), inputs), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


def test_a_version_that_takes_or_means_something_else_fails_its_trial(
    in_place_of_the_twin: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, right = BACKENDS["flash_attention_4"], flash4_interface._flash_attn_fwd
    features = replace(PLAIN, head_dim=16, kv_heads=2, windows=frozenset({5}), sinks=True)

    def without_sinks(*args: Any, learnable_sink: Any, **more: Any) -> Any:
        assert learnable_sink is not None
        return right(*args, **more)

    def one_further(*args: Any, window_size_left: int, **more: Any) -> Any:
        return right(*args, window_size_left=window_size_left + 1, **more)

    def renamed(q: Any, k: Any, v: Any, *, sink: Any = None) -> Any:
        raise AssertionError("called by other names")

    for changed, reason in (
        (right, ""),
        (without_sinks, "% off those of plain torch)"),
        (one_further, "(a query sees other tokens than those before it in its document and window)"),
        (renamed, "got an unexpected keyword argument 'return_lse'"),
    ):
        backends._failure.cache_clear()
        flash_attention_4._function.cache_clear()
        monkeypatch.setattr(flash4_interface, "_flash_attn_fwd", changed)
        said = failure(backend, features)
        assert (reason in said) if reason else not said, said
    backends._failure.cache_clear()
    flash_attention_4._function.cache_clear()


@pytest.mark.parametrize(
    ("changes", "elements", "path", "reason"),
    [
        ({}, math.inf, "flash_attention_4", "flash-attn-4, bfloat16, sm90; plain causal"),
        ({"capability": (10, 0), "sinks": True, "windows": frozenset({128})}, math.inf, "flash_attention_4", "sinks"),
        ({"softcap": True}, math.inf, "flash_attention_4", "softcap"),
        ({"capability": (8, 0)}, math.inf, "varlen", "torch's flash kernel, bfloat16, sm80; plain causal"),
        ({"compute_dtype": torch.float32}, math.inf, "per_document", "flash_attention_4 needs bf16 or fp16"),
        ({"dropout": 0.1}, math.inf, "sdpa", "flash_attention_4 has no dropout, the model's is 0.1"),
        ({"head_dim": 80}, math.inf, "varlen", "flash_attention_4 computes wrong gradients for head_dim 80"),
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
    moved = ModuleType(INTERFACE)
    moved._flash_attn_fwd = flash4_interface._flash_attn_fwd  # type: ignore[attr-defined]
    put_in(monkeypatch, moved)
    choice = choose("auto", HOPPER)
    assert choice.path == "varlen"
    assert "the installed flash-attn-4 has no flash_attn.cute.interface._flash_attn_bwd" in choice.reason


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ("cute", "ImportError('libtvm_ffi_testing.so: cannot open shared object file')"),
        ("cute", "OSError('libtvm_ffi.so: cannot open shared object file')"),
        ("cute", "RuntimeError('No CTK flavor installed: try pip install nvidia-cutlass-dsl')"),
        ("cute", "ModuleNotFoundError('No module named cutlass', name='cutlass')"),
        ("", "ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c10')"),
    ],
)
def test_installed_without_its_libraries_varlen_runs_and_the_reason_is_named(
    place: str, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What 4.0.0b36 raised without a file of theirs; the last is flash-attn 2, of another torch, in the same folder."""
    (tmp_path / "flash_attn/cute").mkdir(parents=True)
    (tmp_path / "flash_attn/cute/interface.py").touch()
    (tmp_path / "flash_attn" / place / "__init__.py").write_text(f"raise {error}")
    put_in(monkeypatch, flash4_interface)
    monkeypatch.delitem(sys.modules, INTERFACE)
    monkeypatch.syspath_prepend(str(tmp_path))
    choice = choose("auto", HOPPER)
    said = error.partition("'")[2].partition("'")[0]
    assert choice.path == "varlen"
    assert f"flash_attn.cute.interface cannot be imported: {said}" in choice.reason
    with pytest.raises(ValueError, match=r"cannot be imported: .*; use packed_attention='auto'"):
        choose("flash_attention_4", HOPPER)
    if not place:
        assert not doctor._is_there("flash_attn.cute")


def test_not_installed_is_said_where_the_device_could_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    put_in(monkeypatch, None)
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.delitem(sys.modules, INTERFACE)
    assert "pip install --pre 'fastpack-trl[fa4]'" in choose("auto", HOPPER).reason
    for features in (PLAIN, replace(HOPPER, capability=(8, 9)), replace(HOPPER, capability=(13, 0))):
        assert "flash_attention_4" not in choose("auto", features).reason
    with pytest.raises(ValueError, match=r"9\.0 or higher, below 13, this device has 13\.0"):
        choose("flash_attention_4", replace(HOPPER, capability=(13, 0)))


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


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        *(({"head_dim": size}, f"computes wrong gradients for head_dim {size} on compute capability 9.x")
          for size in (4, 8, 16, 36, 40, 48, 72, 80, 104, 112)),
        *(({"head_dim": size}, "") for size in (24, 32, 56, 60, 64, 88, 96, 120, 128, 136, 144, 192, 208, 256)),
        *(({"capability": (10, 0), "head_dim": size}, "") for size in (8, 16, 80, 128, 256)),
        ({"capability": (10, 3), "head_dim": 192}, "no head_dim 192 on compute capability 10.x, only up to 128 and"),
        ({"capability": (11, 0), "head_dim": 256, "sinks": True}, "no sinks for head_dim 256 on compute capability 11"),
        ({"capability": (10, 0), "head_dim": 256, "softcap": True}, "no softcap for head_dim 256 on compute"),
        ({"capability": (10, 0), "head_dim": 256, "windows": frozenset({9})}, "no windows for head_dim 256 on compute"),
        ({"capability": (10, 0), "head_dim": 256, "softcap": True, "windows": frozenset({9})}, "softcap and windows"),
        ({"capability": (12, 0), "head_dim": 128, "softcap": True, "windows": frozenset({128})}, ""),
        ({"capability": (12, 1), "sinks": True}, "flash_attention_4 has no sinks on compute capability 12.x"),
        ({"capability": (12, 0), "head_dim": 192}, "head_dim 192 is over flash_attention_4's limit of 160 on compute"),
    ],
)  # fmt: skip
def test_what_it_lacks_on_a_device_is_refused_by_name(installed: None, changes: dict[str, Any], reason: str) -> None:
    choice = choose("auto", replace(HOPPER, **changes))
    assert (choice.path != "flash_attention_4", reason in choice.reason) == (bool(reason), True), choice.reason
    if reason:
        with pytest.raises(
            ValueError, match=f"cannot be used here: .*{re.escape(reason)}.*; use packed_attention='auto'"
        ):
            choose("flash_attention_4", replace(HOPPER, **changes))


def test_deterministic_runs_are_refused_where_its_sums_are_atomic(installed: None) -> None:
    for generation, path in ((9, "flash_attention_4"), (12, "varlen")):
        torch.use_deterministic_algorithms(True)
        try:
            choice = choose("auto", replace(HOPPER, capability=(generation, 0)))
        finally:
            torch.use_deterministic_algorithms(False)
        assert choice.path == path
        assert ("is not deterministic on compute capability 12.x" in choice.reason) == (path == "varlen")


@pytest.mark.cuda
@pytest.mark.parametrize(("window", "sinks"), [(None, False), (4, True), (4, False), (None, True)])
@pytest.mark.parametrize("head_dim", [24, 128])
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


@pytest.mark.cuda
@pytest.mark.parametrize("head_dim", [16, 80])
def test_heads_refused_for_wrong_gradients_are_wrong(head_dim: int) -> None:
    """Once a version computes them, they need not be refused any more."""
    features = replace(HOPPER, capability=torch.cuda.get_device_capability())
    if reason := flash_attention_4.FlashAttention4().refuses(features):
        pytest.skip(reason)
    reason = flash_attention_4.FlashAttention4().refuses(replace(features, head_dim=head_dim))
    said = failure(BACKENDS["flash_attention_4"], replace(features, head_dim=head_dim, kv_heads=2))
    assert bool(said) == ("wrong gradients" in reason), (said, reason)
