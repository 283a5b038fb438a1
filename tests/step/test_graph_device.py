"""What recording on a CUDA device asks of torch, on stand-ins for its allocator and its streams."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastpack_trl.step.graph_device import CudaGraphs

POOL = (0, 1)


class Allocator:
    """As torch's: who gives back what is cached must not be recording; a pool is let go once per recording."""

    def __init__(self) -> None:
        self.recording: list[Any] = []
        self.users = 0

    def begin(self, pool: Any) -> None:
        self.recording.append(pool)
        self.users += 1

    def end(self, index: int, pool: Any) -> None:
        if pool not in self.recording:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.recording.remove(pool)

    def release(self, index: int, pool: Any) -> None:
        self.users -= 1
        assert self.users >= 0

    def empty_cache(self) -> None:
        assert not self.recording, "captures_underway.empty() INTERNAL ASSERT FAILED"


class Recording:
    """As `torch.cuda.CUDAGraph`: an invalid capture raises where it ends, before the allocator hears of it."""

    allocator: Allocator
    tidy = False
    """As versions of torch whose `reset` ends what `capture_end` did not."""

    def __init__(self) -> None:
        self.invalid = self.ended = self.open = False

    def capture_end(self) -> None:
        if self.invalid:
            raise RuntimeError("operation failed due to a previous error during capture")
        self.allocator.end(0, POOL)
        self.ended, self.open = True, False

    def reset(self) -> None:
        if self.tidy and self.open:
            self.allocator.end(0, POOL)
            self.ended, self.open = True, False
        if self.ended:
            self.allocator.release(0, POOL)
            self.ended = False


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator()

    @contextlib.contextmanager
    def graph(recording: Recording, pool: Any, **_: Any) -> Iterator[None]:
        made.begin(pool)
        recording.open = True
        try:
            yield
        except RuntimeError:
            recording.invalid = True
            raise
        finally:
            recording.capture_end()

    monkeypatch.setattr(Recording, "allocator", made, raising=False)
    generator = SimpleNamespace(clone_state=lambda: None, graphsafe_set_state=lambda state: None)
    for name, value in {
        "graph_pool_handle": lambda: POOL, "CUDAGraph": Recording, "graph": graph, "empty_cache": made.empty_cache,
        "synchronize": lambda device: None, "memory_reserved": lambda device: 0, "current_device": lambda: 0,
        "current_stream": lambda device: None, "default_generators": (generator,),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", made.release)
    return made


def waits() -> None:
    raise RuntimeError("operation not permitted when stream is capturing")


def is_wrong() -> None:
    raise KeyError("of the host: the capture itself is whole")


@pytest.mark.parametrize("tidy", [False, True])
@pytest.mark.parametrize(("work", "error"), [(waits, RuntimeError), (is_wrong, KeyError)])
def test_after_a_failed_recording_the_allocator_is_as_before(
    allocator: Allocator, work: Any, error: type[Exception], tidy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recording, "tidy", tidy)
    graphs = CudaGraphs(torch.device("cuda", 0))
    first, _ = graphs.record(lambda: None)
    with pytest.raises(error):
        graphs.record(work)
    torch.cuda.empty_cache()
    assert allocator.users == 1
    first.reset()
    assert not allocator.users
