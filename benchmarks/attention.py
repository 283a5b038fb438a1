"""Attention alone: forward and backward of every backend that loads, on packed rows of real document lengths.

Rates are counted by three conventions, all named in the record. ``full_square``: every pair of tokens of a document,
as torch counts its own attention; ``causal_half``: half of that, as flash-attention papers count; ``attended``: the
pairs that the mask lets through, the window included. A pair costs ``4 * head_dim`` operations per head forward (two
products) and ``10 * head_dim`` backward (five).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.attention_sides import NAMES, TIMES_BUDGET, Attend, Heads, Layer, check, prepare, refusal
from fastpack_trl.bench.environment import limited_threads
from fastpack_trl.bench.result_file import ResultFile, RowTask, run_rows
from fastpack_trl.errors import UserError, did_you_mean
from fastpack_trl.measure.device_memory import PeakMemory, free_memory
from fastpack_trl.measure.failures import attempt
from fastpack_trl.measure.intervals import median_interval, summary
from fastpack_trl.measure.record import OtherLoad
from fastpack_trl.measure.rounds import take_turns
from fastpack_trl.measure.timing import Clock, clock_of
from fastpack_trl.packing.packed_batch import PackedBatch

CASE = "attention"
FORWARD_PER_PAIR, BACKWARD_PER_PAIR = 4, 10  # operations per head and per unit of head_dim
DEFAULT_ROUNDS, DEFAULT_SECONDS = 9, 480.0
WARMUP, LEAST_ROUNDS = 2, 3
DOCUMENTS: dict[str, int | None] = {"short": 150, "medium": 1500, "row": None}
"""Mean tokens per document; None: one document as long as the row."""

_SPREAD = 0.5  # lengths are uniform within this share of the mean on both sides
_COMPILED_SHAPES = 64  # flex compiles once per kind of layer, more often than torch allows by default


@dataclass(frozen=True, slots=True)
class Grid:
    """The rows of a device: every row length with every kind of layer."""

    tokens: tuple[int, ...]
    layers: tuple[Heads, ...]
    windows: tuple[int | None, ...]
    dtypes: tuple[torch.dtype, ...]


CUDA = Grid(
    (8192, 2048, 32768),
    (Heads(32, 8, 128), Heads(16, 8, 128), Heads(64, 8, 64, sinks=True)),
    (None, 128, 4096),
    (torch.bfloat16,),
)
CPU = Grid((512, 2048), (Heads(4, 2, 32), Heads(4, 2, 32, sinks=True)), (None, 128), (torch.float32, torch.bfloat16))


@dataclass(frozen=True, slots=True)
class Configuration:
    """One row of the result."""

    layer: Layer
    tokens: int
    documents: str
    lengths: tuple[int, ...]

    def pairs(self) -> dict[str, float]:
        """Return the pairs of tokens by convention."""
        square = float(sum(length**2 for length in self.lengths))
        window = self.layer.window or self.tokens
        attended = 0
        for length in self.lengths:
            seen = min(length, window)
            attended += seen * (seen + 1) // 2 + (length - seen) * seen
        return {"full_square": square, "causal_half": square / 2, "attended": float(attended)}

    def describe(self) -> dict[str, Any]:
        heads = self.layer.heads
        dtype = str(self.layer.dtype).removeprefix("torch.")
        return {
            "setting": f"{self.tokens:,} tokens, {heads}, {dtype}",
            "tokens": self.tokens,
            "heads": heads.heads,
            "kv_heads": heads.kv_heads,
            "head_dim": heads.head_dim,
            "sinks": heads.sinks,
            "dtype": dtype,
            "window": self.layer.window,
            "documents": self.documents,
            "lengths": list(self.lengths),
            "pairs": self.pairs(),
        }


def configurations(plan: Grid, device: str, seed: int) -> list[Configuration]:
    """Return all rows of a plan in the order in which they are measured, without windows that no document exceeds."""
    found = []
    for tokens in plan.tokens:
        for heads in plan.layers:
            for dtype in plan.dtypes:
                for documents, mean in DOCUMENTS.items():
                    lengths = document_lengths(tokens, mean, seed)
                    if documents != "row" and len(lengths) == 1:
                        continue  # the same as the row itself
                    for window in plan.windows:
                        if window is None or window < max(lengths):
                            layer = Layer(heads, window, dtype, device)
                            found.append(Configuration(layer, tokens, documents, lengths))
    return found


def document_lengths(tokens: int, mean: int | None, seed: int) -> tuple[int, ...]:
    """Draw lengths around `mean` (None: one document) that fill a row of `tokens`; the last one is cut."""
    if mean is None:
        return (tokens,)
    random = np.random.default_rng(seed)
    low, high = int(mean * (1 - _SPREAD)), int(mean * (1 + _SPREAD))
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, int(random.integers(low, high + 1))))
    return tuple(lengths)


def measure(
    *,
    tokens: Sequence[int] | None = None,
    backends: Sequence[str] | None = None,
    rounds: int = DEFAULT_ROUNDS,
    seconds: float = DEFAULT_SECONDS,
    threads: int = 2,
    device: str = "cpu",
    seed: int = 0,
    plan: Grid | None = None,
    progress: bool = False,
    file: ResultFile | None = None,
) -> dict[str, Any]:
    """Time every backend in turn, forward and backward, after each has been compared with float64.

    Args:
        tokens: row lengths; by default those of the plan.
        backends: only these; all by default. flex compiles for each kind of layer, which can take most of the budget.
        rounds: timed passes per backend at most; 6 or more give an interval of 95 %.
        seconds: for the whole call; each row may use an equal share of what is left, and a row that finds no time is
            skipped, named.
        threads: torch's intra-op threads.
        device: ``cpu`` or ``cuda``.
        seed: of lengths and values.
        plan: other layers; `CPU` or `CUDA` by default.
        progress: show a progress bar (on a terminal).
        file: written after every row; what it has of this very run is taken over (`run_rows`).

    Returns:
        A record (`make_record`). A row has ``backends``: per name seconds, rates in TFLOP/s by convention for forward
        and backward, bytes of memory and the errors of the check; or the reason under ``refused`` (not tried),
        ``wrong`` (over twice the error of dense attention, not timed) or ``failed`` (it raised).

    Raises:
        UserError: no round, no time, a row length below 1, a backend that does not exist.
    """
    if rounds < 1 or threads < 1 or seconds <= 0:
        raise UserError(f"rounds={rounds}, threads={threads}, seconds={seconds:g}: each must be above 0")
    if tokens and min(tokens) < 1:
        raise UserError(f"tokens={min(tokens)} is below 1: a row has at least one token")
    chosen = tuple(backends or NAMES)
    for name in chosen:
        if name not in NAMES:
            raise UserError(f"there is no backend {name!r}{did_you_mean(name, NAMES)} (backends: {', '.join(NAMES)})")
    plan = plan or (CUDA if device == "cuda" else CPU)
    if tokens:
        plan = Grid(tuple(tokens), plan.layers, plan.windows, plan.dtypes)
    planned = configurations(plan, device, seed)
    checks: dict[tuple[str, Layer], dict[str, Any]] = {}
    tasks = [
        RowTask(
            configuration.describe(),
            partial(_measure_row, configuration, chosen, checks, rounds, seed=seed),
            empty={"backends": {}},
        )
        for configuration in planned
    ]
    with limited_threads(threads), _compiling():
        return run_rows(
            tasks,
            case=CASE,
            settings={
                "rounds": rounds,
                "backends": list(chosen),
                "documents": {name: mean or "one per row" for name, mean in DOCUMENTS.items()},
                "flops": {
                    "forward": f"{FORWARD_PER_PAIR} * heads * head_dim * pairs",
                    "backward": f"{BACKWARD_PER_PAIR} * heads * head_dim * pairs",
                    "full_square": "pairs: sum of squared document lengths",
                    "causal_half": "pairs: half of full_square",
                    "attended": "pairs: those that mask and window let through",
                },
                "gate": f"within {TIMES_BUDGET:g} x dense attention's error against float64, on a small row",
                "interval": "order statistics of the median; `coverage` is the least probability that they cover it",
            },
            apart={"seconds": seconds},
            seconds=seconds,
            device=device,
            threads=threads,
            seed=seed,
            file=file,
            progress=progress,
        )


def _measure_row(
    configuration: Configuration,
    names: Sequence[str],
    checks: dict[tuple[str, Layer], dict[str, Any]],
    rounds: int,
    seconds: float,
    seed: int,
) -> dict[str, Any]:
    layer, device = configuration.layer, configuration.layer.device
    start = time.perf_counter()
    batch = PackedBatch.from_lengths(configuration.lengths).to(device)
    inputs = layer.inputs(configuration.tokens, seed)
    upstream = torch.randn(
        1, configuration.tokens, layer.heads.heads, layer.heads.head_dim, dtype=layer.dtype, device=device,
        generator=torch.Generator(device).manual_seed(seed + 1),
    )  # fmt: skip
    clock = clock_of(device)
    backends: dict[str, dict[str, Any]] = {}
    sides = {}
    for name in names:
        reason = refusal(name, layer)
        if reason:
            backends[name] = {"refused": reason}
            continue
        gate = _checked(name, layer, checks)
        backends[name] = dict(gate)
        if "errors" not in gate or gate["wrong"]:
            continue
        attend, failure = attempt(partial(prepare, name, layer, batch))
        if attend is None:
            backends[name]["failed"] = failure
        else:
            sides[name] = partial(_pass, attend, inputs, upstream, clock, device)
    if not sides:
        return {"backends": backends, "order": [], "other_load": None}
    load = OtherLoad()
    found = take_turns(
        sides,
        rounds=rounds,
        warmup=WARMUP,
        seconds=seconds - (time.perf_counter() - start),
        least=min(LEAST_ROUNDS, rounds),
        clock=clock,
        begin=load.restart,
        dropped=lambda *_: free_memory(device),
    )
    for name in sides:
        if name in found.failed:
            backends[name]["failed"] = found.failed[name]
            continue
        passes = found.results[name]
        backends[name] |= {
            "forward": _rates(configuration, FORWARD_PER_PAIR, [clock.seconds(p.start, p.middle) for p in passes]),
            "backward": _rates(configuration, BACKWARD_PER_PAIR, [clock.seconds(p.middle, p.end) for p in passes]),
            "memory": passes[-1].memory,
        }
    return {"backends": backends, "order": found.order, "other_load": load.cores()}


def _checked(name: str, layer: Layer, checks: dict[tuple[str, Layer], dict[str, Any]]) -> dict[str, Any]:
    """Return the check of a backend for a layer, made once per run."""
    if (name, layer) not in checks:
        found, failure = attempt(partial(check, name, layer))
        checks[name, layer] = found if found is not None else {"failed": f"in its check: {failure}"}
    return checks[name, layer]


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward and backward pass: three marks of the clock, and bytes of memory."""

    start: Any
    middle: Any
    end: Any
    memory: dict[str, int] | None


def _pass(attend: Attend, inputs: list[Tensor], upstream: Tensor, clock: Clock, device: str) -> Pass:
    memory = PeakMemory(device)
    start = clock.mark()
    out = attend(inputs)
    middle = clock.mark()
    torch.autograd.grad(out, inputs, upstream)
    return Pass(start, middle, clock.mark(), memory.read())


def _rates(configuration: Configuration, per_pair: int, seconds: list[float]) -> dict[str, Any]:
    heads = configuration.layer.heads
    taken = median_interval(seconds)
    rates: dict[str, Any] = {}
    for convention, pairs in configuration.pairs().items():
        operations = per_pair * heads.heads * heads.head_dim * pairs / 1e12
        rates[convention] = {
            "median": operations / taken.median,
            "low": operations / taken.high,
            "high": operations / taken.low,
        }
    return {"seconds": summary(seconds), "tflops": rates}


@contextmanager
def _compiling() -> Iterator[None]:
    """Leave room for one compiled flex per kind of layer, and raise if it is used up: nothing runs uncompiled."""
    import torch._dynamo.config as config

    with config.patch(recompile_limit=_COMPILED_SHAPES, fail_on_recompile_limit_hit=True):
        yield
