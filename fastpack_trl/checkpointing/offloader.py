"""Inputs of checkpointed layers in host memory: copied out in the forward pass, fetched ahead in the backward pass.

Forward: when layer i begins, the copy stream copies its input to the layer's pinned buffer. Backward: when layer i is
about to be recomputed, its input is on the device or on its way, and the copy of the input of layer i - 1 is enqueued
at once, so that it overlaps with the recompute and the backward of layer i. Two fetched inputs at most are on the
device: the one in use and the next.

Fetched inputs live in memory of torch's allocator, which gets it back when autograd drops them: a fixed pair of slots
would be overwritten while a retained graph still refers to it. What is irregular stays on the device.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpack_trl.checkpointing.streams import GIB, HostStreams

MIN_BYTES = 2**20
"""Smaller inputs stay on the device: a copy of this size takes 20 us at 55 GB/s, about as long as its launch."""

_ALIGNMENT = 16  # bytes; kernels choose their vector path, and with it the order of a sum, by it


class HostUse(NamedTuple):
    """Bytes of host memory: `held` by live graphs, `most_held` by each layer so far, in all, and `pinned`."""

    held: int = 0
    most_held: int = 0
    pinned: int = 0

    def __str__(self) -> str:
        return f"{self.most_held / GIB:.2f} GiB used, {self.pinned / GIB:.2f} GiB pinned"


class _Pending(NamedTuple):
    """Device memory of a compute stream that an enqueued copy still reads or writes."""

    memory: Tensor
    """Without the graph: what autograd hands to a hook keeps the layers before it alive."""
    stream: Any
    copied: Any
    """Event: the copy is done."""


class SavedInput:
    """What autograd keeps of one call of a layer: its input, on the device or in the layer's host buffer.

    Attributes:
        index: of the layer.
        source: the input, or its bytes in host memory with the same shape, strides and dtype.
        on_host: whether `source` is in host memory.
        written: the input on the device, until its copy to the host has had a layer's time.
        before: the input that the same forward pass saved before; a graph must not keep another one alive.
    """

    __slots__ = ("__weakref__", "before", "index", "on_host", "source", "written")

    def __init__(self, index: int, source: Tensor, on_host: bool, before: SavedInput | None) -> None:
        self.index, self.source, self.on_host = index, source, on_host
        self.before = None if before is None else weakref.ref(before)
        self.written: Tensor | None = None


class Offloader:
    """Copies and fetches layer inputs of one device. Calls may come from any thread.

    Args:
        budget_bytes: most host memory to pin.
        min_bytes: smaller inputs stay on the device.
        prefetch: fetch the next input while a layer is recomputed; else each when it is needed.
        say: called with a sentence for each fallback.
    """

    def __init__(
        self, streams: HostStreams, *, budget_bytes: int, min_bytes: int, prefetch: bool, say: Callable[[str], None]
    ) -> None:
        self.streams, self.prefetch = streams, prefetch
        self._budget, self._min_bytes, self._say = budget_bytes, min_bytes, say
        self._lock = threading.Lock()
        self._buffers: dict[int, Tensor] = {}
        self._holders: dict[int, weakref.ref[SavedInput]] = {}
        self._last: weakref.ref[SavedInput] | None = None
        self._most: dict[int, int] = {}
        self._writing: tuple[weakref.ref[SavedInput], _Pending, int] | None = None
        self._ahead: tuple[weakref.ref[SavedInput], _Pending] | None = None

    @property
    def use(self) -> HostUse:
        """Return the host memory in use; nothing is held when no graph is alive."""
        holders = [holder() for holder in self._holders.values()]
        held = sum(saved.source.nbytes for saved in holders if saved is not None)
        return HostUse(held, sum(self._most.values()), sum(map(len, self._buffers.values())))

    def pack(self, index: int, tensor: Tensor, *, keep: bool) -> SavedInput:
        """Return what autograd keeps of `tensor`, the input of layer `index`; its copy to the host has begun.

        Args:
            keep: leave it on the device: backward needs it at once.

        Raises:
            RuntimeError: the input of the layer before was changed in place after it was saved.
        """
        with self._lock:
            # Only now, a layer later, is the input before let go: its copy had the whole layer to finish.
            self._finish_write()
            self._drop_ahead()
            last = None if self._last is None else self._last()
            before = last if last is not None and last.index < index else None  # else another forward pass began
            host = None if keep or tensor.nbytes < self._min_bytes else self._host(index, tensor)
            saved = SavedInput(index, tensor if host is None else host, host is not None, before)
            self._last = weakref.ref(saved)
            if host is not None:
                self._holders[index], saved.written = self._last, tensor
                self._writing = self._last, self._copy(host, tensor, tensor.data), tensor._version
                self._most[index] = max(self._most.get(index, 0), tensor.nbytes)
            return saved

    def unpack(self, saved: SavedInput) -> Tensor:
        """Return the input, bit for bit; compute waits for its copy. The copy of the input before it begins.

        Raises:
            torch.OutOfMemoryError: not even one input fits.
        """
        with self._lock:
            self._finish_write()
            tensor = self._take(saved) if saved.on_host else saved.source
            before = saved.before() if self.prefetch and saved.before is not None else None
            if before is not None and before.on_host:
                self._fetch_ahead(before)
            return tensor

    def close(self) -> None:
        """Wait for copies in flight, and free buffers and fetched inputs."""
        with self._lock:
            self._finish_write()
            self._drop_ahead()
            self._buffers.clear()

    def _host(self, index: int, tensor: Tensor) -> Tensor | None:
        """Return the bytes of the layer's buffer with the layout of `tensor`; None if it stays on the device."""
        why = self._why_kept(index, tensor) or self._grow(index, tensor.nbytes)
        if why:
            self._say(f"layer inputs stay on the device: {why}")
            return None
        data = self._buffers[index][: tensor.nbytes]
        return data.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def _why_kept(self, index: int, tensor: Tensor) -> str:
        if type(tensor) is not Tensor or tensor.layout is not torch.strided:
            return f"one is a {type(tensor).__name__} of layout {tensor.layout}"
        if tensor.device != self.streams.device:
            return f"one is on {tensor.device}, not on {self.streams.device}"
        if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
            return "the strides of one leave gaps or overlap"
        if tensor.data_ptr() % _ALIGNMENT:
            return f"one is not aligned to {_ALIGNMENT} bytes, and kernels may sum in another order if it is"
        holder = self._holders.get(index)
        # A free buffer may be written at once although a copy out of it is enqueued: one stream has all copies.
        return "" if holder is None or holder() is None else "another graph that is not used yet has their buffer"

    def _grow(self, index: int, nbytes: int) -> str:
        """Give a layer a buffer of `nbytes` or more; return why it cannot be had."""
        if index in self._buffers and len(self._buffers[index]) >= nbytes:
            return ""
        self._buffers.pop(index, None)
        size = 1 << (nbytes - 1).bit_length()  # what torch's pinned allocator takes for `nbytes`
        if self.use.pinned + size > self._budget:
            return f"half of the host memory that was free, {self._budget / GIB:.3g} GiB, is in use"
        try:
            self._buffers[index] = self.streams.host_memory(size)
        except (RuntimeError, MemoryError) as error:
            self._budget = self.use.pinned  # not tried again in each layer of each step
            return f"host memory cannot be pinned ({str(error).partition(chr(10))[0] or type(error).__name__})"
        return ""

    def _take(self, saved: SavedInput) -> Tensor:
        compute = self.streams.compute()
        fetched = None
        if self._ahead is not None and self._ahead[0]() is saved and self._ahead[1].stream == compute:
            fetched, self._ahead = self._ahead[1], None
        if fetched is None:
            try:
                fetched = self._fetch(saved)
            except torch.OutOfMemoryError:
                if self._ahead is None:
                    raise
                self._drop_ahead()
                fetched = self._fetch(saved)
        self.streams.wait(compute, fetched.copied)  # read before the copy is done: garbage
        return fetched.memory

    def _fetch_ahead(self, before: SavedInput) -> None:
        if self._ahead is not None and self._ahead[0]() is before:
            return
        self._drop_ahead()  # of a backward pass that left its order or broke off
        try:
            self._ahead = weakref.ref(before), self._fetch(before)
        except torch.OutOfMemoryError:
            self.prefetch = False
            self._say("a second layer input does not fit on the device: single buffer from here on, without prefetch")

    def _fetch(self, saved: SavedInput) -> _Pending:
        source = saved.source
        target = self.streams.device_memory(source.shape, source.stride(), source.dtype)
        return self._copy(target, source, target)

    def _copy(self, target: Tensor, source: Tensor, memory: Tensor) -> _Pending:
        streams, compute = self.streams, self.streams.compute()
        # To the host: the input must be computed before it is copied. Back, slot reuse: what computed with this memory
        # before must be done before the copy writes to it; the copy to the host is, on the same stream.
        streams.wait(streams.copier, streams.record(compute))
        streams.copy(target, source)
        return _Pending(memory, compute, streams.record(streams.copier))

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._release(self._ahead[1])
            self._ahead = None

    def _release(self, pending: _Pending) -> None:
        # Without the wait, the allocator would give the memory to a kernel while the copy is in flight.
        self.streams.wait(pending.stream, pending.copied)

    def _finish_write(self) -> None:
        """Let go of the input whose copy to the host was enqueued last."""
        if self._writing is None:
            return
        (writing, pending, version), self._writing = self._writing, None
        self._release(pending)
        saved = writing()
        if saved is None:
            return
        written, saved.written = saved.written, None
        if written is not None and written._version != version:
            raise RuntimeError(
                f"the input of a checkpointed layer, {tuple(written.shape)}, was changed in place after it was saved, "
                "so that its recompute would see another input: set checkpoint_offload='off'"
            )
