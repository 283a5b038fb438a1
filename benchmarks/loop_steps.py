"""Some optimizer steps of a trainer's own loop: how long each took, and how much of it was arithmetic.

`StepWatch` divides a whole step into phases, on the device's clock. Here the host's clock stands around the four calls
that are arithmetic, so that what is left is the host work between them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity
from transformers import TrainerCallback

from benchmarks.steps import instrument
from fastpack_trl.bench.gaps import covered
from fastpack_trl.bench.run_watch import device_events

_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
"""Calls of the runtime in which the host does nothing but wait."""
ARITHMETIC = ("forward", "backward", "clipping", "optimizer")
WARMUP_STEPS = 2
"""The first steps of a run; not timed."""


@dataclass(slots=True)
class LoopSteps:
    """Some optimizer steps of one trainer, from the end of one step to the end of another.

    Attributes:
        seconds: of each step, host time.
        inside: seconds of each step in each of `ARITHMETIC`.
        total: seconds of all steps; the device has finished at both ends.
        tokens: of all steps.
        loss: mean loss of the run, its first steps included.
    """

    seconds: list[float] = field(default_factory=list)
    inside: list[dict[str, float]] = field(default_factory=list)
    total: float = 0.0
    tokens: int = 0
    loss: float = 0.0

    @property
    def outside(self) -> list[float]:
        """Return the seconds of each step that are no arithmetic: batches, metrics, loop, callbacks, schedule."""
        return [taken - sum(parts.values()) for taken, parts in zip(self.seconds, self.inside, strict=True)]


class LoopWatch(TrainerCallback):
    """Fills a `LoopSteps` while a trainer trains; `installed` puts it around the calls that are arithmetic."""

    def __init__(self, device: str, profile: GpuProfile | None = None) -> None:
        self.device, self.profile = device, profile
        self.steps = LoopSteps()
        self._parts = dict.fromkeys(ARITHMETIC, 0.0)
        self._last = self._start = self._optimizer = self._backward_end = 0.0
        self._tokens = 0

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._parts[name] += time.perf_counter() - start

    @contextlib.contextmanager
    def installed(self, trainer: Any) -> Iterator[None]:
        """Time forward, backward and clipping inside; the optimizer has callbacks of its own."""
        accelerator, model = trainer.accelerator, trainer.model
        starts: list[float] = []

        @instrument
        def before(*_: Any) -> None:
            starts.append(time.perf_counter())

        @instrument
        def after(*_: Any) -> None:
            self._parts["forward"] += time.perf_counter() - starts.pop()

        def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                with self.part(name):
                    return call(*args, **kwargs)

            return instrument(run)

        batches = trainer.get_batch_samples

        @instrument
        def counted(*args: Any, **kwargs: Any) -> Any:
            found, items = batches(*args, **kwargs)
            self._tokens += sum(inputs["input_ids"].numel() for inputs in found)
            return found, items

        around_step, watch = trainer.maybe_activation_offload_context, self

        class UntilTheGraphIsFree:
            """In the place of TRL's context around stock's step: what a step returned holds no graph when it ends."""

            def __enter__(self) -> None:
                around_step.__enter__()

            def __exit__(self, *error: Any) -> None:
                if watch._backward_end:
                    watch._parts["backward"] += time.perf_counter() - watch._backward_end
                    watch._backward_end = 0.0
                around_step.__exit__(*error)

        @instrument
        def backward(*args: Any, **kwargs: Any) -> None:
            with self.part("backward"):
                run_backward(*args, **kwargs)
            self._backward_end = time.perf_counter()

        run_backward = accelerator.backward
        hooks = [model.register_forward_pre_hook(before, prepend=True), model.register_forward_hook(after)]
        accelerator.backward = backward
        trainer.maybe_activation_offload_context = UntilTheGraphIsFree()
        accelerator.clip_grad_norm_ = timed("clipping", accelerator.clip_grad_norm_)
        trainer.get_batch_samples = counted
        trainer.add_callback(self)
        try:
            yield
        finally:
            trainer.remove_callback(self)
            trainer.maybe_activation_offload_context = around_step
            del accelerator.backward, accelerator.clip_grad_norm_, trainer.get_batch_samples
            for hook in hooks:
                hook.remove()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._optimizer = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        end = time.perf_counter()
        self._parts["optimizer"] = end - self._optimizer  # its step, the schedule's, and the gradients set to None
        if state.global_step > WARMUP_STEPS:
            self.steps.seconds.append(end - self._last)
            self.steps.inside.append(dict(self._parts))
        if state.global_step in (WARMUP_STEPS, args.max_steps):
            self._at_an_end(state.global_step == WARMUP_STEPS)
        self._parts = dict.fromkeys(ARITHMETIC, 0.0)
        self._last = time.perf_counter()

    def _at_an_end(self, first: bool) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        if first:
            self._start, self._tokens = now, 0
            if self.profile is not None:
                self.profile.start()
        else:
            self.steps.total, self.steps.tokens = now - self._start, self._tokens
            if self.profile is not None:
                self.profile.stop(now - self._start)


class GpuProfile:
    """A profile between `start` and `stop`, both to be called when the device has finished its work."""

    def __init__(self) -> None:
        self._profile = torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        self._window = 0.0

    def start(self) -> None:
        self._profile.start()

    def stop(self, seconds: float) -> None:
        """End the profile, whose window was that many seconds of the host."""
        self._profile.stop()
        self._window = seconds

    def figures(self, micro_steps: int) -> dict[str, Any]:
        """Return, per micro-step, kernels launched, busy seconds of the device, host microseconds outside of waits.

        The host is slower under the profiler, on all sides alike.
        """
        events = list(self._profile.events() or ())
        on_device = device_events(events)
        copies = [event for event in on_device if event.name.startswith(("Memcpy", "Memset"))]
        waits = [event for event in events if event.device_type == DeviceType.CPU and event.name in _WAITS]
        busy, waited = (
            covered((event.time_range.start, event.time_range.end) for event in some) for some in (on_device, waits)
        )
        return {
            "micro_steps": micro_steps,
            "kernels_per_micro_step": (len(on_device) - len(copies)) / micro_steps,
            "copies_per_micro_step": len(copies) / micro_steps,
            "waits_per_micro_step": len(waits) / micro_steps,
            "busy_seconds_per_micro_step": busy / 1e6 / micro_steps,
            "host_microseconds_per_micro_step": (self._window * 1e6 - waited) / micro_steps,
        }
