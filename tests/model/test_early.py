"""Before the first step: zeros in two reads, Triton's hash in a thread, nothing slower than small operations."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_material import train

from fastpack_trl import FastSFTTrainer
from fastpack_trl.features import FEATURES
from fastpack_trl.model.early import begin_triton, many_small_operations
from fastpack_trl.model.zeros import have_values
from fastpack_trl.trainers import featured

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


def settings() -> tuple[Any, ...]:
    return gc.isenabled(), torch.get_num_threads(), torch.backends.cuda.cudnn_sdp_enabled()


def test_what_was_switched_off_is_restored_after_an_error_too() -> None:
    before = settings()
    with many_small_operations(torch.device("cpu")):
        assert settings() == (False, *before[1:]), "on a CPU the model itself runs there"
    with pytest.raises(KeyError), many_small_operations(torch.device("cuda")):
        assert settings() == (False, 1, False)
        raise KeyError
    assert settings() == before
    gc.disable()
    try:
        with many_small_operations(torch.device("cuda")):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_contexts_of_two_threads_leave_what_was_on(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Any] = []
    for owner, name in ((torch, "set_num_threads"), (torch.autograd, "backward")):
        own = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, own=own, **more: (events.append(args[0]), own(*args, **more))[1])
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        before, inside, ended = settings(), threading.Event(), threading.Event()

        def second() -> None:
            with many_small_operations(torch.device("cuda")):
                inside.set()
                ended.wait(60)

        thread = threading.Thread(target=second)
        with many_small_operations(torch.device("cuda")):
            thread.start()
            assert inside.wait(60)
        ended.set()
        thread.join()
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert (settings(), found) == (before, [2])
        assert isinstance(events[1], torch.Tensor), "autograd's threads begin before the number is 1"
        assert events[2] == 1
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("pauses", [True, False])
def test_features_are_installed_without_a_search_for_garbage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: bool
) -> None:
    seen: list[int] = []
    inside: list[int] = []

    @contextmanager
    def counted(device: torch.device) -> Iterator[None]:
        with many_small_operations(device) if pauses else nullcontext():
            begin = len(seen)  # in here: to enter allocates, too, and may begin a search
            yield
            inside.append(len(seen) - begin)

    def look(phase: str, info: dict[str, Any]) -> None:
        seen.append(info["generation"])

    monkeypatch.setattr(featured, "many_small_operations", counted)
    gc.callbacks.append(look)
    try:
        train(FastSFTTrainer, tmp_path, max_steps=1, eval_strategy="no", fast={})
    finally:
        gc.callbacks.remove(look)
    assert len(inside) == len(FEATURES) - 1, "all but the one that may read all samples"
    assert (sum(inside) == 0) == pauses, inside
