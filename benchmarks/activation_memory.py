"""Layer inputs in host memory beside checkpointing without, upstream's offloads, and our own without prefetch.

All sides train one set of weights on the same packed row, in turns.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.activation_auto import measure_auto
from benchmarks.activation_sides import CHECKPOINT, OURS, SIDES, SINGLE, Batch, DecoderSide, side
from benchmarks.lora_models import LoraModel, build
from benchmarks.model_shapes import shape_of
from benchmarks.published import RELOAD_GAINS
from benchmarks.side_turns import largest_memory
from fastpack_trl.bench.environment import limited_threads, quiet
from fastpack_trl.bench.result_file import ResultFile, RowTask, run_rows
from fastpack_trl.checkpointing.buffers import GIB
from fastpack_trl.checkpointing.trace import host_copy_seconds
from fastpack_trl.errors import UserError
from fastpack_trl.measure.device_memory import free_memory
from fastpack_trl.measure.failures import attempt
from fastpack_trl.measure.intervals import median_interval, summary
from fastpack_trl.measure.record import OtherLoad
from fastpack_trl.measure.rounds import Rounds, take_turns
from fastpack_trl.measure.timing import Clock, clock_of

Workload = tuple[LoraModel, int, int]
"""Model, decoder layers, tokens of the row."""

WORKLOADS: dict[str, Workload] = {
    "qwen3-8b": (LoraModel("qwen3-8b", "bf16"), 12, 49_152),
    "qwen3-14b": (LoraModel("qwen3-14b", "nf4"), 10, 49_152),
    "qwen3-32b": (LoraModel("qwen3-32b", "nf4"), 8, 24_576),
    "small": (LoraModel("small", "fp32"), 4, 256),
}
"""By the name that ``--model`` takes."""
DOCUMENT, WARMUP, LEAST_ROUNDS = 4096, 2, 3
CAPS_GIB = (24, 48, 80)
GRADIENT_TOLERANCE = 1e-3
"""Relative, of the norm: a flash backward adds up in no fixed order. Losses must be equal."""
AUTO_TOKENS = 8192
_STEP_TOKENS = 1024  # resolution of the largest row that fits


def measure(
    names: Sequence[str],
    *,
    tokens: int | None = None,
    layers: int | None = None,
    rounds: int = 7,
    seconds: float = 480.0,
    caps: Sequence[float] = CAPS_GIB,
    auto: bool = True,
    threads: int = 2,
    device: str = "cpu",
    seed: int = 0,
    progress: bool = False,
    file: ResultFile | None = None,
) -> dict[str, Any]:
    """Time forward and backward of decoders under each way to keep layer inputs.

    ``checkpoint``: on the device. ``transformers_offload``: ``{"offload": True}``, on the compute stream.
    ``single_buffer``: ours without prefetch. ``trl_offload``: ``activation_offloading=True``. ``double_buffer``: ours.

    Args:
        names: of `WORKLOADS`.
        tokens, layers: instead of those of the workload.
        rounds: timed steps per side at most; 6 or more give an interval of 95 %.
        seconds: for the whole call, row by row an equal share of what is left.
        caps: device memory in GiB under which the largest row is looked for (CUDA).
        auto: also a row with whole trainers, `activation_memory` at its default beside stock with and without
            checkpointing.
        threads: torch's intra-op threads.
        device: ``cpu`` or ``cuda``.
        seed: of weights and tokens.
        progress: show a progress bar (on a terminal).
        file: written after every row; what it has of this very run is taken over (`run_rows`).

    Returns:
        A record (`make_record`). A row has ``sides`` (seconds, memory, loss), ``ratios`` (seconds of each other side /
        ours), ``copies`` (predicted before and measured from events) and ``largest_row`` (tokens per cap).

    Raises:
        UserError: an unknown name; no round; no time.
    """
    for name in names:
        if name not in WORKLOADS:
            raise UserError(f"there is no workload {name!r} (workloads: {', '.join(WORKLOADS)})")
    if rounds < 1 or seconds <= 0:
        raise UserError(f"rounds={rounds}, seconds={seconds:g}: each must be above 0")
    wanted = [(name, False) for name in names] + ([(names[0], True)] if auto else [])
    tasks = [
        row_task(name, WORKLOADS[name], whole, tokens, layers, rounds, caps, device, seed) for name, whole in wanted
    ]
    with limited_threads(threads), quiet():
        return run_rows(
            tasks,
            case="activation_memory",
            settings={
                "document_tokens": DOCUMENT,
                "loss": "mean square of the last hidden states; the head is left out (decoder rows)",
                "rounds": rounds,
                "warmup_steps": WARMUP,
                "gate": f"losses equal, norm of the gradients within {GRADIENT_TOLERANCE:g}",
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


def row_task(
    name: str, workload: Workload, whole: bool, tokens: int | None, layers: int | None, rounds: int,
    caps: Sequence[float], device: str, seed: int,
) -> RowTask:  # fmt: skip
    """Return one row: decoder layers under each way to keep layer inputs, or whole trainers; the rest as `measure`."""
    model, default_layers, default_tokens = workload
    count, length = layers or default_layers, tokens or default_tokens
    if whole:
        length = min(length, AUTO_TOKENS)
    shape = shape_of(model.shape).cut_to(layers if whole else count)
    what = "whole trainers, activation_memory=auto" if whole else "decoder, bf16 autocast"
    label = {
        "setting": f"{model.name}, {shape.layers} of {shape.published_layers} layers, {what}",
        "model": name, "tokens": length, "layers": shape.layers,
    }  # fmt: skip
    if whole:
        return RowTask(label, partial(measure_auto, model, layers, length, rounds, device=device, seed=seed))
    return RowTask(
        label, partial(_measure_row, name, model, count, length, rounds, caps=caps, device=device, seed=seed)
    )


def _measure_row(
    name: str, model: LoraModel, layers: int, tokens: int, rounds: int, seconds: float, caps: Sequence[float],
    device: str, seed: int,
) -> dict[str, Any]:  # fmt: skip
    start = time.perf_counter()
    clock = clock_of(device)
    weights = build(model, layers=layers, positions=tokens, seed=seed, device=device)
    config = weights.get_base_model().config
    batch = Batch.of(tokens, min(DOCUMENT, tokens), int(config.vocab_size), device, seed)
    failed: dict[str, str] = {}
    gates: dict[str, tuple[float, float]] = {}
    with contextlib.ExitStack() as stack:
        sides: dict[str, DecoderSide] = {}
        for label in SIDES:
            made, failure = attempt(partial(_enter, stack, label, weights, device))
            if made is None:
                failed[label] = failure or ""
                continue
            found, failure = attempt(partial(_gate, made, batch))
            if found is None:
                failed[label] = failure or ""
                attempt(partial(free_memory, device))
                continue
            sides[label], gates[label] = made, found
        failed |= _different(gates)
        sides = {label: made for label, made in sides.items() if label not in failed}
        if not sides:
            return {"sides": {label: {"failed": why} for label, why in failed.items()}, "ratios": {}}
        nbytes = tokens * int(config.hidden_size) * weights.get_input_embeddings().weight.element_size()
        predicted = _predicted(sides, batch, layers, nbytes, device, clock)
        load = OtherLoad()
        turns: Rounds[Any] = take_turns(
            {label: partial(made.step, batch) for label, made in sides.items()},
            rounds=rounds,
            warmup=WARMUP,
            seconds=(seconds - (time.perf_counter() - start)) * (0.5 if caps and device == "cuda" else 1.0),
            least=min(LEAST_ROUNDS, rounds),
            clock=clock,
            begin=load.restart,
            dropped=lambda *_: free_memory(device),
        )
        other_load = load.cores()
        failed |= turns.failed
        use = {label: str(made.offload.use) for label, made in sides.items() if made.offload is not None}
        said = {label: made.offload.said for label, made in sides.items() if made.offload is not None}
    free_memory(device)
    largest = {}
    if device == "cuda" and caps:
        end_at = start + seconds
        vocabulary = int(config.vocab_size)
        largest = {
            label: {
                f"{cap:g}": _largest_row(label, weights, cap, tokens, vocabulary, turns, end_at, seed) for cap in caps
            }
            for label in (CHECKPOINT, OURS)
        }
    figures = {
        label: {"failed": failed[label]} if label in failed else _figures(turns, label, tokens, said.get(label, []))
        for label in SIDES
    }
    gain = turns.ratio(SINGLE, OURS)["median"] - 1 if {SINGLE, OURS} <= turns.seconds.keys() else None
    return {
        "sides": figures,
        "ratios": {label: turns.ratio(label, OURS) for label in turns.seconds if label != OURS}
        if OURS in turns.seconds
        else {},
        "copies": {
            **predicted,
            "bytes_per_layer_input": nbytes,
            "gain_over_single_buffer": gain,
            "published_gain": RELOAD_GAINS.get(name),
            "events": {label: _hidden(label, weights, batch, device) for label in (SINGLE, OURS)},
            "host_memory": use,
        },
        "largest_row": largest,
        "order": turns.order,
        "other_load": other_load,
    }


def _enter(stack: contextlib.ExitStack, label: str, weights: Any, device: str) -> DecoderSide:
    return stack.enter_context(side(label, weights, device))


def _gate(made: DecoderSide, batch: Batch) -> tuple[float, float]:
    loss, _ = made.step(batch)
    return float(loss), made.gradient_norm()


def _different(gates: dict[str, tuple[float, float]]) -> dict[str, str]:
    """Return the sides whose loss or gradients are not those of checkpointing without offload, with the reason."""
    if CHECKPOINT not in gates:
        return {}
    loss, norm = gates[CHECKPOINT]
    return {
        label: f"its loss is {mine:.8g}, not {loss:.8g}, or its gradients are {size:.6g}, not {norm:.6g}"
        for label, (mine, size) in gates.items()
        if mine != loss or not abs(size - norm) <= GRADIENT_TOLERANCE * norm
    }


def _predicted(
    sides: dict[str, DecoderSide], batch: Batch, layers: int, nbytes: int, device: str, clock: Clock
) -> dict[str, Any]:
    """Predict, before the timed rounds, what hiding every copy back is worth: from the bus and from one step."""
    if device != "cuda" or CHECKPOINT not in sides:
        return {"predicted_gain": None}
    copies = (layers - 1) * host_copy_seconds(torch.device("cuda"))(nbytes)  # the last layer's input stays
    sides[CHECKPOINT].step(batch)
    clock.synchronise()
    start = clock.mark()
    sides[CHECKPOINT].step(batch)
    end = clock.mark()
    clock.synchronise()
    taken = clock.seconds(start, end)
    return {"predicted_gain": copies / taken, "predicted_copy_seconds": copies, "step_seconds_before": taken}


def _hidden(label: str, weights: Any, batch: Batch, device: str) -> dict[str, Any] | None:
    """Return the copy time and stalls of one step, from events on the streams, and the share of copy time that hid."""
    if device != "cuda":
        return None
    with side(label, weights, device, timed=True) as made:
        for _ in range(WARMUP):
            made.step(batch)
        if not made.timed:
            return None
        made.timed[0].take()
        made.step(batch)
        copies, stalls = made.timed[0].take()
    free_memory(device)
    return {"copy_seconds": copies, "stall_seconds": stalls, "hidden": 1 - stalls / copies if copies else None}


def _largest_row(
    label: str, weights: Any, cap: float, tokens: int, vocabulary: int, turns: Rounds[Any], end_at: float, seed: int
) -> dict[str, Any]:
    """Find the tokens of the largest row whose step fits under `cap` GiB of device memory, by running it."""
    total = torch.cuda.get_device_properties(0).total_memory
    fixed = torch.cuda.memory_allocated()
    peak = max((memory["peak_bytes"] for _, memory in turns.results.get(label, []) if memory), default=0)
    if cap * GIB > total or not peak or fixed > cap * GIB:
        return {"tokens": None, "why": "the cap is no cap of this device, or the model is larger"}
    guess = (cap * GIB - fixed) / ((peak - fixed) / tokens)
    high = max(_STEP_TOKENS, round(guess / _STEP_TOKENS) * _STEP_TOKENS)
    low, tried = 0, 0
    torch.cuda.set_per_process_memory_fraction(cap * GIB / total)
    try:
        with side(label, weights, "cuda") as made:
            step = max(_STEP_TOKENS, high // 64 // _STEP_TOKENS * _STEP_TOKENS)
            while time.perf_counter() < end_at and tried < 12 and high > 0:
                tried += 1
                _, failure = attempt(partial(_fits, made, high, vocabulary, seed))
                free_memory("cuda")
                if failure is None:
                    low = high
                    high += step
                elif low:
                    break
                else:
                    high -= step
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return {"tokens": low or None, "predicted_from_the_peak": round(guess), "steps_tried": tried, "resolution": step}


def _fits(made: DecoderSide, tokens: int, vocabulary: int, seed: int) -> None:
    made.step(Batch.of(tokens, min(DOCUMENT, tokens), vocabulary, "cuda", seed))
    torch.cuda.synchronize()


def _figures(turns: Rounds[Any], label: str, tokens: int, said: list[str]) -> dict[str, Any]:
    values = turns.seconds[label]
    return {
        "path": "; ".join([label, *said]),
        "seconds": summary(values),
        "tokens_per_second": median_interval([tokens / value for value in values]).to_dict(),
        "losses": [float(loss) for loss, _ in turns.results[label]],
        "memory": largest_memory(turns.results[label]),
    }
