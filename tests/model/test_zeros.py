"""Zeros are found without a read of each tensor; Triton's hash is begun in a thread."""

from __future__ import annotations

import threading

import pytest
import torch

from fastpack_trl.model.early import begin_triton
from fastpack_trl.model.zeros import have_values

FP8 = torch.float8_e4m3fn


def test_a_tensor_has_values_if_any_number_is_not_zero() -> None:
    last = torch.zeros(3, 4)
    last[-1, -1] = 1e-30
    nan = torch.zeros(5)
    nan[2] = torch.nan
    cases = [
        (torch.zeros(2, 3), False), (last, True), (torch.ones(()), True), (torch.zeros(()), False),
        (torch.empty(0, 7), False), (nan, True), (last.T[3], True), (torch.zeros(4, dtype=torch.uint8), False),
        (torch.tensor([0, 255], dtype=torch.uint8), True), (torch.ones(3).to(FP8), True),
        (torch.tensor([False, True]), True), (torch.zeros(2, dtype=torch.bfloat16), False),
    ]  # fmt: skip
    assert have_values([tensor for tensor, _ in cases]) == [expected for _, expected in cases]


def test_the_device_is_read_twice_whatever_the_number_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    reads, own = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self.shape) or own(self))
    assert have_values([torch.zeros(2), torch.ones(3)] * 50) == [False, True] * 50
    assert reads == [(100,), (50,)]


def test_triton_hashes_its_library_before_the_first_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.cuda.is_available() or begin_triton() is None
    cache = pytest.importorskip("triton.runtime.cache")
    cache.triton_key.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    thread = begin_triton()
    assert thread is not None
    thread.join()
    assert cache.triton_key.cache_info().currsize == 1


def test_a_triton_that_cannot_be_hashed_is_left_to_its_first_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, faults = pytest.importorskip("triton.runtime.cache"), []
    monkeypatch.setattr(cache, "__file__", "/nowhere/triton/runtime/cache.py")
    cache.triton_key.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(threading, "excepthook", faults.append)
    thread = begin_triton()
    assert thread is not None
    thread.join()
    assert faults == []
    assert cache.triton_key.cache_info().currsize == 0
