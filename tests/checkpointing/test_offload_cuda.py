"""On a CUDA device: races made certain by delays and poison, bit-equal training, and how much of the copies hides."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from offload_material import assert_same, enable, offloaded
from torch import Tensor, nn

from fastpack_trl.checkpointing.offload import MIN_BYTES
from fastpack_trl.checkpointing.streams import Streams
from fastpack_trl.testing import gradients, tiny_model

pytestmark = pytest.mark.cuda

DELAY = 50_000_000  # cycles: about 30 ms, far longer than what the tests enqueue
LAYERS = 6


class SlowCopies(Streams):
    """Every copy starts late, its target poisoned before: whoever reads without waiting reads that."""

    def copy(self, target: Tensor, source: Tensor) -> None:
        with torch.cuda.stream(self.copier):
            if target.is_cuda:  # the host's own write would not wait for copies that are queued
                target.fill_(float("nan"))
            torch.cuda._sleep(DELAY)
        super().copy(target, source)


class SlowCompute(Streams):
    """Compute lags behind the host, and fetched memory is poisoned by it: a copy that does not wait is overwritten."""

    def device_memory(self, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        memory = super().device_memory(shape, stride, dtype)
        torch.cuda._sleep(DELAY)
        memory.fill_(float("nan"))
        return memory


class TimedStreams(Streams):
    """Also times copies and the stalls of the compute stream: two events with nothing but a wait between them."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.copies: list[Any] = []
        self.stalls: list[Any] = []

    def _timed(self, stream: Any, pairs: list[Any], work: Callable[[], None]) -> None:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record(stream)
        work()
        after.record(stream)
        pairs.append((before, after))

    def wait(self, stream: Any, event: Any) -> None:
        waits = partial(super().wait, stream, event)
        waits() if stream == self.copier else self._timed(stream, self.stalls, waits)

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._timed(self.copier, self.copies, partial(super().copy, target, source))

    def milliseconds(self, pairs: list[Any]) -> float:
        torch.cuda.synchronize(self.device)
        total = sum(before.elapsed_time(after) for before, after in pairs)
        pairs.clear()
        return total


def make(dtype: torch.dtype = torch.float32, layers: int = LAYERS, **more: Any) -> Any:
    return enable(tiny_model("llama", num_hidden_layers=layers, **more).to("cuda", dtype))


def step(model: nn.Module, tokens: int = 96) -> tuple[list[Tensor], dict[str, Tensor]]:
    model.zero_grad()
    ids = torch.randint(3, 90, (2, tokens), generator=torch.Generator().manual_seed(0)).cuda()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    poison()
    return [loss.detach()], gradients(model)


def poison() -> None:
    """Fill what the allocator holds free with NaN: reading freed memory shows."""
    for _ in range(4):
        for size in (2**12, 2**14, 2**15, 2**16, 2**18):
            torch.full((size,), float("nan"), device="cuda")


@pytest.mark.parametrize("streams", [Streams, SlowCopies, SlowCompute])
@pytest.mark.parametrize("mode", ["double_buffer", "single_buffer"])
@pytest.mark.parametrize(("keep", "dtype"), [(0, torch.float32), (1, torch.bfloat16)])
def test_no_schedule_changes_a_bit(streams: Callable[[Any], Any], mode: Any, keep: int, dtype: torch.dtype) -> None:
    model = make(dtype)
    stock = step(model)
    with offloaded(model, mode, streams=streams, keep_last=keep) as offload:
        for _ in range(2):
            assert_same(step(model), stock)
        torch.cuda.synchronize()
        assert offload.use.held == 0


def test_backward_holds_two_inputs_and_the_peak_falls() -> None:
    # Wide enough that a layer takes longer than the copy of its input: else the forward runs ahead of the copies.
    model = make(torch.bfloat16, layers=12, hidden_size=1024, intermediate_size=8192)
    for parameter in model.parameters():  # gradients of the weights would set the peak, where backward ends
        parameter.requires_grad_(parameter.dim() == 1)
    tokens = 4096
    one = tokens * 2 * 1024 * 2

    def peak() -> int:
        step(model, tokens)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        step(model, tokens)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    stock = peak()
    with offloaded(model, min_bytes=MIN_BYTES):
        double = peak()
    with offloaded(model, "single_buffer", min_bytes=MIN_BYTES):
        single = peak()
    assert stock - double >= 8 * one
    assert double - single <= 1.01 * one


def test_most_of_the_copy_time_hides_behind_the_layers() -> None:
    """A shape whose layers compute for longer than they copy, as real ones do; the share is read from events."""
    model = make(torch.bfloat16, layers=10, hidden_size=2048, intermediate_size=8192, num_attention_heads=16)
    shares = {}
    for mode in ("double_buffer", "single_buffer"):
        streams = TimedStreams(torch.device("cuda", torch.cuda.current_device()))
        with offloaded(model, mode, min_bytes=MIN_BYTES, streams=lambda device, made=streams: made):
            for _ in range(3):
                step(model, 8192)
            for pairs in (streams.copies, streams.stalls):
                streams.milliseconds(pairs)
            step(model, 8192)
            shares[mode] = 1 - streams.milliseconds(streams.stalls) / streams.milliseconds(streams.copies)
    assert shares["double_buffer"] >= 0.9, shares
    assert shares["single_buffer"] < 0.7, shares
