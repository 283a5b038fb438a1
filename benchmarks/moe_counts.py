"""Counts per step and experts implementation: sorts, look-ups of an expert's tokens, host syncs."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.moe import Row, decoder
from benchmarks.moe_sides import OURS, SHAPES, implementation
from fastpack_trl.measure.host_syncs import count_host_syncs
from fastpack_trl.moe.apply import apply_moe

LOOP, SORTED = "eager", "grouped_mm"


def count(
    model: str,
    *,
    tokens: int,
    layers: int | None = None,
    checkpointing: bool = True,
    device: str = "cpu",
    seed: int = 0,
) -> list[dict[str, Any]]:
    """Count operations of one forward and backward pass of a decoder with expert LoRA (rank 16).

    The sides: transformers' loop over experts (``eager``), its ``grouped_mm``, and ours.

    Args:
        model: a name in `moe_sides.SHAPES`.
        tokens: of the packed row.
        layers: decoder layers; by default those of the shape.
        checkpointing: layers are recomputed in backward.
        device: ``cpu`` or ``cuda``.
        seed: of weights and documents.

    Returns:
        One row per side: ``side``, ``layers``, ``sorts``, ``lookups`` (operations that search for an expert's tokens)
        and ``host_syncs``.
    """
    depth = int(SHAPES[model].cut_to(layers).fields["num_hidden_layers"])
    sides: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
        LOOP: partial(implementation, name=LOOP),
        SORTED: partial(implementation, name=SORTED),
        OURS: apply_moe,
    }
    rows = []
    with decoder(Row("decoder", model, depth, "lora", tokens, checkpointing=checkpointing), device, seed) as subject:

        def step() -> None:
            subject.forward().backward(subject.upstream)

        for name, enter in sides.items():
            with enter(subject.model):
                # One after the other: the profiler would see what the counter of waits dispatches again.
                with count_host_syncs() as syncs:
                    step()
                with profile(activities=[ProfilerActivity.CPU]) as seen:
                    step()
            counts = {event.key: event.count for event in seen.key_averages()}
            rows.append(
                {
                    "side": name,
                    "layers": depth,
                    "sorts": counts.get("aten::sort", 0),
                    "lookups": counts.get("aten::nonzero", 0),
                    "host_syncs": syncs.total,
                }
            )
    return rows
