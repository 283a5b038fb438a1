"""Which kinds of layers this machine has compiled before: Inductor's cache holds their graphs then.

Whether it has a graph is known only after tracing, since its key is made of the traced graph. So a file beside its
entries notes what was compiled; it goes where the cache goes. Where code or settings that it does not know of have
changed, one run takes compiling for cheaper than it is.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastpack_trl._version import __version__
from fastpack_trl.model.upstream import resolve


def note_of(layer: nn.Module, what: tuple[Any, ...]) -> Path | None:
    """Return the file that says that a kind of layer was compiled; None where Inductor has no cache.

    Args:
        layer: one of the kind.
        what: further things that its graph depends on, as plain values.
    """
    import torch._inductor.config as config  # takes a while to load: only where layers may be compiled

    folder = resolve("torch._inductor.runtime.cache_dir_utils.cache_dir")
    if folder is None or config.force_disable_caches or not getattr(config, "fx_graph_cache", True):
        return None
    device = next((parameter.device for parameter in layer.parameters()), torch.device("cpu"))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    tensors = [(key, str(one.dtype), tuple(one.shape), one.requires_grad) for key, one in layer.named_parameters()]
    classes = [f"{type(module).__module__}.{type(module).__qualname__}" for module in layer.modules()]
    parts = (torch.__version__, __version__, name, tensors, classes, what)
    with suppress(OSError):  # the folder cannot be made: compiling will say so
        return Path(folder(), "fastpack_trl", hashlib.sha256(repr(parts).encode()).hexdigest()[:32])
    return None


def was_compiled(note: Path | None) -> bool:
    """Return whether the kind was compiled before."""
    return note is not None and note.exists()


def keep(note: Path | None) -> None:
    """Note that the kind is compiled."""
    if note is not None:
        with suppress(OSError):
            note.parent.mkdir(parents=True, exist_ok=True)
            note.touch()
