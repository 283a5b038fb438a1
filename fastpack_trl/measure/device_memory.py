"""Device memory around a measurement: the peak of a step, and unused memory given back."""

from __future__ import annotations

import gc


def free_memory(device: str) -> None:
    """Give unused device memory back, so that the next side does not run in what a failed one left."""
    gc.collect()
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()


class PeakMemory:
    """Bytes of device memory that a step needs at most, and those that lie there before it; None on the CPU."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.before: int | None = None
        if device == "cuda":
            import torch

            torch.cuda.reset_peak_memory_stats()
            self.before = int(torch.cuda.memory_allocated())

    def read(self) -> dict[str, int] | None:
        """Return ``{"peak_bytes", "before_bytes"}`` since construction; None on the CPU."""
        if self.before is None:
            return None
        import torch

        return {"peak_bytes": int(torch.cuda.max_memory_allocated()), "before_bytes": self.before}
