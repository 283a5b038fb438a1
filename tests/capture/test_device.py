"""What recording on a CUDA device asks of torch, on stand-ins for its allocator and its streams."""

from __future__ import annotations

import threading
import time
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
def test_watch_samples_until_stopped(slow: float, least: float, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert 0 < seconds < 60
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
