"""Inputs of checkpointed layers in host memory: copied out in the forward pass, fetched ahead in the backward pass.

Forward: when layer i begins, the copy stream copies its input to the layer's pinned buffer. Backward: when layer i is
about to be recomputed, its input is on the device or on its way, and the copy of the input of layer i - 1 is enqueued
at once, so that it overlaps with the recompute and the backward of layer i. Two fetched inputs at most are on the
device: the one in use and the next.

Fetched inputs live in memory of torch's allocator, which gets it back when autograd drops them: a fixed pair of slots
would be overwritten while a retained graph still refers to it. What is irregular stays on the device.

Saved-tensor hooks surround the checkpoint function of each layer (`model.checkpoint_seam`) only while it stores the
layer's inputs; the checkpoint itself, its `context_fn` included, stays the one that was there.
"""

from __future__ import annotations

import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import psutil
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from fastpack_trl.checkpointing.streams import GIB, Streams
from fastpack_trl.model.checkpoint_seam import checkpoint_wrapped, is_reentrant, stock_checkpoint
from fastpack_trl.model.upstream import GradientCheckpointingLayer

logger = logging.getLogger(__name__)

Mode = Literal["double_buffer", "single_buffer"]

MIN_BYTES = 2**20
"""Smaller inputs stay on the device: a copy of this size takes 20 us at 55 GB/s, about as long as its launch."""

_ALIGNMENT = 16  # bytes; kernels choose their vector path, and with it the order of a sum, by it


def why_not_offloadable(layers: Sequence[GradientCheckpointingLayer]) -> str:
    """Return why the inputs of these layers cannot be offloaded, with the fix; empty if they can."""
    if not layers:
        return "no layer is checkpointed: set gradient_checkpointing=True on a model that supports it"
    for inner in map(stock_checkpoint, layers):
        if isinstance(inner, functools.partial) and inner.func is not checkpoint:
            return (
                f"layers are checkpointed by {getattr(inner.func, '__qualname__', inner.func)}, not by "
                "torch.utils.checkpoint: leave out 'offload' in gradient_checkpointing_kwargs"
            )
        if inner is checkpoint or is_reentrant(inner):
            return (
                "use_reentrant=True stores layer inputs where no hook sees them: set "
                "gradient_checkpointing_kwargs={'use_reentrant': False}"
            )
    return ""


class HostUse(NamedTuple):
    """Bytes of host memory: `held` by live graphs, `most_held` by each layer so far, in all, and `pinned`."""

    held: int = 0
    most_held: int = 0
    pinned: int = 0

    def __str__(self) -> str:
        return f"{self.most_held / GIB:.2f} GiB used, {self.pinned / GIB:.2f} GiB pinned"


@dataclass(slots=True, weakref_slot=True, eq=False)
class SavedInput:
    """What autograd keeps of one call of a layer: its input, on the device or in the layer's host buffer.

    Attributes:
        index: of the layer.
        source: the input, or its bytes in host memory with the same shape, strides and dtype.
        streams: of its device.
        on_host: whether `source` is in host memory.
        version: of the input on the device when it was saved.
    """

    index: int
    source: Tensor
    streams: Streams
    on_host: bool = False
    version: int = 0


class _Copy(NamedTuple):
    """An enqueued copy of the input that `saved` returns while it is alive; `done` is its event.

    `memory` of the device, in its `version` at that time, belongs to the stream `compute`. It is without the graph:
    what autograd hands to a hook keeps the layers before it alive.
    """

    saved: Callable[[], SavedInput | None]
    memory: Tensor
    streams: Streams
    compute: Any
    done: Any
    version: int

    def finish(self) -> None:
        # Without the wait, a kernel would read the memory before the copy is done, which is garbage, or be given it by
        # the allocator while the copy is in flight.
        self.streams.wait(self.compute, self.done)


class Offload:
    """The offload of one model while it is installed. Calls may come from any thread.

    Args:
        mode: ``double_buffer``, or ``single_buffer``: each input is fetched when it is needed.
        budget_bytes: most host memory to pin.
        streams: makes the streams of a device.
        tell: called with the message of each fallback, which is logged too.

    Attributes:
        prefetch: fetch the next input while a layer is recomputed.
        fallbacks: messages about fallbacks, each once, in order.
    """

    def __init__(
        self, mode: Mode, *, budget_bytes: int, streams: Callable[[torch.device], Streams] = Streams,
        tell: Callable[[str], object] = lambda _: None,
    ) -> None:  # fmt: skip
        self.prefetch = mode == "double_buffer"
        self.fallbacks: list[str] = []
        self._budget, self._tell = budget_bytes, tell
        self._streams = functools.cache(streams)
        self._lock = threading.Lock()
        self._buffers: dict[int, Tensor] = {}
        self._holders: weakref.WeakValueDictionary[int, SavedInput] = weakref.WeakValueDictionary()
        """By layer, the input that is in its buffer."""
        self._most: dict[int, int] = {}
        self._writing: _Copy | None = None
        self._ahead: _Copy | None = None

    @property
    def use(self) -> HostUse:
        """Return the host memory in use; nothing is held when no graph is alive."""
        held = sum(saved.source.nbytes for saved in self._holders.values())
        return HostUse(held, sum(self._most.values()), sum(map(len, self._buffers.values())))

    def say(self, message: str) -> None:
        if message not in self.fallbacks:
            self.fallbacks.append(message)
            logger.warning(f"checkpoint_offload: {message}")
            self._tell(message)

    @torch.compiler.disable
    def call(self, index: int, keep: bool, inner: Any, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Run the checkpoint `inner` of a layer: a `model.checkpoint_seam.Wrapper`, once the first two are given."""
        if not torch.is_grad_enabled() or not args or not isinstance(args[0], Tensor):
            return inner(function, *args, **kwargs)
        place = _place(args[0])

        def pack(tensor: Tensor) -> Tensor | SavedInput:
            # Masks and positions are shared by all layers: a copy would free nothing.
            return self.pack(index, tensor, keep=keep) if _place(tensor) == place else tensor

        # The checkpoint hides the layer's own saved tensors behind hooks of its own; these see only its inputs.
        with saved_tensors_hooks(pack, self.unpack):
            return inner(function, *args, **kwargs)

    def pack(self, index: int, tensor: Tensor, *, keep: bool) -> SavedInput:
        """Start copying `tensor` (input of layer `index`) to the host; return what autograd saves in its place.

        Args:
            keep: leave it on the device: backward needs it at once.

        Raises:
            RuntimeError: the input of the layer before was changed in place after it was saved.
        """
        with self._lock:
            # Only now, a layer later, is the input before let go: its copy had the whole layer to finish.
            self._finish_write()
            self._drop_ahead()
            saved = SavedInput(index, tensor, self._streams(tensor.device), version=tensor._version)
            if not keep and tensor.nbytes >= MIN_BYTES:
                if why := self._why_kept(saved):
                    self.say(f"layer inputs stay on the device: {why}")
                else:
                    self._write(saved, tensor)
            return saved

    def unpack(self, saved: SavedInput | Tensor) -> Tensor:
        """Return the input, bit for bit; compute waits for its copy. The copy of the input before it begins.

        Raises:
            torch.OutOfMemoryError: not even one input fits.
        """
        if isinstance(saved, Tensor):
            return saved
        with self._lock:
            self._finish_write()
            tensor = self._take(saved) if saved.on_host else saved.source
            if not saved.on_host:
                _check_unchanged(tensor, saved.version)
            # If another graph holds the buffer of this layer, it holds those before too.
            is_own = saved.on_host or saved.index not in self._holders
            before = self._holders.get(saved.index - 1) if self.prefetch and is_own else None
            if before is not None and not (self._ahead and self._ahead.saved() is before):
                self._drop_ahead()
                try:
                    self._ahead = self._fetch(before)
                except torch.OutOfMemoryError:
                    self.prefetch = False
                    self.say("a second layer input does not fit on the device: single buffer, without prefetch")
            return tensor

    def close(self) -> None:
        """Wait for copies in flight, and free buffers and fetched inputs."""
        with self._lock:
            self._finish_write()
            self._drop_ahead()
            self._buffers.clear()

    def _why_kept(self, saved: SavedInput) -> str:
        """Give a layer a buffer for its input; return why the input stays on the device, empty if it has one."""
        index, tensor = saved.index, saved.source
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return f"one is a {type(tensor).__name__} of layout {tensor.layout}"
        if not torch.ops.aten.is_non_overlapping_and_dense(tensor) or tensor.data_ptr() % _ALIGNMENT:
            return f"one has gaps or overlaps in memory, or is not aligned to {_ALIGNMENT} bytes"
        if index in self._holders:
            return "another graph that is not used yet has their buffer"
        # A free buffer may be written at once although a copy out of it is enqueued: one stream has all copies.
        if index in self._buffers and len(self._buffers[index]) >= tensor.nbytes:
            return ""
        self._buffers.pop(index, None)
        size = 1 << (tensor.nbytes - 1).bit_length()  # what torch's pinned allocator takes for so many bytes
        if self.use.pinned + size > self._budget:
            return f"half of the host memory that was free, {self._budget / GIB:.3g} GiB, is in use"
        try:
            self._buffers[index] = saved.streams.host_memory(size)
        except (RuntimeError, MemoryError) as error:
            self._budget = self.use.pinned  # not tried again in each layer of each step
            return f"host memory cannot be pinned ({str(error).partition(chr(10))[0] or type(error).__name__})"
        return ""

    def _write(self, saved: SavedInput, tensor: Tensor) -> None:
        host = self._buffers[saved.index][: tensor.nbytes].view(tensor.dtype)
        saved.source, saved.on_host = host.as_strided(tensor.shape, tensor.stride()), True
        self._holders[saved.index] = saved
        self._most[saved.index] = max(self._most.get(saved.index, 0), tensor.nbytes)
        self._writing = self._copy(saved, saved.source, tensor, tensor.detach())

    def _finish_write(self) -> None:
        """Let go of the input whose copy to the host was enqueued last."""
        copy, self._writing = self._writing, None
        if copy is not None:
            copy.finish()
            if copy.saved() is not None:
                _check_unchanged(copy.memory, copy.version)

    def _take(self, saved: SavedInput) -> Tensor:
        ahead = self._ahead
        if ahead is not None and (ahead.saved() is not saved or ahead.compute != saved.streams.compute()):
            ahead = None
            self._drop_ahead()  # of a backward pass that left its order or broke off
        copy, self._ahead = ahead or self._fetch(saved), None
        copy.finish()
        return copy.memory

    def _fetch(self, saved: SavedInput) -> _Copy:
        source = saved.source
        target = saved.streams.device_memory(source.shape, source.stride(), source.dtype)
        return self._copy(saved, target, source, target)

    def _copy(self, saved: SavedInput, target: Tensor, source: Tensor, memory: Tensor) -> _Copy:
        streams, compute = saved.streams, saved.streams.compute()
        # To the host: the input must be computed before it is copied. Back, slot reuse: what computed with this memory
        # before must be done before the copy writes to it; the copy to the host is, on the same stream.
        streams.wait(streams.copier, streams.record(compute))
        streams.copy(target, source)
        return _Copy(weakref.ref(saved), memory, streams, compute, streams.record(streams.copier), memory._version)

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.finish()
            self._ahead = None


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
        keep_last: number of final layers whose inputs stay on the device: backward needs them immediately.
        options: `budget_bytes`, `streams`, `tell` of `Offload`.

    Raises:
        ValueError: layers that cannot be offloaded.
    """
    if why := why_not_offloadable(layers):
        raise ValueError(f"checkpoint_offload={mode!r}: {why}")
    processes = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    options.setdefault("budget_bytes", psutil.virtual_memory().available // 2 // processes)
    offload = Offload(mode, **options)
    with ExitStack() as stack:
        stack.callback(offload.close)
        for index, layer in enumerate(layers):
            wrapper = functools.partial(offload.call, index, index >= len(layers) - keep_last)
            stack.enter_context(checkpoint_wrapped(layer, wrapper))
        yield offload


def _check_unchanged(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(
            f"the input of a checkpointed layer, {tuple(tensor.shape)}, was changed in place after it was saved: its "
            "recompute would see another input; set checkpoint_offload='off'"
        )
