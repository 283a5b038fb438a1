"""Mixture-of-experts: one experts block and whole decoders, stock `grouped_mm` with PEFT beside fastpack, in turn."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.attention import document_lengths
from benchmarks.moe_sides import (
    MODES,
    OURS,
    RANK,
    SHAPES,
    STOCK,
    make_model,
    routing,
    saved_bytes,
    sides,
)
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.bench.environment import limited_threads, quiet
from fastpack_trl.bench.result_file import ResultFile, RowTask, run_rows
from fastpack_trl.errors import UserError
from fastpack_trl.measure.device_memory import PeakMemory, free_memory
from fastpack_trl.measure.failures import attempt
from fastpack_trl.measure.intervals import median_interval, summary
from fastpack_trl.measure.record import OtherLoad
from fastpack_trl.measure.rounds import take_turns
from fastpack_trl.measure.timing import Clock, clock_of
from fastpack_trl.model.facts import text_model
from fastpack_trl.moe.layout import experts_modules
from fastpack_trl.packing.packed_batch import PackedBatch

CASE = "moe"
DEFAULT_ROUNDS, DEFAULT_SECONDS = 7, 480.0
WARMUP, LEAST_ROUNDS = 2, 3
MEAN_DOCUMENT = 256
TARGETS = {512: 1.3, 2048: 1.1}
"""Least ratio of a whole expert-LoRA step on the CPU, by tokens."""
SAVED_TARGET = 1.5
"""Least ratio of the bytes kept for backward, at 512 tokens on the CPU."""
GATES = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Most by which output and input gradient of a block may differ between the sides, relative, before they are timed."""


@dataclass(frozen=True, slots=True)
class Row:
    """One configuration. `part` is ``block`` (one experts block) or ``decoder`` (all layers, no head)."""

    part: str
    model: str
    layers: int
    mode: str
    tokens: int
    skewed: bool = False
    checkpointing: bool = False

    def describe(self) -> dict[str, Any]:
        dtype = str(SHAPES[self.model].weights).removeprefix("torch.")
        rank = f" r={RANK}" if self.mode == "lora" else ""
        spread = f"{'skewed' if self.skewed else 'uniform'} routing" if self.part == "block" else "own routing"
        policy = f", {'checkpointing' if self.checkpointing else 'no checkpointing'}" if self.part == "decoder" else ""
        size = "one experts block" if self.part == "block" else f"{self.layers} decoder layers without the head"
        return {
            "setting": f"{self.model}, {size}, {self.mode}{rank}, {dtype}, {spread}{policy}",
            "part": self.part, "model": self.model, "layers": self.layers, "mode": self.mode, "tokens": self.tokens,
            "dtype": dtype, "routing": spread, "checkpointing": self.checkpointing,
        }  # fmt: skip


def plan(
    device: str, models: Sequence[str], tokens: Sequence[int], layers: int | None, checkpointing: bool
) -> list[Row]:
    """Return all rows, in the order in which they are measured: the CPU has the decoder with expert LoRA only."""
    rows = []
    for model in models:
        depth = int(SHAPES[model].cut_to(layers).fields["num_hidden_layers"])
        if device == "cpu":
            rows += [Row("decoder", model, depth, "lora", count, checkpointing=checkpointing) for count in tokens]
            continue
        rows += [
            Row("block", model, 1, mode, count, skewed=skewed)
            for count in tokens for mode in MODES for skewed in (False, True)
        ]  # fmt: skip
        policies = (False, True) if not checkpointing else (True,)
        rows += [
            Row("decoder", model, depth, mode, count, checkpointing=policy)
            for count in tokens for mode in MODES[:2] for policy in policies
        ]  # fmt: skip
    return rows


def measure(
    *,
    models: Sequence[str] | None = None,
    tokens: Sequence[int] | None = None,
    layers: int | None = None,
    checkpointing: bool = False,
    rounds: int = DEFAULT_ROUNDS,
    seconds: float = DEFAULT_SECONDS,
    threads: int = 1,
    device: str = "cpu",
    seed: int = 0,
    progress: bool = False,
    file: ResultFile | None = None,
) -> dict[str, Any]:
    """Time forward and backward of every side in turn, after block outputs and gradients were compared.

    Args:
        models: names in `SHAPES`; the small ones on the CPU, the public ones on CUDA.
        tokens: row lengths.
        layers: decoder layers; by default those of the shape.
        checkpointing: decoders only with gradient checkpointing (non-reentrant); on CUDA both ways by default.
        rounds: timed passes per side at most; 6 or more give an interval of 95 %.
        seconds: for the whole call; a row that finds no time is skipped, named.
        threads: torch's intra-op threads.
        device: ``cpu`` or ``cuda``.
        seed: of weights, routing and tokens.
        progress: show a progress bar (on a terminal).
        file: written after every row; what it has of this very run is taken over (`run_rows`).

    Raises:
        UserError: no round, no time, a row length below 1.
    """
    if rounds < 1 or threads < 1 or seconds <= 0:
        raise UserError(f"rounds={rounds}, threads={threads}, seconds={seconds:g}: each must be above 0")
    tokens = tuple(tokens or ((2048, 8192, 32768) if device == "cuda" else (512, 2048)))
    if min(tokens) < 1:
        raise UserError(f"tokens={min(tokens)} is below 1: a row has at least one token")
    models = tuple(
        models or (("gpt-oss-20b", "qwen3-30b-a3b") if device == "cuda" else ("qwen3_moe-small", "gpt_oss-small"))
    )
    planned = plan(device, models, tokens, layers, checkpointing)
    tasks = [
        RowTask(
            row.describe(), partial(_measure_row, row, rounds, device=device, seed=seed), {"sides": {}, "ratios": {}}
        )
        for row in planned
    ]
    with limited_threads(threads), quiet():
        return run_rows(
            tasks,
            case=CASE,
            settings={
                "rounds": rounds,
                "rank": RANK,
                "documents": f"uniform around {MEAN_DOCUMENT} tokens, packed",
                "stock": "transformers' grouped_mm; expert LoRA by PEFT's target_parameters",
                "attention": "decoder rows: the same packed attention on every side, named in the row",
                "saved_bytes": "storages that a forward keeps for backward beside the parameters",
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


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward and backward pass: three marks of the clock, and bytes of memory."""

    start: Any
    middle: Any
    end: Any
    memory: dict[str, int] | None


@dataclass(frozen=True, slots=True)
class Subject:
    """The timed call: a model, its forward (a scalar, or a tensor with the upstream gradient), facts for the row."""

    model: nn.Module
    forward: Callable[[], Tensor]
    upstream: Tensor
    inputs: tuple[Tensor, ...]
    facts: Mapping[str, Any]


def _measure_row(row: Row, rounds: int, seconds: float, device: str, seed: int) -> dict[str, Any]:
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        subject = stack.enter_context((_block if row.part == "block" else decoder)(row, device, seed))
        clock = clock_of(device)
        contexts, out, kept = sides(device), {}, {}
        gate, reference = {}, None
        for name, enter in contexts.items():
            tried, failure = attempt(partial(_gate_pass, subject, enter))
            if tried is None:
                out[name] = {"failed": failure}
                continue
            values, kept[name] = tried
            reference = values if name == STOCK else reference
            if row.part == "block" and reference is not None:
                worst = max(_difference(a, b) for a, b in zip(values, reference, strict=True))
                gate[name] = worst
                if worst > GATES[SHAPES[row.model].weights]:
                    out[name] = {"failed": f"differs from stock by {worst:.2g}, not timed"}
                    kept.pop(name)
        load = OtherLoad()
        found = take_turns(
            {name: partial(_pass, subject, contexts[name], clock, device) for name in kept},
            rounds=rounds, warmup=WARMUP, seconds=seconds - (time.perf_counter() - start),
            least=min(LEAST_ROUNDS, rounds), clock=clock, dropped=lambda *_: free_memory(device), begin=load.restart,
        )  # fmt: skip
        for name in kept:
            if name in found.failed:
                out[name] = {"failed": found.failed[name]}
                continue
            out[name] = _figures(found.results[name], clock, row.tokens, kept[name])
        return {
            **subject.facts, "gate": gate, "sides": out, "ratios": _ratios(out), "order": found.order,
            "other_load": load.cores(), **_targets(row, out, device),
        }  # fmt: skip


def _figures(passes: Sequence[Pass], clock: Clock, tokens: int, kept: int) -> dict[str, Any]:
    parts = {
        "forward": [clock.seconds(p.start, p.middle) for p in passes],
        "backward": [clock.seconds(p.middle, p.end) for p in passes],
        "seconds": [clock.seconds(p.start, p.end) for p in passes],
    }
    figures = {name: summary(values) for name, values in parts.items()}
    rates = median_interval([tokens / taken for taken in parts["seconds"]]).to_dict()
    return {**figures, "tokens_per_second": rates, "saved_bytes": kept, "memory": passes[-1].memory}


def _ratios(sides: Mapping[str, Any]) -> dict[str, Any]:
    """Return, per other side and part of the step, its seconds / ours, round by round."""
    ours = sides.get(OURS, {})
    out: dict[str, Any] = {}
    for name, side in sides.items():
        if name == OURS or "failed" in side or "seconds" not in ours:
            continue
        out[name] = {"saved_bytes": side["saved_bytes"] / max(1, ours["saved_bytes"])}
        for part in ("forward", "backward", "seconds"):
            pairs = zip(side[part]["values"], ours[part]["values"], strict=True)
            out[name][part] = median_interval([theirs / mine for theirs, mine in pairs]).to_dict()
    return out


def _targets(row: Row, sides: Mapping[str, Any], device: str) -> dict[str, Any]:
    target = TARGETS.get(row.tokens) if device == "cpu" and row.mode == "lora" else None
    ratio = _ratios(sides).get(STOCK)
    if target is None or ratio is None:
        return {"target": None}
    saved = SAVED_TARGET if row.tokens == min(TARGETS) else None
    below = ratio["seconds"]["median"] < target or (saved is not None and ratio["saved_bytes"] < saved)
    return {"target": target, "saved_target": saved, "below_target": below}


def _difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def _gate_pass(subject: Subject, enter: Any) -> tuple[list[Tensor], int]:
    """Return the output and input gradients, and the bytes kept for backward."""
    with enter(subject.model):
        kept = saved_bytes(subject.forward, subject.model)
        out = subject.forward()
        found = torch.autograd.grad(out, subject.inputs, subject.upstream)
    return [out.detach(), *found], kept


def _pass(subject: Subject, enter: Any, clock: Clock, device: str) -> Pass:
    with enter(subject.model):
        subject.model.zero_grad(set_to_none=True)
        for tensor in subject.inputs:
            tensor.grad = None
        memory = PeakMemory(device)
        start = clock.mark()
        out = subject.forward()
        middle = clock.mark()
        out.backward(subject.upstream)
        return Pass(start, middle, clock.mark(), memory.read())


@contextlib.contextmanager
def _block(row: Row, device: str, seed: int) -> Iterator[Subject]:
    """Yield the first experts module, called as its layer calls it."""
    shape = SHAPES[row.model].cut_to(1)
    model = make_model(shape, row.mode, tokens=row.tokens, seed=seed, device=device)
    module: Any = text_model(model).base_model.layers[0].mlp.experts
    inner: Any = next(iter(experts_modules(model).values()))
    width = int(shape.fields["hidden_size"])
    ids, weights = routing(
        row.tokens, int(shape.fields["num_experts_per_tok"]), inner.num_experts, row.skewed, seed, device
    )
    generator = torch.Generator(device).manual_seed(seed)
    make = partial(torch.randn, row.tokens, width, generator=generator, dtype=shape.weights, device=device)
    hidden, scale = make().requires_grad_(), weights.to(shape.weights).requires_grad_()
    yield Subject(model, lambda: module(hidden, ids, scale), make(), (hidden, scale), {"attention": "none"})


@contextlib.contextmanager
def decoder(row: Row, device: str, seed: int) -> Iterator[Subject]:
    """Yield all decoder layers on a packed row, from embeddings to the last hidden state."""
    shape = SHAPES[row.model].cut_to(row.layers)
    model = make_model(shape, row.mode, tokens=row.tokens, seed=seed, device=device)
    backbone = text_model(model).base_model
    if row.checkpointing:
        text_model(model).gradient_checkpointing_enable({"use_reentrant": False})
    batch = PackedBatch.from_lengths(document_lengths(row.tokens, MEAN_DOCUMENT, seed)).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    make = partial(
        torch.randn,
        1,
        row.tokens,
        int(shape.fields["hidden_size"]),
        generator=generator,
        dtype=shape.weights,
        device=device,
    )
    embeddings = make().requires_grad_()

    def forward() -> Tensor:
        out: Tensor = backbone(
            inputs_embeds=embeddings, position_ids=batch.position_ids, packed_batch=batch, use_cache=False
        ).last_hidden_state
        return out

    with packed_attention(model) as attention:
        yield Subject(model, forward, make(), (embeddings,), {"attention": attention.path})
