"""Peaks of device memory: what was allocated, and what torch held of the device, with its CUDA graphs and caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.side_table import peak_cell
from fastpack_trl import ThroughputCallback
from fastpack_trl.bench.run_watch import peaks_gib
from fastpack_trl.bench.side import SideMemory


def test_the_peak_of_a_card_has_what_torch_holds_beside_allocations(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device: a step that allocates 42 GiB beside graphs of 20."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *_: 42 * 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda *_: 63 * 2**30)
    monkeypatch.setattr(torch.cuda, "host_memory_stats", dict)
    callback: Any = ThroughputCallback()
    callback._device, callback._facts = torch.device("cuda"), None
    assert callback._state_figures() == {"memory/peak_gib": 42, "memory/reserved_gib": 63}
    assert peaks_gib("cuda") == {"peak_gib": 42, "reserved_gib": 63}
    assert peak_cell([peaks_gib("cuda")]) == "63.0"
    assert peak_cell([{"peak_gib": 7.5}]) == "7.5"  # a record of before
    assert peak_cell([peaks_gib("cpu")]) == "-"


def test_a_side_is_told_what_torch_took_for_it_and_not_what_others_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    allocated, reserved = [10, 12], [14, 19]  # of the others at first; now, and at most
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, at in (("memory_allocated", 0), ("max_memory_allocated", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda at=at: allocated[at])
    for name, at in (("memory_reserved", 0), ("max_memory_reserved", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda at=at: reserved[at])
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "host_memory_stats", dict)
    memory = SideMemory()
    with memory.counted():
        allocated[:], reserved[:] = [13, 16], [20, 21]  # a graph keeps what was allocated while it was recorded
    assert (memory.resident, memory.peak, memory.reserved) == (3, 6, 7)
    with memory.counted():
        allocated[1], reserved[1] = 14, 20
    assert (memory.resident, memory.peak, memory.reserved) == (3, 4, 6)


@pytest.mark.cuda
def test_what_a_graph_holds_is_in_the_reserved_peak_alone() -> None:
    device, size = torch.device("cuda", torch.cuda.current_device()), 2**28
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    graph, source = torch.cuda.CUDAGraph(), torch.ones(size // 4, device=device)
    with torch.cuda.graph(graph):
        small = (source * 2 + source * 3).sum()
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats()
    graph.replay()
    assert float(small) == 5 * size / 4
    peaks = {name: gib or 0.0 for name, gib in peaks_gib("cuda").items()}
    assert held >= 2 * size
    assert peaks["reserved_gib"] * 2**30 >= peaks["peak_gib"] * 2**30 + 2 * size
