"""Host syncs: `count_host_syncs` counts the operations that wait for the device, each with its call site."""

from __future__ import annotations

import linecache
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastpack_trl.model.changes import patch_attribute

Kind = Literal["sync", "copy", "host"]

_TORCH = str(Path(torch.__file__).parent)
# Frames below these hold tensors that are on the host in every run: the step counters of torch's optimizers, and the
# tensors of samplers and collators.
_HOST_ROOMS = (f"{_TORCH}/optim/", f"{_TORCH}/utils/data/")
_LOADER = "accelerate/data_loader.py"
_CUDA_MESSAGE = "called a synchronizing CUDA operation"

_ALWAYS = {
    "_local_scalar_dense", "item", "is_nonzero", "equal", "allclose", "nonzero", "nonzero_numpy", "argwhere",
    "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive", "bincount",
}  # fmt: skip
"""Names in aten whose CUDA kernels read a number back to the host, to return it or to size their result."""
_READS = (torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.__repr__, torch.Tensor.__format__)


@dataclass(frozen=True, slots=True)
class HostSync:
    """One call site: ``HostSync("_local_scalar_dense", "sync", ".../sft_trainer.py", 1643, "...item()...", 4)``."""

    op: str
    """The operation in aten or of `torch.Tensor`; ``synchronize`` on CUDA, which does not name it."""
    kind: Kind
    """``sync``: the host reads from the device. ``copy``: a copy to the device that the host waits for. ``host``:
    a read of a tensor that is never on the device (collator, optimizer step counters); nobody waits. On CUDA all are
    ``sync``: torch does not distinguish copies from reads, and host tensors cause no wait."""
    file: str
    """File of the first frame outside torch."""
    line: int
    code: str
    """The source line."""
    count: int

    def __str__(self) -> str:
        return f"{self.count} x {self.op} ({self.kind}) at {self.file}:{self.line}: {self.code}"


@dataclass(slots=True)
class HostSyncs:
    """The host syncs so far; may be read inside the block."""

    backend: Literal["cuda", "dispatch"]
    """``cuda``: torch's own sync debug mode. ``dispatch``: on the CPU, the operations that would wait on CUDA."""
    _seen: Counter[tuple[str, Kind, str, int]] = field(default_factory=Counter)

    @property
    def entries(self) -> list[HostSync]:
        """Return all call sites, the most frequent first."""
        return [
            HostSync(op, kind, file, line, linecache.getline(file, line).strip(), count)
            for (op, kind, file, line), count in self._seen.most_common()
        ]

    @property
    def total(self) -> int:
        """Return the operations that the host waits for: ``sync`` and ``copy``, not ``host``."""
        return sum(count for (_, kind, _, _), count in self._seen.items() if kind != "host")

    def of(self, *kinds: Kind) -> list[HostSync]:
        """Return the call sites of these kinds, e.g. ``of("sync")``."""
        return [entry for entry in self.entries if entry.kind in kinds]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {"backend": self.backend, "total": self.total, "entries": [asdict(entry) for entry in self.entries]}

    def __str__(self) -> str:
        lines = [str(entry) for entry in self.of("sync", "copy")]
        return "\n".join(lines) if lines else "no host sync"


@contextmanager
def count_host_syncs(
    *, device: torch.device | str | None = None, error: bool = False, host: Sequence[str] = ()
) -> Iterator[HostSyncs]:
    """Count the operations in the block for which the host waits for the device.

    ``with count_host_syncs() as syncs: trainer.train()`` and then ``assert syncs.total == 0, syncs``.

    On CUDA, `torch.cuda.set_sync_debug_mode` reports them (it knows copies and read-backs; an explicit
    `torch.cuda.synchronize` or `Event.synchronize` is not reported). A wait in the backward pass is attributed to the
    line that started that pass. On the CPU, a dispatch mode counts the operations that would wait on CUDA; the
    operations are those of this process and thread, and compiled functions run uncompiled.

    Args:
        device: where the model is; default: CUDA if available. Give ``"cpu"`` for a CPU run on a CUDA machine.
        error: raise `RuntimeError` at the first one, so that the traceback shows it.
        host: parts of file names (``"my_project/sampler.py"``) whose tensors are never on the device; counted as
            ``host`` in a CPU run.

    Yields:
        The counts, filled while the block runs.
    """
    on_cuda = torch.cuda.is_available() if device is None else torch.device(device).type == "cuda"
    syncs = HostSyncs("cuda" if on_cuda else "dispatch")
    with _cuda_warnings(syncs, error) if on_cuda else _dispatch(syncs, error, (*_HOST_ROOMS, *host)):
        yield syncs


@contextmanager
def _cuda_warnings(syncs: HostSyncs, error: bool) -> Iterator[None]:
    previous = torch.cuda.get_sync_debug_mode()
    show = warnings.showwarning

    def record(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if _CUDA_MESSAGE not in str(message):
            show(message, *args, **kwargs)
            return
        file, line, _ = _call_site(sys._getframe(1))
        syncs._seen["synchronize", "sync", file, line] += 1

    with warnings.catch_warnings(), patch_attribute(warnings, "showwarning", record):
        warnings.filterwarnings("always", message=_CUDA_MESSAGE)
        torch.cuda.set_sync_debug_mode("error" if error else "warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(previous)


@contextmanager
def _dispatch(syncs: HostSyncs, error: bool, host: tuple[str, ...]) -> Iterator[None]:
    def record(op: str, kind: Kind, loader_only: bool = False) -> None:
        file, line, rooms = _call_site(sys._getframe(2))
        if loader_only and not any(room.endswith(_LOADER) for room in rooms):
            return
        if any(part in room for room in rooms for part in host):
            kind = "host"
        if error and kind != "host":
            raise RuntimeError(f"{op} at {file}:{line} would make the host wait for the device")
        syncs._seen[op, kind, file, line] += 1

    with _Functions(record), _Operations(record):
        yield


def _call_site(frame: FrameType) -> tuple[str, int, list[str]]:
    """Return the file and line of the first frame outside of torch, and the files of all frames."""
    places = [(each.f_code.co_filename, line) for each, line in walk_stack(frame)]
    inner = (_TORCH, "<", __file__, warnings.__file__)
    site = next((place for place in places if not place[0].startswith(inner)), ("<unknown>", 0))
    return *site, [file for file, _ in places]


class _Operations(TorchDispatchMode):
    """Counts operations that reach the kernels, also in the backward pass, which the CPU runs in the calling thread."""

    def __init__(self, record: Callable[..., None]) -> None:
        super().__init__()
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "aten":
            name = func._schema.name.removeprefix("aten::")
            if name in _ALWAYS or _waits(name, args, kwargs):
                self._record(name, "sync")
        return func(*args, **kwargs)


def _waits(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation that synchronizes only for some arguments does so for these."""
    if name == "where":
        return len(args) == 1
    if name == "index":
        return _has_mask(args[1])
    if name in ("index_put", "index_put_", "_index_put_impl_"):
        # A single value uses `masked_fill`, whose result has a known size.
        return _has_mask(args[1]) and args[2].numel() != 1
    if name == "repeat_interleave":
        has_size = kwargs.get("output_size") is not None or (len(args) > 1 and isinstance(args[1], int))
        return not has_size and isinstance(args[0], torch.Tensor)
    if name == "histc":
        low = kwargs.get("min", args[2] if len(args) > 2 else 0)
        high = kwargs.get("max", args[3] if len(args) > 3 else 0)
        return bool(low == high)  # the range is read from the data
    if name == "_to_copy":
        target = kwargs.get("device")
        return target is not None and torch.device(target).type == "cpu" and args[0].device.type != "cpu"
    return False


def _has_mask(indices: Sequence[torch.Tensor | None]) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


class _Functions(TorchFunctionMode):
    """Counts calls that appear as no operation on the CPU: ``tensor.tolist()``, ``tensor.cpu()``, ``str(tensor)``."""

    def __init__(self, record: Callable[..., None]) -> None:
        super().__init__()
        self._record = record

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # `str` of a tensor reads its values while torch disables dispatch modes.
        if func in _READS:
            self._record(func.__name__, "sync")
        elif func is torch.Tensor.to:
            target = kwargs.get("device", args[1] if len(args) > 1 else None)
            if isinstance(target, str) and target == "cpu":
                self._record("to", "sync")
            elif isinstance(target, torch.device) and not _non_blocking(args, kwargs):
                # In other code `to` may name the tensor's own device; in accelerate's loader it moves a batch.
                self._record("to", "copy", loader_only=True)
        elif func is torch.tensor and isinstance(kwargs.get("device"), torch.device):
            # A device object instead of the text "cpu" is another tensor's device. The host waits for this copy.
            self._record("tensor", "copy")
        return func(*args, **kwargs)


def _non_blocking(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    # Tensor.to(device, dtype, non_blocking) or Tensor.to(device, non_blocking=...)
    return bool(kwargs.get("non_blocking", args[3] if len(args) > 3 else args[2] is True if len(args) > 2 else False))
