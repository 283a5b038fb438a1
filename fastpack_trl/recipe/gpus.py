"""GPUs by name: memory and compute capability, and a context that acts as if one were present."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fastpack_trl.errors import UserError, did_you_mean


@dataclass(frozen=True, slots=True)
class Gpu:
    """A device by its memory and compute capability: ``Gpu("4090", 24.0, (8, 9))``."""

    name: str
    gib: float
    capability: tuple[int, int]
    processes: int = 1
    """Of a run, each with one such device."""
    shards: bool = False
    """FSDP 2 shards the model over them; otherwise each has all of it (DDP)."""

    @property
    def title(self) -> str:
        """Its name, and of several the engine: ``"8 x H100, FSDP 2"``."""
        engine = "FSDP 2" if self.shards else "DDP"
        return f"{self.processes} x {self.name}, {engine}" if self.processes > 1 else self.name


GPUS = {
    name: Gpu(name, gib, capability)
    for name, gib, capability in (
        ("T4", 14.7, (7, 5)), ("3090", 23.7, (8, 6)), ("4090", 23.6, (8, 9)), ("5090", 31.4, (12, 0)),
        ("L4", 22.0, (8, 9)), ("A10", 22.1, (8, 6)), ("L40S", 44.4, (8, 9)), ("A100-40", 39.4, (8, 0)),
        ("A100", 79.3, (8, 0)), ("H100", 79.3, (9, 0)), ("H200", 139.8, (9, 0)), ("B200", 178.4, (10, 0)),
        ("DGX-Spark", 119.6, (12, 1)),
    )
}  # fmt: skip
"""By name, with the memory that the driver leaves to programs: measured for the H200, estimated for the others."""
_BESIDE_A_NAME = {"nvidia", "geforce", "rtx", "tesla", "sxm4", "sxm5", "pcie", "80", "hbm3", ""}
"""Words that drivers and people add to a name: ``NVIDIA A100-SXM4-80GB``."""
COMMON = ("T4", "4090", "A100-40", "H100", "H200")


def gpu_of(text: str) -> Gpu:
    """Return a GPU by its name (``"h100"``, ``"RTX 4090"``), or by memory and capability: ``"24GiB,8.9"``."""
    known = {name.lower(): gpu for name, gpu in GPUS.items()}
    words = (word.removesuffix("gb") for word in re.split(r"[ _-]+", text.lower()))
    if (found := known.get("-".join(word for word in words if word not in _BESIDE_A_NAME))) is not None:
        return found
    given = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:GiB|GB|G)?,\s*(\d+)\.(\d)", text, re.IGNORECASE)
    if given is None:
        forms = f"give memory and compute capability, e.g. --gpu 24GiB,8.9, or one of {', '.join(GPUS)}"
        raise UserError(f"--gpu {text!r} is not known{did_you_mean(text, GPUS)}: {forms}")
    return Gpu(text, float(given[1]), (int(given[2]), int(given[3])))


@contextmanager
def as_if_on(capability: tuple[int, int]) -> Iterator[None]:
    """Let CUDA devices report this capability, so that choices are made as they would be there."""
    import torch

    from fastpack_trl.kernels._triton import is_supported
    from fastpack_trl.model.changes import patch_attribute

    is_supported.cache_clear()
    try:
        with patch_attribute(torch.cuda, "get_device_capability", lambda device=None: capability):
            yield
    finally:
        is_supported.cache_clear()
