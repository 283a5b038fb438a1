"""How much of a step several GPUs wait for the slowest one, and how much an even dealing of micro-batches gives back.

    python -m benchmarks.balance --json balance.json

A simulation: nothing is trained. Rows of equal tokens differ in the cost of attention, which is that of the sum of
their squared document lengths. An optimizer step has R x G micro-batches of one row (R ranks, G accumulated): stock
deals them in the order of the sampler. The other dealings move whole micro-batches inside of the step, so that its
documents, and its loss where it is averaged over the tokens of all ranks, stay:

- DDP waits once per step, for the rank with the largest sum. `even_sums` deals each rank G micro-batches of even sum.
- FSDP waits in every micro-step, for its largest micro-batch. `side_by_side` sorts, and deals R neighbours at a time.

Counted are forward, backward and recomputed layers. Reductions, the optimizer, and the host are not: they make every
share smaller.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.command import Record, in_one_line, measured, parse
from benchmarks.document_lengths import (
    CHAT_SIGMA,
    HISTOGRAMS,
    LONG_FROM,
    LONG_SHARE,
    LONG_TO,
    CostModel,
    Costs,
    Lengths,
    pack,
)
from fastpack_trl.bench.result_file import ResultFile
from fastpack_trl.errors import UserError, did_you_mean
from fastpack_trl.measure.intervals import median_interval
from fastpack_trl.measure.record import make_record
from fastpack_trl.measure.tables import aligned, fact_lines

Deal: TypeAlias = NDArray[np.int64]
"""``(steps, ranks, accumulated)``: the micro-batch of the step, in the sampler's order, that a rank gets."""

MODELS = (CostModel("qwen3-0.6b", lora=False), CostModel("qwen3-8b", lora=True))
TOKENS = (4_096, 8_192, 32_768, 131_072)
RANKS = (2, 4, 8, 16, 64, 256, 1_024)
ACCUMULATED = (2, 4, 8, 16)
RATES = (0.5, 0.6, 0.7)
"""Operations per second of flash attention over those of large products, on H100 and H200: the range, the middle in all
cells and the ends in one."""
RATE, RATE_CELL = 0.6, (8, 4)
FULL = 0.98
"""Filled share from which a row counts as full, where that cell is drawn from full rows only: what is saved there is
due to attention, not to the rows that packing leaves partly empty."""
SEEDS = 6
"""The fewest whose smallest and largest value are an interval of 95 %."""
WORTH = 0.03
"""Of the step: less is not worth code."""
SHOWN = ((2, 4), (8, 4), (64, 4), (1_024, 4))
"""Cells of the table."""
_ROWS, _DOCUMENTS = 2_000, 60_000
"""At most so many packed rows, from at most so many documents, from which steps are drawn."""
_DRAWN_ROWS, _FEWEST_STEPS, _MOST_STEPS = 16_384, 4, 512
"""Rows drawn per cell and seed, which is so many steps."""
_SWAPS = 32


def stock(costs: Costs, ranks: int) -> Deal:
    """Return the dealing of accelerate's ``BatchSamplerShard``: the i-th micro-batch goes to rank ``i % ranks``.

    Args:
        costs: ``(steps, ranks * accumulated)``, in the order of the sampler.
    """
    steps, count = costs.shape
    order = np.arange(count).reshape(count // ranks, ranks).T
    return np.broadcast_to(order, (steps, *order.shape))


def side_by_side(costs: Costs, ranks: int) -> Deal:
    """Return the dealing that puts micro-batches of like cost into one micro-step: the best one for FSDP.

    The largest micro-batch is the cost of its micro-step whatever stands beside it; so the next ones do.
    """
    steps, count = costs.shape
    order = np.argsort(-costs, axis=1, kind="stable")
    return order.reshape(steps, count // ranks, ranks).swapaxes(1, 2)


def even_sums(costs: Costs, ranks: int) -> Deal:
    """Return a dealing of as many micro-batches to each rank whose largest sum is small, never above stock's.

    Largest first, each round of R micro-batches to the ranks in the order of their sums; then swaps between the rank
    with the largest sum and the one with the smallest, as long as the larger of the two gets smaller.
    """
    steps, count = costs.shape
    rounds = side_by_side(costs, ranks)
    deal = np.empty((steps, ranks, count // ranks), dtype=np.int64)
    sums = np.zeros((steps, ranks))
    for number in range(count // ranks):
        smallest = np.argsort(sums, axis=1, kind="stable")
        np.put_along_axis(deal[:, :, number], smallest, rounds[:, :, number], axis=1)
        sums += np.take_along_axis(costs, deal[:, :, number], axis=1)
    _swap(costs, deal, sums)
    plain = stock(costs, ranks)
    worse = per_rank(costs, deal).max(axis=1) > per_rank(costs, plain).max(axis=1)
    deal[worse] = plain[worse]
    return deal


def _swap(costs: Costs, deal: Deal, sums: Costs) -> None:
    """Swap micro-batches of the ranks with the largest and the smallest sum, in place, while it helps."""
    active = np.arange(len(costs))
    for _ in range(_SWAPS):
        high, low = sums[active].argmax(axis=1), sums[active].argmin(axis=1)
        theirs, ours = deal[active, high], deal[active, low]
        moved = (
            np.take_along_axis(costs[active], theirs, axis=1)[:, :, None]
            - np.take_along_axis(costs[active], ours, axis=1)[:, None, :]
        )
        gap = (sums[active, high] - sums[active, low])[:, None, None]
        left = np.abs(gap - 2 * moved).reshape(len(active), -1)
        best = left.argmin(axis=1)
        helps = left[np.arange(len(active)), best] < gap[:, 0, 0] * (1 - 1e-9)
        active, high, low, best = active[helps], high[helps], low[helps], best[helps]
        if not active.size:
            return
        give, take = np.divmod(best, deal.shape[2])
        given, taken = deal[active, high, give], deal[active, low, take]
        deal[active, high, give], deal[active, low, take] = taken, given
        amount = costs[active, given] - costs[active, taken]
        sums[active, high] -= amount
        sums[active, low] += amount


def dealt(costs: Costs, deal: Deal) -> Costs:
    """Return ``(steps, ranks, accumulated)``: the cost of what each rank gets."""
    return np.take_along_axis(costs[:, None, :], deal, axis=2)


def per_rank(costs: Costs, deal: Deal) -> Costs:
    """Return ``(steps, ranks)``: the sum of each rank."""
    return dealt(costs, deal).sum(axis=2)


def ddp(costs: Costs, deal: Deal) -> tuple[float, float]:
    """Return the time of the steps, and the straggler share: largest sum over the mean one, less 1, over the steps."""
    sums = per_rank(costs, deal)
    largest = sums.max(axis=1)
    return float(largest.sum()), float((largest / sums.mean(axis=1) - 1).mean())


def fsdp(costs: Costs, deal: Deal) -> tuple[float, float]:
    """Return the time of the steps, and the straggler share: largest of each micro-step over its mean, as sums.

    Not the mean over micro-steps: it may rise where the step gets shorter.
    """
    each = dealt(costs, deal)
    largest = each.max(axis=1).sum(axis=1)
    return float(largest.sum()), float((largest / each.mean(axis=1).sum(axis=1) - 1).mean())


Engine: TypeAlias = Callable[[Costs, Deal], tuple[float, float]]
ENGINES: dict[str, tuple[Engine, Callable[[Costs, int], Deal]]] = {
    "ddp": (ddp, even_sums),
    "fsdp": (fsdp, side_by_side),
}
"""What an engine waits for, and the dealing against it."""


def cell(costs: Costs, ranks: int, accumulated: int, seeds: int) -> dict[str, Any]:
    """Return straggler shares, and the share of the step that the other dealing saves, of steps drawn from `costs`.

    Args:
        costs: of packed rows; a step takes them at random, as from a data set much longer than a step.
        ranks: R.
        accumulated: G.
        seeds: of as many draws, whose results make the interval.
    """
    count = ranks * accumulated
    steps = max(_FEWEST_STEPS, min(_MOST_STEPS, _DRAWN_ROWS // count))
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ENGINES}
    for seed in range(seeds):
        drawn = np.random.default_rng((seed, ranks, accumulated)).choice(costs, size=(steps, count))
        for name, (engine, balanced) in ENGINES.items():
            before, share = engine(drawn, stock(drawn, ranks))
            after, left = engine(drawn, balanced(drawn, ranks))
            found[name].append((share, left, 1 - after / before))
    out: dict[str, Any] = {"ranks": ranks, "accumulated": accumulated, "steps": steps * seeds}
    for name, values in found.items():
        shares, lefts, saved = zip(*values, strict=True)
        interval = median_interval(saved)
        out[name] = {
            "stock": _short(np.median(shares)), "balanced": _short(np.median(lefts)),
            "saved": _short(interval.median), "low": _short(interval.low), "high": _short(interval.high),
        }  # fmt: skip
    return out


def _short(value: Any) -> float:
    return round(float(value), 5)


def draw_rows(lengths: Lengths, row_tokens: int, seed: int) -> list[Lengths]:
    """Return rows packed from documents of these lengths, drawn at random."""
    kept = np.minimum(lengths, row_tokens)
    wanted = 1_000 * -(-int(_ROWS * row_tokens / kept.mean()) // 1_000)  # whole batches of TRL's packing
    drawn = np.random.default_rng(seed).choice(lengths, size=min(wanted, _DOCUMENTS))
    return pack(drawn, row_tokens)


def measure(
    histograms: Sequence[str] = tuple(HISTOGRAMS),
    *,
    tokens: Sequence[int] = TOKENS,
    ranks: Sequence[int] = RANKS,
    accumulated: Sequence[int] = ACCUMULATED,
    models: Sequence[CostModel] = MODELS,
    seeds: int = SEEDS,
) -> list[dict[str, Any]]:
    """Simulate every combination; return one row per histogram, row length, model and attention rate.

    Raises:
        UserError: a histogram that does not exist.
    """
    out = []
    for name in histograms:
        if name not in HISTOGRAMS:
            raise UserError(f"there is no histogram {name!r}{did_you_mean(name, HISTOGRAMS)}")
        lengths = HISTOGRAMS[name]()
        for row_tokens in tokens:
            rows = draw_rows(lengths, row_tokens, seed=row_tokens)
            filled = np.array([int(row.sum()) for row in rows])
            full = filled >= FULL * row_tokens
            for model in models:
                for rate in RATES:
                    cells = [(r, g) for r in ranks for g in accumulated] if rate == RATE else [RATE_CELL]
                    costs = model.costs(rows, rate)
                    out.append(
                        {
                            "histogram": name, "tokens": row_tokens, "model": model.name, "attention_rate": rate,
                            "rows": len(rows), "fill": _short(filled.mean() / row_tokens),
                            "spread": _short(costs.std() / costs.mean()),
                            "spread_of_tokens": _short(filled.std() / filled.mean()),
                            "cells": [cell(costs, r, g, seeds) for r, g in cells],
                            "full_rows": cell(costs[full], *RATE_CELL, seeds) if full.any() else None,
                        }
                    )  # fmt: skip
    return out


def documents_of(histograms: Sequence[str]) -> dict[str, dict[str, float]]:
    """Return what describes each histogram, in tokens; ``token_mean`` is the length of a token's document."""
    out = {}
    for name in histograms:
        lengths = HISTOGRAMS[name]()
        parts = {f"p{part}": float(np.percentile(lengths, part)) for part in (50, 90, 99)}
        token_mean = float((lengths.astype(np.float64) ** 2).sum() / lengths.sum())
        ends = {"count": len(lengths), "mean": round(float(lengths.mean()), 1), "longest": int(lengths.max())}
        out[name] = {**ends, **parts, "token_mean": round(token_mean)}
    return out


def table(rows: Sequence[dict[str, Any]], shown: Sequence[tuple[int, int]]) -> list[list[str]]:
    """Return the rows at `RATE` for people: per engine and cell, the share of the step saved, with `*` from `WORTH` on.

    Args:
        rows: of `measure`.
        shown: cells, as ranks and micro-batches of a rank.
    """
    heads = [f"{engine.upper()} {r}x{g}" for engine in ENGINES for r, g in shown]
    out = [["lengths", "row", "model", "spread", "of tokens", *heads]]
    for row in (row for row in rows if row["attention_rate"] == RATE):
        cells = {(found["ranks"], found["accumulated"]): found for found in row["cells"]}
        saved = [_saved(cells[at][engine]) for engine in ENGINES for at in shown]
        spreads = [f"{100 * row[key]:.0f} %" for key in ("spread", "spread_of_tokens")]
        out.append([row["histogram"], f"{row['tokens'] // 1024}k", row["model"], *spreads, *saved])
    return out


def _saved(found: dict[str, float]) -> str:
    """Return ``4.2 % *``: the mark where the whole interval is worth it."""
    return f"{100 * found['saved']:.1f} %{' *' if found['low'] >= WORTH else ''}"


def markdown(record: dict[str, Any], shown: Sequence[tuple[int, int]]) -> str:
    """Return `table` as docs/balance.md has it."""
    head, *lines = table(record["rows"], shown)
    rule = ["---"] * 3 + ["---:"] * (len(head) - 3)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def settings(args: Namespace) -> dict[str, Any]:
    """Return what the figures rest on."""
    return {
        "documents": documents_of(args.rows), "chat_sigma": CHAT_SIGMA, "long_share": LONG_SHARE,
        "long_from": LONG_FROM, "long_to": LONG_TO, "seeds": args.seeds, "attention_rates": RATES,
        "operations": {model.name: model.per_token_and_pair() for model in MODELS},
        "full": FULL, "token_rates": {model.name: model.token_rate for model in MODELS},
    }  # fmt: skip


def add_options(parser: ArgumentParser) -> None:
    """Add the sizes of a step."""
    add = parser.add_argument
    add("--tokens", type=int, nargs="+", default=list(TOKENS), help="of a packed row")
    add("--ranks", type=int, nargs="+", default=list(RANKS))
    add("--accumulated", type=int, nargs="+", default=list(ACCUMULATED), help="micro-batches of a rank in a step")
    add("--seeds", type=int, default=SEEDS, help="6 or more for an interval of 95 %%")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``python -m benchmarks.balance``."""
    args = parse("balance", __doc__, arguments, rows=tuple(HISTOGRAMS), extra=add_options)

    def measure_all(file: ResultFile | None) -> dict[str, Any]:
        rows = measure(args.rows, tokens=args.tokens, ranks=args.ranks, accumulated=args.accumulated, seeds=args.seeds)
        return make_record(case="balance", settings=settings(args), rows=rows, complete=True, threads=1, seed=0)

    def said(record: Record) -> str:
        at_rate = next(row for row in record["rows"] if row["attention_rate"] == RATE)
        cells = [(found["ranks"], found["accumulated"]) for found in at_rate["cells"]]
        shown = [at for at in cells if at in SHOWN] or cells[:1]
        head = ["balance: share of the step saved, ranks x micro-batches", *fact_lines(record), ""]
        return "\n".join([*head, *aligned(table(record["rows"], shown))])

    return measured(args, "balance", measure_all, said)


if __name__ == "__main__":
    raise SystemExit(in_one_line("python -m benchmarks.balance", main))
