"""Mixture-of-experts: one experts block and whole decoders, stock `grouped_mm` with PEFT beside fastpack, in turn."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.case_tables import table
from benchmarks.cases import Pass, Run, add_sizes, row_lengths, summaries
from benchmarks.command import CaseCommand, known
from benchmarks.moe_sides import MODES, OURS, RANK, SHAPES, SIDES, SMALL, STOCK, make_model, routing, saved_bytes
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.bench.result_file import RowTask
from fastpack_trl.measure.failures import attempt
from fastpack_trl.measure.intervals import median_interval
from fastpack_trl.measure.timing import clock_of
from fastpack_trl.model.facts import text_model
from fastpack_trl.moe.layout import experts_modules
from fastpack_trl.packing.packed_batch import PackedBatch

DEFAULTS = Run(rounds=7, threads=1)
WARMUP = 2
MEAN_DOCUMENT = 256
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


def plan(device: str, models: Sequence[str], tokens: Sequence[int], layers: int | None) -> list[Row]:
    """Return all rows, in the order in which they are measured: the CPU has the decoder with expert LoRA only."""
    rows = []
    for model in models:
        depth = int(SHAPES[model].cut_to(layers).fields["num_hidden_layers"])
        if device == "cpu":
            rows += [Row("decoder", model, depth, "lora", count) for count in tokens]
            continue
        rows += [
            Row("block", model, 1, mode, count, skewed=skewed)
            for count in tokens for mode in MODES for skewed in (False, True)
        ]  # fmt: skip
        rows += [
            Row("decoder", model, depth, mode, count, checkpointing=policy)
            for count in tokens for mode in MODES[:2] for policy in (False, True)
        ]  # fmt: skip
    return rows


def document_lengths(tokens: int, seed: int) -> tuple[int, ...]:
    """Draw lengths around `MEAN_DOCUMENT` (half of it off at most) that fill a row of `tokens`; the last one is cut."""
    random = np.random.default_rng(seed)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, int(random.integers(MEAN_DOCUMENT // 2, MEAN_DOCUMENT * 3 // 2 + 1))))
    return tuple(lengths)


def measure(
    run: Run = DEFAULTS, *, rows: Sequence[str] | None = None, tokens: Sequence[int] | None = None,
    layers: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Time forward and backward of every side in turn, after block outputs and gradients were compared.

    Args:
        rows: names in `SHAPES`; the small ones on the CPU, the public ones on CUDA.

    Raises:
        UserError: no such model, a row length below 1.
    """
    cuda = run.device == "cuda"
    lengths = row_lengths(tokens, (2048, 8192, 32768) if cuda else (512, 2048))
    models = known("MoE model", rows or (("gpt-oss-20b", "qwen3-30b-a3b") if cuda else tuple(SMALL)), list(SHAPES))
    tasks = [
        RowTask(row.describe(), partial(measure_row, row, run), {"sides": {}, "ratios": {}})
        for row in plan(run.device, models, lengths, layers)
    ]
    settings = {
        "rank": RANK,
        "documents": f"uniform around {MEAN_DOCUMENT} tokens, packed",
        "stock": "transformers' grouped_mm; expert LoRA by PEFT's target_parameters",
        "attention": "decoder rows: the same packed attention on every side, named in the row",
        "saved_bytes": "storages that a forward keeps for backward beside the parameters",
    }
    return run.record("moe", tasks, settings)


@dataclass(frozen=True, slots=True)
class Subject:
    """The timed call: a model, its forward (a scalar, or a tensor with the upstream gradient), facts for the row."""

    model: nn.Module
    forward: Callable[[], Tensor]
    upstream: Tensor
    inputs: tuple[Tensor, ...]
    facts: Mapping[str, Any]

    def run(self, enter: Callable[[nn.Module], AbstractContextManager[Any]], device: str) -> tuple[Pass, Tensor]:
        """Run forward and backward under a side's context, gradients from None; return the mean square of the output
        too."""
        with enter(self.model):
            self.model.zero_grad(set_to_none=True)
            for tensor in self.inputs:
                tensor.grad = None
            made, out = Pass.of(self.forward, lambda out: out.backward(self.upstream), device)
            return made, out.detach().float().square().mean()


def measure_row(row: Row, run: Run, seconds: float) -> dict[str, Any]:
    """Compare the sides with stock, then time them."""
    end_at = time.perf_counter() + seconds
    with (_block if row.part == "block" else decoder)(row, run.device, run.seed) as subject:
        failed, kept = {}, {}
        gate, reference = {}, None
        for name, enter in SIDES.items():
            tried, failure = attempt(partial(_gate_pass, subject, enter))
            if tried is None:
                failed[name] = failure
                continue
            values, kept[name] = tried
            reference = values if name == STOCK else reference
            if row.part == "block" and reference is not None:
                gate[name] = max(_difference(a, b) for a, b in zip(values, reference, strict=True))
                if gate[name] > GATES[SHAPES[row.model].weights]:
                    failed[name] = f"differs from stock by {gate[name]:.2g}, not timed"
        calls = {name: partial(subject.run, SIDES[name], run.device) for name in kept if name not in failed}
        found, other_load = run.turns(calls, warmup=WARMUP, end_at=end_at, clock=clock_of(run.device))
        out: dict[str, dict[str, Any]] = {name: {"failed": why} for name, why in (failed | found.failed).items()}
        for name, passes in ((name, [one for one, _ in each]) for name, each in found.results.items()):
            times = summaries(passes, run.device)
            rates = median_interval([row.tokens / taken for taken in times["seconds"]["values"]]).to_dict()
            out[name] = {**times, "tokens_per_second": rates, "saved_bytes": kept[name], "memory": passes[-1].memory}
        return {
            **subject.facts, "gate": gate, "sides": out, "ratios": _ratios(out), "order": found.order,
            "other_load": other_load,
        }  # fmt: skip


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


def _difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def _gate_pass(subject: Subject, enter: Any) -> tuple[list[Tensor], int]:
    """Return the output and input gradients, and the bytes kept for backward."""
    with enter(subject.model):
        kept = saved_bytes(subject.forward, subject.model)
        out = subject.forward()
        found = torch.autograd.grad(out, subject.inputs, subject.upstream)
    return [out.detach(), *found], kept


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
    batch = PackedBatch.from_lengths(document_lengths(row.tokens, seed)).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    width = int(shape.fields["hidden_size"])
    make = partial(torch.randn, 1, row.tokens, width, generator=generator, dtype=shape.weights, device=device)
    embeddings = make().requires_grad_()

    def forward() -> Tensor:
        out: Tensor = backbone(
            inputs_embeds=embeddings, position_ids=batch.position_ids, packed_batch=batch, use_cache=False
        ).last_hidden_state
        return out

    with packed_attention(model) as attention:
        yield Subject(model, forward, make(), (embeddings,), {"attention": attention.path})


COMMAND = CaseCommand(
    case="moe", help=__doc__, rows=SHAPES, default_rows=(), rounds=DEFAULTS.rounds,
    seconds=DEFAULTS.seconds, table=table,
    record=lambda args, file: measure(Run.of(args, file), rows=args.rows, tokens=args.tokens, layers=args.layers),
    more=partial(add_sizes, layers=True, threads=1),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(COMMAND.start())
