"""Tokens of a layer's experts found expert by expert, or by one sort: the same products, one expert after the other.

The loop is transformers' own (``eager``). The side that sorts runs the same products on slices of rows that lie in the
order of their experts. A third side is this package's: sorted once, and grouped products instead of a loop.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from benchmarks import moe
from benchmarks.arithmetic import routing_saved
from benchmarks.by_itself_row import passes_of, row_of
from benchmarks.cases import loaded_turns
from benchmarks.moe import decoder
from benchmarks.moe_sides import OURS, SHAPES, implementation, routing
from fastpack_trl.measure.rounds import take_turns
from fastpack_trl.measure.timing import Clock, clock_of
from fastpack_trl.moe.feature import apply_moe

Expert: TypeAlias = Callable[[int, Tensor], Tensor]
"""Number of an expert and its rows (n, H) -> (n, H)."""
LOOP, SORTED = "expert by expert", "one sort"
ROWS = {
    f"gpt-oss-20b-routing-{tokens}": moe.Row("decoder", "gpt-oss-20b", 4, "frozen", tokens, checkpointing=True)
    for tokens in (2048, 8192)
}
TINY = {
    f"gpt-oss-20b-routing-{name}": moe.Row("decoder", "tiny-gpt-oss", 2, "frozen", tokens, checkpointing=True)
    for name, tokens in ((2048, 64), (8192, 256))
}
WARMUP, TOLERANCE = 2, 3e-2
_NAME = "fastpack_benchmark_sorted_loop"
_ALONE = 9


def measure_row(row: moe.Row, rounds: int, device: str, seed: int, seconds: float) -> dict[str, Any]:
    """Time forward and backward of the sides in turn, over one set of weights, and both dispatches by themselves."""
    start = time.perf_counter()
    clock = clock_of(device)
    contexts: dict[str, Callable[[nn.Module], Any]] = {
        LOOP: partial(implementation, name="eager"), SORTED: sorted_loop, OURS: apply_moe,
    }  # fmt: skip
    with decoder(row, device, seed) as subject:
        turns, busy = loaded_turns(
            {name: partial(subject.run, enter, device) for name, enter in contexts.items()}, device,
            rounds=rounds, warmup=WARMUP, seconds=seconds - (time.perf_counter() - start), clock=clock,
        )  # fmt: skip
    passes = passes_of(turns, clock)
    alone = {name: dispatch_seconds(call, row, device, seed, clock) for name, call in DISPATCHES.items()}
    predicted = routing_saved(row.layers, alone[LOOP], alone[SORTED], recomputed=row.checkpointing)
    parts = {"layers": row.layers, "dispatch_seconds": alone}
    found = row_of(passes, turns.failed, LOOP, SORTED, predicted, parts, TOLERANCE)
    return found | {**subject.facts, "other_load": busy}


def run_sorted(hidden: Tensor, ids: Tensor, weights: Tensor, experts: int, expert: Expert) -> Tensor:
    """Return the weighted sum of the experts of each token, found by one sort and one read of the device.

    Args:
        hidden: (T, H).
        ids: (T, k) experts.
        weights: (T, k).
        expert: computes the rows of one.
    """
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    tokens = order // ids.shape[1]
    counts = torch.bincount(flat, minlength=experts).tolist()
    parts = hidden[tokens].split(counts)
    out = torch.cat([expert(number, rows) for number, rows in enumerate(parts) if len(rows)])
    weighted = out * weights.flatten()[order, None]
    return torch.zeros_like(hidden).index_add(0, tokens, weighted.to(hidden.dtype))


def run_loop(hidden: Tensor, ids: Tensor, weights: Tensor, experts: int, expert: Expert) -> Tensor:
    """Return the same with the dispatch of transformers' loop: a mask per expert, two reads of the device for each."""
    out = torch.zeros_like(hidden)
    with torch.no_grad():
        mask = nn.functional.one_hot(ids, num_classes=experts).permute(2, 1, 0)
        hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
    for (number,) in hit:
        if number == experts:
            continue
        slot, tokens = torch.where(mask[number])
        weighted = expert(number, hidden[tokens]) * weights[tokens, slot, None]
        out = out.index_add(0, tokens, weighted.to(hidden.dtype))
    return out


DISPATCHES: dict[str, Callable[..., Tensor]] = {LOOP: run_loop, SORTED: run_sorted}


@contextlib.contextmanager
def sorted_loop(model: nn.Module) -> Iterator[None]:
    """Run the experts of `model` one after the other on rows that are sorted once, inside."""
    from transformers.integrations.moe import ExpertsInterface

    def run(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        def expert(number: int, rows: Tensor) -> Tensor:
            inner = self._apply_gate(rows @ self.gate_up_proj[number] + self.gate_up_proj_bias[number])
            out: Tensor = inner @ self.down_proj[number] + self.down_proj_bias[number]
            return out

        return run_sorted(hidden_states, top_k_index, top_k_weights, self.num_experts, expert)

    ExpertsInterface.register(_NAME, run)
    with implementation(model, _NAME):
        yield


def dispatch_seconds(
    call: Callable[..., Tensor], row: moe.Row, device: str, seed: int, clock: Clock
) -> tuple[float, float]:  # fmt: skip
    """Return the median seconds of a dispatch and sum whose experts do nothing, forward and backward."""
    fields = SHAPES[row.model].fields
    experts = int(fields["num_local_experts"])
    ids, weights = routing(row.tokens, int(fields["num_experts_per_tok"]), experts, False, seed, device)
    generator = torch.Generator(device).manual_seed(seed)
    hidden = torch.randn(row.tokens, int(fields["hidden_size"]), generator=generator, device=device).to(torch.bfloat16)
    hidden.requires_grad_()
    marks: list[tuple[Any, Any, Any]] = []

    def dispatch() -> None:
        begin = clock.mark()
        out = call(hidden, ids, weights.to(hidden.dtype), experts, lambda number, rows: rows)
        middle = clock.mark()
        out.backward(out.detach())
        marks.append((begin, middle, clock.mark()))

    take_turns({"dispatch": dispatch}, rounds=_ALONE, warmup=2, clock=clock)
    timed = marks[-_ALONE:]
    return median(clock.seconds(a, b) for a, b, _ in timed), median(clock.seconds(b, c) for _, b, c in timed)
