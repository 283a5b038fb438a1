"""Checkpointed layers of a model, with their inputs in host memory while the context is open.

Around the checkpoint function of each layer (`model.checkpoint_seam`), and only while it stores the layer's inputs,
stand saved-tensor hooks of ours; the checkpoint itself, its `context_fn` included, is the one that was there.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import psutil
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import Trainer

from fastpack_trl.checkpointing.offloader import MIN_BYTES, LayerInputs, Offloader
from fastpack_trl.checkpointing.streams import GIB, CudaStreams, HostStreams, HostUse
from fastpack_trl.config import check_offload
from fastpack_trl.model.checkpoint_seam import Nesting, checkpoint_wrapped, stock_checkpoint
from fastpack_trl.model.preflight import other_offload
from fastpack_trl.model.upstream import GradientCheckpointingLayer

logger = logging.getLogger(__name__)

Mode = Literal["double_buffer", "single_buffer"]


def offload_unavailable(device: torch.device) -> str:
    """Return why layer inputs gain nothing from host memory on `device`; empty where they may."""
    if device.type != "cuda":
        return f"the model is on {device}: there is no device memory to spare and no copy engine"
    if getattr(torch.cuda.get_device_properties(device), "is_integrated", False):
        return f"{torch.cuda.get_device_name(device)} shares its memory with the host: nothing is freed by a copy"
    return ""


def offload_conflict(args: Any, trainer: Trainer | None = None) -> str:
    """Return which setting of a run excludes our offload, with the remedy; empty where none does."""
    if (other := other_offload(args)) or trainer is None:
        return other
    if trainer.is_deepspeed_enabled:
        return "DeepSpeed is not tested with the offload, so refused: leave one of them out"
    if trainer.is_fsdp_enabled and not trainer.accelerator.is_fsdp2:
        return "FSDP version 1 is not tested with the offload, so refused: set fsdp_version=2, or leave one of them out"
    return ""


def checkpointed_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    """Return the layers of `model` that are checkpointed in training, first to last."""
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    return [layer for layer in layers if layer.gradient_checkpointing and stock_checkpoint(layer) is not None]


def why_not_offloadable(layers: Sequence[GradientCheckpointingLayer]) -> str:
    """Return why the inputs of these layers cannot go to the host, with the remedy; empty where they can."""
    if not layers:
        return "no layer is checkpointed: set gradient_checkpointing=True on a model that supports it"
    for layer in layers:
        inner = stock_checkpoint(layer)
        keywords = inner.keywords if isinstance(inner, functools.partial) else {}
        if keywords.get("use_reentrant", inner is checkpoint):
            return (
                "use_reentrant=True stores layer inputs where no hook sees them: set "
                "gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
        if isinstance(inner, functools.partial) and inner.func is not checkpoint:
            return (
                f"layers are checkpointed by {getattr(inner.func, '__qualname__', inner.func)}, not by "
                "torch.utils.checkpoint: leave out 'offload' in gradient_checkpointing_kwargs"
            )
    return ""


@dataclass(eq=False, kw_only=True)
class Offload:
    """The offload of one model while it is installed.

    Attributes:
        mode: ``double_buffer``, or ``single_buffer`` (each input fetched when it is needed).
        budget_bytes, min_bytes, streams, tell: see `offload_checkpoints`, where `tell` is `say`.
        said: what fell back, each once, in order.
        offloaders: of each device that an input was on.
    """

    mode: Mode
    budget_bytes: int
    min_bytes: int
    streams: Callable[[torch.device], HostStreams]
    tell: Callable[[str], None]
    said: list[str] = field(default_factory=list)
    offloaders: dict[torch.device, Offloader] = field(default_factory=dict)
    _before: weakref.WeakValueDictionary[torch.device, LayerInputs] = field(default_factory=weakref.WeakValueDictionary)
    _local: threading.local = field(default_factory=threading.local)

    @property
    def use(self) -> HostUse:
        """Return the host memory of all devices now. Leases and leased bytes are 0 when no graph is alive."""
        uses = (offloader.use for offloader in self.offloaders.values())
        return HostUse(*map(sum, zip(*uses, strict=True)))

    def trim(self) -> None:
        """Give back host memory that no graph needs."""
        for offloader in self.offloaders.values():
            offloader.trim()

    def say(self, message: str) -> None:
        if message not in self.said:
            self.said.append(message)
            self.tell(f"checkpoint_offload: {message}")

    def inputs(self, index: int, kept: bool, args: tuple[Any, ...]) -> LayerInputs | None:
        """Return what this call may offload; None without gradients and in a nested layer."""
        if getattr(self._local, "inside", False) or not torch.is_grad_enabled():
            return None
        first = args[0] if args else None
        if not isinstance(first, Tensor) or not first.is_floating_point():
            return None
        # What several layers share (masks, positions) is not freed by a copy: only what carries a gradient goes.
        offered = [first, *(arg for arg in args[1:] if isinstance(arg, Tensor) and arg.requires_grad)]
        device = first.device
        offloader = self.offloaders.get(device)
        if offloader is None:
            offloader = self.offloaders[device] = Offloader(
                self.streams(device), budget_bytes=self.budget_bytes, min_bytes=self.min_bytes,
                prefetch=self.mode == "double_buffer", say=self.say,
            )  # fmt: skip
        before = self._before.get(device)
        if before is not None and before.index >= index:
            before = None  # another forward began: its graph is differentiated at another time
        inputs = self._before[device] = LayerInputs(offloader, index, [] if kept else offered, before)
        return inputs

    @torch.compiler.disable
    def call(self, index: int, kept: bool, inner: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run the checkpoint `inner` of a layer: a `model.checkpoint_seam.Wrapper`, once the first two are given."""
        inputs = self.inputs(index, kept, args)
        if inputs is None:
            return inner(function, *args, **kwargs)
        # The checkpoint hides the layer's own saved tensors behind hooks of its own; these see only its inputs.
        with saved_tensors_hooks(inputs.pack, inputs.unpack):
            return inner(functools.partial(self._run, function), *args, **kwargs)

    def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the layer itself, also when it is recomputed: checkpoints inside of it are left as they are."""
        outside = getattr(self._local, "inside", False)
        self._local.inside = True
        try:
            return function(*args, **kwargs)
        finally:
            self._local.inside = outside


@contextmanager
def offload_checkpoints(
    layers: Sequence[GradientCheckpointingLayer],
    mode: Mode = "double_buffer",
    *,
    offload_budget_gib: float | None = None,
    keep_last_layers: int = 1,
    min_bytes: int = MIN_BYTES,
    streams: Callable[[torch.device], HostStreams] = CudaStreams,
    say: Callable[[str], None] = logger.warning,
) -> Iterator[Offload]:
    """Keep the inputs of checkpointed layers in host memory while the context is open.

    Stored bit for bit in their own dtype: loss and gradients are those of the same checkpointing without it. On the
    device remain the input in use, the next one, and those of the last layers.

    Args:
        layers: in the order of the forward pass; each is checkpointed, without reentry (`why_not_offloadable`).
        mode: ``double_buffer`` fetches the next input while a layer is recomputed, ``single_buffer`` each when needed.
        offload_budget_gib: most pinned memory in GiB; None: half of what is free, shared by the processes of this host.
            Past it memory is pageable.
        keep_last_layers: inputs of that many last layers stay on the device: they are needed again at once.
        min_bytes: smaller inputs stay on the device.
        streams: makes the streams of a device, when its first input comes.
        say: called once per fallback.

    Raises:
        ValueError: a budget not above 0, fewer than 0 layers to keep, layers that cannot be offloaded.
    """
    check_offload(offload_budget_gib, keep_last_layers)
    why = why_not_offloadable(layers)
    if why:
        raise ValueError(f"checkpoint_offload={mode!r}: {why}")
    memory, processes = psutil.virtual_memory(), max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    total = memory.total
    budget = memory.available // 2 // processes if offload_budget_gib is None else int(offload_budget_gib * GIB)
    offload = Offload(mode=mode, budget_bytes=min(budget, total), min_bytes=min_bytes, streams=streams, tell=say)
    if budget > total:
        offload.say(f"offload_budget_gib={offload_budget_gib:g} is more than the host has: {total / GIB:.1f} GiB")
    if any(_compiled_around(layer) for layer in layers):
        offload.say("layers compiled around their checkpoint run eagerly: compile what is inside of it")
    with ExitStack() as stack:
        stack.callback(offload.trim)
        for index, layer in enumerate(layers):
            wrapper = functools.partial(offload.call, index, index >= len(layers) - keep_last_layers)
            stack.enter_context(checkpoint_wrapped(layer, wrapper, Nesting.OFFLOAD))
        yield offload


def _compiled_around(layer: nn.Module) -> bool:
    """Return whether a whole layer is compiled by something else than `layer_compile`, which compiles what we run."""
    call = getattr(layer, "_compiled_call_impl", None)
    return call is not None and not type(call).__module__.startswith("fastpack_trl.")
