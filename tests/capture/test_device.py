"""What recording on a CUDA device asks of torch, on stand-ins for its allocator and its streams."""

from __future__ import annotations

import threading
import time
from functools import partial
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from recording_streams import COMPUTE as SIDE
from recording_streams import COPIER as DEFAULT
from recording_streams import RaceError, RecordingStreams

from fastpack_trl.capture.device import CudaGraphs
from fastpack_trl.model.changes import patch_attribute

POOL = (0, 1)


class Generator:
    """As torch's: from `capture_begin` to a whole `capture_end` it draws in a way that is for a recording only."""

    def __init__(self) -> None:
        self.state = "eager"

    def clone_state(self) -> str:
        return self.state

    def graphsafe_set_state(self, state: str) -> None:
        self.state = state


class Allocator:
    """As torch's: who gives back what is cached must not be recording; a pool is let go once per recording."""

    def __init__(self) -> None:
        self.recording: list[Any] = []
        self.users = 0
        self.invalid = False
        """The recording that is under way."""
        self.generator = Generator()

    def begin(self, pool: Any) -> None:
        self.recording.append(pool)
        self.users += 1
        self.invalid, self.generator.state = False, "recording"

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
        self.pool: Any = None
        self.ended = self.open = False

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.allocator.begin(pool)
        self.pool, self.open = pool, True

    def capture_end(self) -> None:
        if self.allocator.invalid:
            raise RuntimeError("operation failed due to a previous error during capture")
        self._end()
        self.allocator.generator.state = "eager"

    def _end(self) -> None:
        self.allocator.end(0, self.pool)
        self.ended, self.open = True, False

    def reset(self) -> None:
        if self.tidy and self.open:
            self._end()
        if self.ended:
            self.allocator.release(0, self.pool)
            self.ended = False


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    made = Allocator()
    monkeypatch.setattr(Recording, "allocator", made, raising=False)
    for name, value in {
        "graph_pool_handle": lambda: POOL, "CUDAGraph": Recording, "empty_cache": made.empty_cache,
        "synchronize": lambda device: None, "memory_reserved": lambda device: 0, "current_device": lambda: 0,
        "current_stream": lambda device: None, "default_generators": (made.generator,),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", made.end)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", made.release)
    return made


def waits(allocator: Allocator) -> None:
    allocator.invalid = True
    raise RuntimeError("operation not permitted when stream is capturing")


def is_wrong(allocator: Allocator) -> None:
    raise KeyError("of the host: the capture itself is whole")


@pytest.mark.parametrize("tidy", [False, True])
@pytest.mark.parametrize(("work", "error"), [(waits, RuntimeError), (is_wrong, KeyError)])
def test_after_a_failed_recording_the_allocator_and_the_generator_are_as_before(
    allocator: Allocator, work: Any, error: type[Exception], tidy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Recording, "tidy", tidy)
    graphs = CudaGraphs(torch.device("cuda", 0))
    first, _ = graphs.record(lambda: None)
    with pytest.raises(error):
        graphs.record(partial(work, allocator))
    torch.cuda.empty_cache()
    assert allocator.users == 1
    assert allocator.generator.state == "eager"
    first.reset()
    assert not allocator.users


def test_a_pool_that_is_not_left_is_noticed(allocator: Allocator, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above shows something: without `_leave_pool` an invalid recording stays open in the allocator."""
    monkeypatch.setattr(CudaGraphs, "_leave_pool", lambda self, index, pool: None)
    graphs = CudaGraphs(torch.device("cuda", 0))
    with pytest.raises(RuntimeError, match="operation failed"):
        graphs.record(partial(waits, allocator))
    with pytest.raises(AssertionError, match="INTERNAL ASSERT"):
        torch.cuda.empty_cache()
    assert allocator.users == 1


class Stream:
    """A stream of a recording device."""

    def __init__(self, device: RecordingStreams, name: str) -> None:
        self.device, self.name = device, name

    def wait_stream(self, other: Stream) -> None:
        self.device.wait(self.name, self.device.record(other.name))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A device whose current stream is a side stream."""
    device = RecordingStreams()
    made = SimpleNamespace(device=device, default=Stream(device, DEFAULT), current=Stream(device, SIDE))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: made.default)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: patch_attribute(made, "current", stream))
    return made


@pytest.mark.parametrize(("slow", "least", "most"), [(0.0, 0.05, 0.5), (0.02, 0.7, 1.0)], ids=["even", "by time"])
def test_a_watch_samples_until_it_is_stopped(
    slow: float, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample counts for the time that it took: few come through while the host prepares launches."""
    answers = cycle((True, False, False, False))
    enough = threading.Event()
    count = 0

    def query() -> bool:
        nonlocal count
        count += 1
        if count == 40:
            enough.set()
        idle = next(answers)
        time.sleep(slow * idle)
        return idle

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(query=query))
    watch = CudaGraphs(torch.device("cuda", 0)).watch_idle()
    assert enough.wait(20)
    share, seconds = watch.stop()
    assert least < share < most
    assert seconds > 0
    stopped = count
    time.sleep(0.05)
    assert count == stopped


class LaunchesOnDefault(torch.optim.SGD):
    """As those of bitsandbytes: torch makes the state on the current stream, their kernel runs on the default one."""

    def __init__(self, parameter: torch.nn.Parameter, streams: SimpleNamespace) -> None:
        super().__init__([parameter])
        self.parameter, self.streams, self.moment = parameter, streams, torch.zeros(4)

    def step(self, closure: Any = None) -> None:
        device, gradient = self.streams.device, self.parameter.grad
        assert gradient is not None
        device.use(self.streams.current.name, self.moment, write=True)
        for tensor, write in ((gradient, False), (self.moment, True), (self.parameter, True)):
            device.use(DEFAULT, tensor, write=write)


def train_beside(streams: SimpleNamespace, optimizer: LaunchesOnDefault) -> None:
    parameter, device = optimizer.parameter, streams.device
    parameter.grad = torch.zeros(4)
    for _ in range(3):
        device.use(streams.current.name, parameter, write=False)
        device.use(streams.current.name, parameter.grad, write=True)
        optimizer.step()


def test_steps_on_the_default_stream_are_in_order_with_those_of_a_side_stream(streams: SimpleNamespace) -> None:
    side = streams.current
    optimizer = LaunchesOnDefault(torch.nn.Parameter(torch.zeros(4)), streams)
    with CudaGraphs(torch.device("cuda", 0)).steps_in_order(optimizer):
        train_beside(streams, optimizer)
        assert streams.current is side
    with pytest.raises(RaceError):  # it is as it was
        train_beside(streams, optimizer)
