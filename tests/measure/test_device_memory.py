"""What can still be allocated, within the fraction set for the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_material import build

from fastpack_trl import FastSFTTrainer
from fastpack_trl.measure.device_memory import allocatable, free_memory

GIB = 2**30


@pytest.mark.parametrize(
    ("fraction", "free", "expected"), [(1.0, 50, 50 + 4), (0.25, 50, 25 - 10 + 4), (0.05, 50, 4), (0.5, 3, 3 + 4)]
)
def test_fraction_counts_reserved(monkeypatch: pytest.MonkeyPatch, fraction: float, free: int, expected: int) -> None:
    figures = {
        "mem_get_info": (free * GIB, 100 * GIB), "memory_reserved": 10 * GIB, "memory_allocated": 6 * GIB,
        "get_per_process_memory_fraction": fraction,
    }  # fmt: skip
    for name, value in figures.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    assert allocatable(torch.device("cuda")) == expected * GIB


@pytest.fixture
def limited() -> Iterator[Callable[[int], None]]:
    """Limit the process to so many bytes of the device."""
    total = torch.cuda.mem_get_info()[1]
    yield lambda limit: torch.cuda.set_per_process_memory_fraction(limit / total)
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.cuda
def test_the_allocator_gives_what_is_allocatable_and_no_more(limited: Callable[[int], None]) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    limited(torch.cuda.memory_reserved(device) + 2 * GIB)
    room = allocatable(device)
    assert room <= 2 * GIB + torch.cuda.memory_reserved(device)
    # In torch's cache, left by what ran before in this process: it may be in pieces.
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    held = torch.empty(room - cached - 2**26, dtype=torch.uint8, device=device)
    assert allocatable(device) <= cached + 2**26
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(cached + 2**28, dtype=torch.uint8, device=device)
    del held


@pytest.mark.cuda
def test_a_plan_fits_the_memory_fraction_of_the_process(tmp_path: Path, limited: Callable[[int], None]) -> None:
    options = {"use_cpu": False, "bf16": True, "gradient_checkpointing": True, "eval_strategy": "no"}
    trainer: Any = build(FastSFTTrainer, tmp_path, family="llama", max_steps=2, **options)
    free_memory()
    limit = torch.cuda.memory_reserved() + 2 * GIB  # tensors that earlier tests left count against the fraction
    room = limit - torch.cuda.memory_allocated()
    limited(limit)
    trainer.train()
    plan = trainer.fastpack_report["activation_memory"].reason
    assert 0 < float(plan.split(" GiB of ")[1].split()[0]) * GIB <= room
