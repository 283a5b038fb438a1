"""``python -m benchmarks memory_caps``: the longest packed row that trains under a cap of device memory.

    python -m benchmarks memory_caps --models qwen3-8b qwen3-14b-nf4 --caps 16 24 --json mine.jsonl

Each try is a process of its own that trains a few steps. The row doubles until it does not fit, then the gap is halved.
A cap limits torch's allocator to what a device of that size leaves beside CUDA's context, once the model is made: the
benchmark quantizes a model as a whole, `from_pretrained` piece by piece. Documents have 2,048 tokens.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import Parser, known_names
from benchmarks.records import append, facts_of
from benchmarks.results_page import shown
from benchmarks.run import SIDES
from fastpack_trl.bench.process import OwnProcess

MODELS = {
    "qwen3-8b": "qwen3-8b lora 4096", "qwen3-8b-nf4": "qwen3-8b nf4 4096", "qwen3-14b-nf4": "qwen3-14b nf4 4096",
    "gpt-oss-20b-nf4": "gpt-oss-20b nf4-experts 4096", "tiny": "tiny-qwen3 full 256",
}  # fmt: skip
"""The row of `benchmarks.rows` that is made longer, by model."""
OUT_OF_MEMORY = "OutOfMemory", "out of memory", "ALLOC_FAILED"
STEPS = 2
"""Timed steps; two or more come before."""


def longest(fits: Callable[[int], bool], *, first: int, most: int, multiple: int) -> int:
    """Return the tokens of the longest row that fits, to `multiple` tokens or an eighth of it; 0 if none does.

    Args:
        fits: trains a row of so many tokens.
        first: tokens of the first try; they double until a row does not fit, or is over `most`.
    """
    low, high = 0, first
    while high <= most and fits(high):
        low, high = high, high * 2
    high = min(high, most + multiple)
    while high - low > max(multiple, low // 8):
        middle = (low + high) // 2 // multiple * multiple
        if middle in (low, high):
            break
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def measure(model: str, side: str, cap: float, args: Namespace) -> dict[str, Any]:
    """Return the record of a side under a cap, without what all records of a command share.

    Raises:
        RuntimeError: a try failed for another reason than memory.
    """
    options = {"seed": args.seed, "steps": STEPS, "threads": args.threads, "profiled": 0}
    tries: dict[int, dict[str, Any]] = {}

    def fits(tokens: int) -> bool:
        start = OwnProcess("benchmarks.run:train", options, timeout=args.timeout)
        found = start({"row": MODELS[model], "tokens": tokens, "cap": cap}, side)
        why = str(found.get("failed", ""))
        print(f"{model}, {cap:g} GiB, {side}, {tokens:,} tokens: {why or 'fits'}", file=sys.stderr)
        if why and not any(sign in why for sign in OUT_OF_MEMORY):
            raise RuntimeError("\n".join([why, *found.get("last_lines", ())]))
        tries[tokens] = found | ({"failed": why[:90]} if why else {})
        return not why

    tokens = longest(fits, first=args.first, most=args.most, multiple=args.multiple)
    shared = {"case": "memory_caps", "row": f"{model}, {cap:g} GiB", "side": side, "round": 0, "largest": tokens}
    keys = "failed", "peak_gib", "ooms"
    listed = [{"tokens": tried, **{key: run.get(key) for key in keys}} for tried, run in tries.items()]
    return shared | tries.get(tokens, {"seconds": [], "steps": 0, "tokens": None}) | {"cap_gib": cap, "tries": listed}


def parse(words: Sequence[str]) -> Namespace:
    """Return the options.

    Raises:
        UserError: an unknown model or side, a file that cannot be written.
    """
    parser = Parser("memory_caps", __doc__)
    add = parser.add_argument
    add("--models", nargs="+", metavar="MODEL", default=[*MODELS][:4], help=f"of {', '.join(MODELS)}")
    add("--sides", nargs="+", metavar="SIDE", default=["trl", "fastpack"], help="default: trl fastpack")
    add("--caps", type=float, nargs="+", default=[16.0, 24.0, 48.0, 80.0], help="GiB (default: %(default)s)")
    add("--first", type=int, default=2048, help="tokens of the first try (default: %(default)s)")
    add("--most", type=int, default=131_072, help="tokens of a row at most (default: %(default)s)")
    add("--multiple", type=int, default=256, help="tokens of a row are a multiple of this (default: %(default)s)")
    add("--timeout", type=float, default=300, help="seconds of a try; more end the command (default: %(default)s)")
    args = parser.measurement(words, threads=min(8, torch.get_num_threads()))
    args.models, args.sides = known_names("model", args.models, MODELS), known_names("side", args.sides, SIDES)
    return args


def main(words: Sequence[str]) -> int:
    """Search for the longest row of each model, side and cap; print their table, and append the records to a file."""
    args = parse(words)
    about, records = facts_of(args, ()), list[dict[str, Any]]()
    for model in args.models:
        for cap in sorted(args.caps):
            for side in args.sides:
                records.append(measure(model, side, cap, args) | about)
                append(args.json, records[-1])
    print(shown(records))
    return 0
