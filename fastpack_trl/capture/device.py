"""Recording, replaying and timing of device work, as the captured step asks for it, and the stream that it runs on."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fastpack_trl.measure.device_memory import allocatable
from fastpack_trl.model.changes import during_training, patch_attribute
from fastpack_trl.model.streams import on_default_stream, on_stream
from fastpack_trl.model.upstream import resolve
from fastpack_trl.run import Run

_SAMPLE_SECONDS = 5e-4


class IdleWatch:
    """Samples whether the current stream has nothing left to do, in a thread of its own; never waits for the device.

    A sample stands for the time since the one before: a thread that holds Python's lock, as in a forward pass, lets
    fewer samples through than one that waits or runs a backward pass.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._stopped = threading.Event()
        self._idle = 0.0
        self._start = self._last = time.perf_counter()
        self._thread = threading.Thread(target=self._sample, name="fastpack-idle", daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stopped.wait(_SAMPLE_SECONDS):
            idle, now = self._stream.query(), time.perf_counter()
            self._idle += (now - self._last) * idle
            self._last = now

    def stop(self) -> tuple[float, float]:
        """End it; return the idle share of the sampled time, and the seconds since the start."""
        seconds = time.perf_counter() - self._start
        self._stopped.set()
        self._thread.join()
        return self._idle / max(self._last - self._start, _SAMPLE_SECONDS), seconds


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Make one per device and process: DDP, with its nodes, stays from one `train` to the next."""
    return torch.cuda.Stream(device)


class CudaGraphs:
    """CUDA graphs in memory pools: those of one never run at once, and what they return is copied out."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pools: dict[str, Any] = {}
        self.held = 0
        """Bytes by which the pools have grown."""

    def prepare(self) -> None:
        """Give back what torch has cached: the pool of the graphs takes as much again."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def record(self, work: Callable[[], Any], pool: str = "") -> tuple[torch.cuda.CUDAGraph, Any]:
        """Record what `work` queues on the current stream, which `on_side_stream` has set, without running it.

        Args:
            pool: graphs whose memory must hold while those of another run, as activations between a forward and its
                backward, have a pool of their own, by name.

        Raises:
            RuntimeError: the work waited for the device, or used memory or a stream that cannot be recorded.
        """
        if pool not in self._pools:
            self._pools[pool] = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.memory_reserved(self.device)
        index = torch.cuda.current_device()
        generator = torch.cuda.default_generators[index]
        state = generator.clone_state()
        # thread_local: the pinning thread of a data loader may call CUDA meanwhile.
        try:
            graph.capture_begin(self._pools[pool], capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
        except BaseException:
            # A recording that ends early leaves the generator as if it went on: the next dropout would raise.
            generator.graphsafe_set_state(state)
            graph.reset()
            self._leave_pool(index, self._pools[pool])
            raise
        self.held += max(0, torch.cuda.memory_reserved(self.device) - before)
        return graph, result

    def _leave_pool(self, index: int, pool: Any) -> None:
        """Have the allocator end a recording, as `capture_end` does where a recording is whole.

        For one that is not, it raises before: `empty_cache` would assert, in a retry for lack of memory too. Where the
        recording has ended after all, torch raises here.
        """
        end, release = resolve("torch._C._cuda_endAllocateToPool"), resolve("torch._C._cuda_releasePool")
        if end is not None and release is not None:
            with contextlib.suppress(RuntimeError):
                end(index, pool)
                release(index, pool)

    def on_side_stream(self) -> contextlib.AbstractContextManager[None]:
        """Make a side stream the current one, in order with what was queued before and comes after.

        Autograd's nodes that add to gradients belong to the stream that they were made on, and live as long as a graph
        of an earlier step; one on the default stream would end a recording in backward
        (cudaErrorStreamCaptureImplicit).
        """
        return on_stream(self.device, _side_stream(self.device))

    @contextlib.contextmanager
    def steps_in_order(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Make the default stream the current one in each step: what torch launches there is in order too."""
        step = optimizer.step

        @functools.wraps(step)  # with the mark of a scheduler, which warns of a step without it
        def ordered(*args: Any, **kwargs: Any) -> Any:
            with on_default_stream(self.device):
                return step(*args, **kwargs)

        with patch_attribute(optimizer, "step", ordered):
            yield

    def watch_idle(self) -> IdleWatch:
        """Begin to sample whether the device has anything to do."""
        return IdleWatch(self.device)

    def lacks_room(self) -> str:
        """Return why a first graph would leave too little memory: it takes that of a step, and eager ones go on."""
        if self.held:
            return ""  # graphs of a kind are in one pool
        taken = torch.cuda.max_memory_allocated(self.device) - torch.cuda.memory_allocated(self.device)
        free = allocatable(self.device)
        if free >= 2 * taken:
            return ""
        return f"{free / 2**30:.1f} GiB are free, a graph plus an eager step takes {2 * taken / 2**30:.1f}"

    def forget(self) -> None:
        """Give the pool up, and its memory back: torch may refuse a pool whose last graph is gone."""
        if self.held:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
        self._pools, self.held = {}, 0


@contextlib.contextmanager
def on_side_stream(run: Run, device: CudaGraphs) -> Iterator[None]:
    """Train on a side stream, in order with the steps of bitsandbytes' optimizers, which launch on the default one."""

    def order() -> None:
        ordered.close()  # `train` may begin again by itself, with smaller batches
        optimizer = getattr(run.trainer.optimizer, "optimizer", run.trainer.optimizer)  # inside of accelerate's
        if any(kind.__module__.startswith("bitsandbytes") for kind in type(optimizer).__mro__):
            ordered.enter_context(device.steps_in_order(optimizer))

    with device.on_side_stream(), contextlib.ExitStack() as ordered, during_training(run.trainer, at_begin=order):
        yield
