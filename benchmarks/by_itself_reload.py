"""Layer inputs fetched back from host memory one by one, or each while the layer after it runs: decoders with LoRA."""

from __future__ import annotations

import contextlib
import time
from functools import partial
from statistics import median
from typing import Any

import torch

from benchmarks.activation_memory import (
    CHECKPOINT,
    DOCUMENT,
    OURS,
    SINGLE,
    WORKLOADS,
    Batch,
    DecoderSide,
    Workload,
    side,
)
from benchmarks.arithmetic import reload_saved
from benchmarks.by_itself_row import passes_of, row_of
from benchmarks.cases import Pass, loaded_turns
from benchmarks.lora_models import LoraModel, build
from fastpack_trl.checkpointing.streams import host_copy_seconds
from fastpack_trl.measure.timing import Clock, clock_of

SIDES = (SINGLE, OURS, CHECKPOINT)
ROWS = {f"{name}-reload": WORKLOADS[name] for name in ("qwen3-8b", "qwen3-14b", "qwen3-32b")}
TINY: dict[str, Workload] = {
    "qwen3-8b-reload": (LoraModel("tiny-qwen3", "bf16"), 3, 256),
    "qwen3-14b-reload": (LoraModel("tiny-qwen3", "nf4"), 3, 256),
    "qwen3-32b-reload": (LoraModel("tiny-qwen3", "nf4"), 3, 128),
}
WARMUP = 1
TOLERANCE = 0.0
"""Of the loss: fetching an input back changes no bit of it."""


def measure_row(row: Workload, rounds: int, device: str, seed: int, seconds: float) -> dict[str, Any]:
    """Time forward and backward of the sides in turn, over one set of weights, and one copy by itself."""
    start = time.perf_counter()
    model, layers, tokens = row
    clock = clock_of(device)
    weights = build(model, layers=layers, positions=tokens, seed=seed, device=device)
    config = weights.get_base_model().config
    batch = Batch.of(tokens, min(DOCUMENT, tokens), int(config.vocab_size), device, seed)
    nbytes = tokens * int(config.hidden_size) * weights.get_input_embeddings().weight.element_size()
    with contextlib.ExitStack() as stack:
        sides = {name: stack.enter_context(side(name, weights, device)) for name in SIDES}
        turns, busy = loaded_turns(
            {name: partial(_pass, made, batch, clock) for name, made in sides.items()}, device, rounds=rounds,
            warmup=WARMUP, seconds=seconds - (time.perf_counter() - start), clock=clock,
        )  # fmt: skip
    passes = passes_of(turns, clock)
    rate = nbytes / host_copy_seconds(torch.device("cuda"), nbytes)(nbytes) if device == "cuda" else float("inf")
    behind = median(one.backward for one in passes[OURS]) / layers if passes.get(OURS) else 0.0
    parts = {"layers": layers, "layer_input_bytes": nbytes, "bytes_per_second": rate, "layer_backward_seconds": behind}
    predicted = reload_saved(layers, nbytes, rate, behind)
    return row_of(passes, turns.failed, SINGLE, OURS, predicted, parts, TOLERANCE) | {"other_load": busy}


def _pass(made: DecoderSide, batch: Batch, clock: Clock) -> tuple[Pass, torch.Tensor]:
    start, middle = clock.mark(), []
    loss, memory = made.step(batch, between=lambda: middle.append(clock.mark()))
    return Pass(start, middle[0], clock.mark(), memory), loss
