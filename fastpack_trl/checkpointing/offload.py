"""The checkpointed layers of a model with their inputs in host memory while a context is open.

Saved-tensor hooks surround the checkpoint function of each layer (`model.checkpoint_seam`) only while it stores the
layer's inputs; the checkpoint itself, its `context_fn` included, stays the one that was there.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import psutil
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from transformers import Trainer

from fastpack_trl.checkpointing.offloader import MIN_BYTES, HostUse, Offloader, SavedInput
from fastpack_trl.checkpointing.streams import CudaStreams, HostStreams
from fastpack_trl.model.checkpoint_seam import Nesting, checkpoint_wrapped, stock_checkpoint
from fastpack_trl.model.preflight import other_offload
from fastpack_trl.model.upstream import GradientCheckpointingLayer

logger = logging.getLogger(__name__)

Mode = Literal["double_buffer", "single_buffer"]


def offload_unavailable(device: torch.device) -> str:
    """Return why offloading layer inputs gains nothing on `device`; empty if it may gain."""
    if device.type != "cuda":
        return f"the model is on {device}: there is no device memory to spare and no copy engine"
    if getattr(torch.cuda.get_device_properties(device), "is_integrated", False):
        return f"{torch.cuda.get_device_name(device)} shares its memory with the host: nothing is freed by a copy"
    return ""


def offload_conflict(args: Any, trainer: Trainer | None = None) -> str:
    """Return which setting of a run excludes our offload, with the fix; empty if none does."""
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
    """Return why the inputs of these layers cannot be offloaded, with the fix; empty if they can."""
    if not layers:
        return "no layer is checkpointed: set gradient_checkpointing=True on a model that supports it"
    for inner in map(stock_checkpoint, layers):
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


class Offload:
    """The offload of one model while it is installed.

    Attributes:
        mode: ``double_buffer``, or ``single_buffer`` (each input is fetched when it is needed).
        said: the fallbacks, each once, in order.
        offloaders: one per device that had an input.
    """

    def __init__(
        self,
        mode: Mode,
        *,
        budget_bytes: int,
        min_bytes: int = MIN_BYTES,
        streams: Callable[[torch.device], HostStreams] = CudaStreams,
        tell: Callable[[str], None] = logger.warning,
    ) -> None:
        self.mode: Mode = mode
        self.said: list[str] = []
        self.offloaders: dict[torch.device, Offloader] = {}
        self._budget, self._min_bytes, self._streams, self._tell = budget_bytes, min_bytes, streams, tell
        self._local = threading.local()

    @property
    def use(self) -> HostUse:
        """Return the host memory of all devices."""
        uses = (offloader.use for offloader in self.offloaders.values())
        return HostUse(*map(sum, zip(*uses, strict=True)))

    def say(self, message: str) -> None:
        if message not in self.said:
            self.said.append(message)
            self._tell(f"checkpoint_offload: {message}")

    def offloader(self, device: torch.device) -> Offloader:
        """Return the offloader of `device`, made when its first input comes."""
        if device not in self.offloaders:
            self.offloaders[device] = Offloader(
                self._streams(device), budget_bytes=self._budget, min_bytes=self._min_bytes,
                prefetch=self.mode == "double_buffer", say=self.say,
            )  # fmt: skip
        return self.offloaders[device]

    def close(self) -> None:
        for offloader in self.offloaders.values():
            offloader.close()

    @torch.compiler.disable
    def call(self, index: int, keep: bool, inner: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run the checkpoint `inner` of a layer: a `model.checkpoint_seam.Wrapper`, once the first two are given."""
        hidden = args[0] if args else None
        inside = getattr(self._local, "inside", False) or not torch.is_grad_enabled()
        if inside or not isinstance(hidden, Tensor) or not hidden.is_floating_point():
            return inner(function, *args, **kwargs)
        offloader, place = self.offloader(hidden.device), _place(hidden)

        def pack(tensor: Tensor) -> Tensor | SavedInput:
            # Masks and positions are shared by all layers: a copy would free nothing.
            return offloader.pack(index, tensor, keep=keep) if _place(tensor) == place else tensor

        def unpack(saved: Tensor | SavedInput) -> Tensor:
            return offloader.unpack(saved) if isinstance(saved, SavedInput) else saved

        # The checkpoint hides the layer's own saved tensors behind hooks of its own; these see only its inputs.
        with saved_tensors_hooks(pack, unpack):
            return inner(functools.partial(self._run, function), *args, **kwargs)

    def _run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the layer itself, also when it is recomputed: checkpoints inside of it are left as they are."""
        outside = getattr(self._local, "inside", False)
        self._local.inside = True
        try:
            return function(*args, **kwargs)
        finally:
            self._local.inside = outside


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Return the memory that a tensor shows: autograd hands a detached alias to the hook."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


@contextmanager
def offload_checkpoints(
    layers: Sequence[GradientCheckpointingLayer], mode: Mode = "double_buffer", *, keep_last: int = 1, **options: Any
) -> Iterator[Offload]:
    """Keep the inputs of checkpointed layers in host memory while the context is open.

    Stored bit for bit in their own dtype: loss and gradients equal those of the same checkpointing without it. On the
    device remain the input in use, the next one, and those of the last layers. Pinned memory takes half of the free
    host memory at most, which the processes of this host share.

    Args:
        layers: in the order of the forward pass; each is checkpointed without reentry (`why_not_offloadable`).
        mode: ``double_buffer`` fetches the next input while a layer is recomputed, ``single_buffer`` each when needed.
        keep_last: number of final layers whose inputs stay on the device: backward needs them at once.
        options: `min_bytes`, `streams`, `tell` of `Offload`.

    Raises:
        ValueError: layers that cannot be offloaded.
    """
    if why := why_not_offloadable(layers):
        raise ValueError(f"checkpoint_offload={mode!r}: {why}")
    processes = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    options.setdefault("budget_bytes", psutil.virtual_memory().available // 2 // processes)
    offload = Offload(mode, **options)
    if any(_compiled_around(layer) for layer in layers):
        offload.say("layers compiled around their checkpoint run eagerly: compile what is inside of it")
    with ExitStack() as stack:
        stack.callback(offload.close)
        for index, layer in enumerate(layers):
            wrapper = functools.partial(offload.call, index, index >= len(layers) - keep_last)
            stack.enter_context(checkpoint_wrapped(layer, wrapper, Nesting.OFFLOAD))
        yield offload


def _compiled_around(layer: nn.Module) -> bool:
    """Return whether a whole layer is compiled by something else than `layer_compile`, which compiles what we run."""
    call = getattr(layer, "_compiled_call_impl", None)
    return call is not None and not type(call).__module__.startswith("fastpack_trl.")
