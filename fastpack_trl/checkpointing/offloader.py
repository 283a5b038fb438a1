"""Layer inputs in host memory: written in forward, fetched ahead of time in backward.

Forward, layer i begins: its input goes to a leased host buffer, by the copy stream. Backward, layer i is about to be
recomputed: its input is on the device or on its way, and the copy of the input of layer i - 1 is enqueued at once, so
that it runs beside the recompute and the backward of layer i. At most two fetched inputs are on the device: the one in
use and the next.

Device memory of a fetched input comes from torch's allocator and goes back when autograd drops the tensor. A fixed
pair of slots would be overwritten while a retained graph still refers to it.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastpack_trl.checkpointing.streams import HostBuffer, HostPool, HostStreams, HostUse

MIN_BYTES = 2**20
"""Smaller inputs stay on the device: a copy of this size takes 20 us at 55 GB/s, about as long as its launch."""

_ALIGNMENT = 16  # bytes; kernels choose their vector path, and with it the order of a sum, by it


class Pending(NamedTuple):
    """Device memory that a queued copy still reads or writes."""

    tensor: Tensor
    stream: Any
    """The compute stream whose memory it is: it must wait for `copied` before the memory is used again."""
    copied: Any
    """Event: the copy is done."""


class Lease:
    """A packed tensor: its host buffer, until the graph that saved it is dropped.

    That is when autograd is done with the layer, when a graph is never used, and when a step breaks off. Reading does
    not end it: a graph may be retained and read again.
    """

    __slots__ = ("__weakref__", "_offloader", "ahead", "buffer", "dtype", "shape", "stride", "version", "written")

    def __init__(self, offloader: Offloader, tensor: Tensor, buffer: HostBuffer) -> None:
        self._offloader = offloader
        self.buffer = buffer
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        self.version = tensor._version
        self.written: Pending | None = None
        """The layer's input on the device while the copy to the host may still read it."""
        self.ahead: Pending | None = None
        """The input fetched back ahead of time, not read yet."""

    @property
    def host(self) -> Tensor:
        """Return the stored bytes, with shape, strides and dtype of the tensor."""
        return self.buffer.data.view(self.dtype).as_strided(self.shape, self.stride)

    def __del__(self) -> None:
        pending = [copy for copy in (self.written, self.ahead) if copy is not None]
        self._offloader.give_back(self.buffer, pending)


class LayerInputs:
    """One call of a checkpointed layer: what it packed, and the call before it in the same forward.

    Args:
        index: of the layer, for messages.
        offered: the tensors that may go to the host; others are kept.
        before: the previous call of this forward; None for the first.
    """

    __slots__ = ("__weakref__", "_before", "_leases", "_offered", "_offloader", "index")

    def __init__(self, offloader: Offloader, index: int, offered: Sequence[Tensor], before: LayerInputs | None) -> None:
        self.index = index
        self._offloader = offloader
        self._offered = {_place(tensor) for tensor in offered}
        self._before = None if before is None else weakref.ref(before)  # a graph must not keep another alive
        self._leases: list[weakref.ref[Lease]] = []

    @property
    def before(self) -> LayerInputs | None:
        return None if self._before is None else self._before()

    @property
    def leases(self) -> list[Lease]:
        return [lease for lease in (ref() for ref in self._leases) if lease is not None]

    def pack(self, tensor: Tensor) -> Tensor | Lease:
        """Return what autograd keeps in the place of `tensor`; for `saved_tensors_hooks`."""
        lease = self._offloader.write(tensor, self.index) if _place(tensor) in self._offered else None
        if lease is None:
            return tensor
        self._leases.append(weakref.ref(lease))
        return lease

    def unpack(self, packed: Tensor | Lease) -> Tensor:
        """Return the tensor again, bit for bit, and begin to fetch what `before` packed; for `saved_tensors_hooks`."""
        return self._offloader.read(packed, self)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Name the memory that a tensor shows: autograd hands a detached alias to the hook."""
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
        return (id(tensor),)
    return (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def keeps_on_device(tensor: Tensor, streams: HostStreams) -> str:
    """Return why `tensor` cannot be stored and brought back exactly as it is; empty where it can."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided:
        return f"it is a {type(tensor).__name__} of layout {tensor.layout}"
    if tensor.device != streams.device:
        return f"it is on {tensor.device}, not on {streams.device}"
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        return f"its strides {tensor.stride()} leave gaps or overlap"
    if tensor.data_ptr() % _ALIGNMENT:
        return f"its address is no multiple of {_ALIGNMENT}, and kernels may sum in another order at one that is"
    return ""


class Offloader:
    """Writes and fetches layer inputs of one device. Calls may come from any thread.

    Args:
        prefetch: fetch the next input while a layer is recomputed; else each when it is needed.
        say: called with a sentence for each fallback; the receiver says each once.
    """

    def __init__(
        self,
        streams: HostStreams,
        *,
        budget_bytes: int,
        say: Callable[[str], None],
        prefetch: bool = True,
        min_bytes: int = MIN_BYTES,
    ) -> None:
        self.streams = streams
        self.prefetch = prefetch
        self._min_bytes = min_bytes
        self._say = say
        self._pool = HostPool(streams, budget_bytes, say)
        self._lock = threading.Lock()
        self._returned: deque[tuple[HostBuffer, list[Pending]]] = deque()
        self._writing: weakref.ref[Lease] | None = None
        self._ahead: weakref.WeakSet[Lease] = weakref.WeakSet()

    @property
    def use(self) -> HostUse:
        """Return the host memory now."""
        with self._lock:
            self._collect()
            return self._pool.use

    def trim(self) -> None:
        """Give back all host memory that is not leased."""
        with self._lock:
            self._collect()
            self._pool.trim()

    def give_back(self, buffer: HostBuffer, pending: list[Pending]) -> None:
        """End a lease. Called from the garbage collector, at any point of any thread."""
        self._returned.append((buffer, pending))
        if self._lock.acquire(blocking=False):  # else whoever holds it collects later
            try:
                self._collect()
            finally:
                self._lock.release()

    def write(self, tensor: Tensor, index: int) -> Lease | None:
        """Begin to copy `tensor`, the input of layer `index`, to the host; None where it stays on the device.

        Raises:
            RuntimeError: the input of the layer before was changed in place after it was stored.
        """
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes < self._min_bytes:
            return None
        why = keeps_on_device(tensor, self.streams)
        if why:
            self._say(f"the input of layer {index} stays on the device: {why}")
            return None
        with self._lock:
            self._collect()
            buffer = self._pool.acquire(nbytes)
            if buffer is None:
                return None
            lease = Lease(self, tensor, buffer)
            lease.written = self._copy(lease.host, tensor, tensor)
            # Only now, a layer later, is the input before let go: its copy has had the whole layer to finish.
            self._settle()
            self._writing = weakref.ref(lease)
            return lease

    def read(self, packed: Tensor | Lease, inputs: LayerInputs) -> Tensor:
        """Return the packed tensor on the device; compute waits for its copy. Then `inputs.before` is fetched ahead.

        Raises:
            torch.OutOfMemoryError: not even one input fits.
        """
        with self._lock:
            self._collect()
            self._settle()
            tensor = self._take(packed) if isinstance(packed, Lease) else packed
            if self.prefetch:
                self._fetch_before(inputs)
            return tensor

    def _take(self, lease: Lease) -> Tensor:
        compute = self.streams.compute()
        if lease.ahead is not None and lease.ahead.stream != compute:
            self._release(self._off_ahead(lease))  # its memory belongs to another stream than the one that reads it
        if lease.ahead is None:
            try:
                self._fetch(lease)
            except torch.OutOfMemoryError:
                if not self._drop_ahead():
                    raise
                self._fetch(lease)
        tensor, _, copied = self._off_ahead(lease)
        self.streams.wait(compute, copied)  # read before the copy is done: garbage
        return tensor

    def _fetch_before(self, inputs: LayerInputs) -> None:
        before = inputs.before
        wanted = [] if before is None else [lease for lease in before.leases if lease.ahead is None]
        if not wanted:
            return
        # A backward that left its order, or broke off, leaves one fetched that nobody reads: never more than one.
        self._drop_ahead(keep=inputs.leases)
        try:
            for lease in wanted:
                self._fetch(lease)
        except torch.OutOfMemoryError:
            self._drop_ahead(keep=inputs.leases)
            self.prefetch = False
            self._say("a second layer input does not fit on the device: single buffer from here on, without prefetch")

    def _fetch(self, lease: Lease) -> None:
        target = self.streams.device_memory(lease.shape, lease.stride, lease.dtype)
        lease.ahead = self._copy(target, lease.host, target)
        self._ahead.add(lease)

    def _copy(self, target: Tensor, source: Tensor, on_device: Tensor) -> Pending:
        streams, compute = self.streams, self.streams.compute()
        # To the host: the input must be computed before it is copied. Slot reuse, back: what computed with this memory
        # before must be done before the copy writes to it; the copy out of the layer's input, on the same copier, is.
        streams.wait(streams.copier, streams.record(compute))
        streams.copy(target, source)
        return Pending(on_device, compute, streams.record(streams.copier))

    def _drop_ahead(self, keep: Sequence[Lease] = ()) -> bool:
        """Let go of what was fetched and not read, but `keep`; return whether there was any."""
        dropped = [lease for lease in self._ahead if lease not in keep]
        for lease in dropped:
            self._release(self._off_ahead(lease))
        return bool(dropped)

    def _off_ahead(self, lease: Lease) -> Pending:
        pending, lease.ahead = lease.ahead, None
        self._ahead.discard(lease)
        assert pending is not None
        return pending

    def _release(self, pending: Pending) -> None:
        # Without the wait the allocator would hand the memory to a kernel while the copy is still under way.
        self.streams.wait(pending.stream, pending.copied)

    def _settle(self) -> None:
        """Let go of the input that was being written."""
        lease = self._writing() if self._writing is not None else None
        self._writing = None
        if lease is None or lease.written is None:
            return
        pending, lease.written = lease.written, None
        self._release(pending)
        if pending.tensor._version != lease.version:
            raise RuntimeError(
                f"the input of a checkpointed layer, {tuple(lease.shape)}, was changed in place after it was stored: "
                "its recompute would see another input; set checkpoint_offload='off'"
            )

    def _collect(self) -> None:
        """Take back what ended leases held."""
        while self._returned:
            buffer, pending = self._returned.popleft()
            for copy in pending:
                self._release(copy)
            self._pool.release(buffer)
