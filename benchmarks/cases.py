"""The in-house cases of ``python -m benchmarks``: parsed arguments in, a record out."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastpack_trl.errors import UserError, did_you_mean

COLLATOR_TOKENS = 8192
COLLATOR_ROUNDS = 7
COLLATOR_TARGET = 10.0
"""Least speed-up of fetch and collate at `COLLATOR_TOKENS`; other row lengths are reported only."""


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement: what it compares, and the function that makes its record from the parsed arguments."""

    help: str
    measure: Callable[[Namespace], dict[str, Any]]


def _kept(args: Namespace) -> dict[str, Any]:
    """Return what the loop over rows needs beside the case's own options."""
    from fastpack_trl.bench.result_file import ResultFile

    file = None if args.json is None else ResultFile(Path(args.json).expanduser(), again=args.again)
    return {"seed": args.seed, "progress": True, "file": file}


def _device(args: Namespace) -> str:
    import torch

    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but torch sees no CUDA device: use --device cpu")
    return ("cuda" if torch.cuda.is_available() else "cpu") if args.device == "auto" else str(args.device)


def _without(args: Namespace, *names: str) -> None:
    """Raise for an option that was given and that the case does not have."""
    for name in names:
        if getattr(args, name) not in (None, False):
            raise UserError(f"--{name.replace('_', '-')} does not go with this case: leave it out")


def _given(**options: Any) -> dict[str, Any]:
    """Drop the options that were not given: what they are handed to has the defaults."""
    return {name: value for name, value in options.items() if value is not None}


def _attention(args: Namespace) -> dict[str, Any]:
    from benchmarks import attention

    _without(args, "model", "layers", "no_checkpointing", "quick")
    given = _given(tokens=args.tokens, rounds=args.pairs, seconds=args.seconds, threads=args.threads)
    return attention.measure(backends=args.backends, device=_device(args), **_kept(args), **given)


def _models(args: Namespace) -> dict[str, Any]:
    from benchmarks import model_steps
    from benchmarks.model_shapes import shape_of

    _without(args, "quick", "backends")
    shapes = {name: shape_of(name).cut_to(args.layers) for name in args.model}
    given = _given(tokens=args.tokens, rounds=args.pairs, seconds=args.seconds, threads=args.threads)
    return model_steps.measure(
        shapes, checkpointing=not args.no_checkpointing, device=_device(args), **_kept(args), **given
    )


def _packed_attention(args: Namespace) -> dict[str, Any]:
    from benchmarks import packed_attention

    device = _device(args)
    if args.model:
        return _models(args)
    _without(args, "layers", "no_checkpointing", "seconds", "backends")
    return packed_attention.measure(
        tokens=args.tokens,
        pairs=packed_attention.DEFAULT_PAIRS if args.pairs is None else args.pairs,
        quick=args.quick,
        threads=packed_attention.DEFAULT_THREADS if args.threads is None else args.threads,
        device=device,
        **_kept(args),
    )


def _lora(args: Namespace) -> dict[str, Any]:
    from benchmarks import lora
    from benchmarks.lora_models import MODELS
    from fastpack_trl.bench.baselines import liger_missing

    _without(args, "quick", "backends")
    device = _device(args)
    names = args.model or (["qwen3-0.6b", "qwen3-8b", "qwen3-14b"] if device == "cuda" else ["small"])
    for name in names:
        if name not in MODELS:
            raise UserError(
                f"there is no LoRA model {name!r}{did_you_mean(name, MODELS)} (models: {', '.join(MODELS)})"
            )
    if args.liger and (reason := liger_missing(device)):
        raise UserError(f"--liger: {reason}; pip install 'fastpack-trl[liger]' and use --device cuda, or leave it out")
    given = _given(tokens=args.tokens, rounds=args.pairs, seconds=args.seconds, threads=args.threads)
    return lora.measure(
        {name: MODELS[name] for name in names}, layers=args.layers, checkpointing=not args.no_checkpointing,
        device=device, sides=lora.LIGER_SIDES if args.liger else lora.SIDES, **_kept(args), **given,
    )  # fmt: skip


def _activation_memory(args: Namespace) -> dict[str, Any]:
    from benchmarks import activation_memory

    _without(args, "quick", "backends", "no_checkpointing")
    device = _device(args)
    if len(args.tokens or ()) > 1:
        raise UserError("the case 'activation_memory' takes one row length: --tokens N")
    names = args.model or (["qwen3-8b", "qwen3-14b", "qwen3-32b"] if device == "cuda" else ["small"])
    given = _given(
        tokens=args.tokens[0] if args.tokens else None, layers=args.layers, rounds=args.pairs, seconds=args.seconds,
        threads=args.threads,
    )  # fmt: skip
    return activation_memory.measure(names, device=device, **_kept(args), **given)


def _collator(args: Namespace) -> dict[str, Any]:
    from benchmarks import collator
    from fastpack_trl.bench.result_file import RowTask, run_rows

    _without(args, "model", "layers", "no_checkpointing", "seconds", "backends")
    if args.device == "cuda" or (args.threads or 1) != 1:
        raise UserError("the case 'collator' measures host work on one core: leave out --device and --threads")
    rounds = COLLATOR_ROUNDS if args.pairs is None else args.pairs
    settings = {"rows": collator.ROWS, "rounds": rounds, "seed": args.seed, "rows_per_batch": collator.ROWS_PER_BATCH}
    label = {"setting": "fetch and collate, one core", "path": "PackingCollator"}
    tasks = [
        RowTask({**label, "tokens": tokens}, partial(_collator_row, tokens, rounds, args.seed))
        for tokens in args.tokens or [COLLATOR_TOKENS]
    ]
    return run_rows(
        tasks, case="collator", settings=settings, apart={}, device="cpu", threads=1, loud=(UserError,), **_kept(args)
    )


def _collator_row(tokens: int, rounds: int, seed: int, _seconds: float) -> dict[str, Any]:
    from benchmarks import collator
    from fastpack_trl.measure.record import OtherLoad

    load = OtherLoad()
    try:
        measured = collator.measure(tokens_per_row=tokens, rounds=rounds, seed=seed)
    except ValueError as error:
        raise UserError(str(error)) from error
    target = COLLATOR_TARGET if tokens == COLLATOR_TOKENS else None
    return {
        "tokens_per_round": measured["tokens_per_round"],
        "documents": measured["documents"],
        "stock": measured["trl"],
        "fastpack": measured["fastpack"],
        "ratio": measured["ratio"],
        "target": target,
        "below_target": None if target is None else measured["ratio"]["median"] < target,
        "other_load": load.cores(),
    }


def _host_overhead(args: Namespace) -> dict[str, Any]:
    from benchmarks import host_overhead

    _without(args, "model", "layers", "no_checkpointing", "seconds", "backends", "quick")
    given = _given(tokens=args.tokens, pairs=args.pairs, threads=args.threads)
    return host_overhead.measure(device=_device(args), **_kept(args), **given)


def _moe(args: Namespace) -> dict[str, Any]:
    from benchmarks import moe
    from benchmarks.moe_sides import SHAPES

    _without(args, "quick", "backends")
    for name in args.model or ():
        if name not in SHAPES:
            raise UserError(f"there is no MoE model {name!r}{did_you_mean(name, SHAPES)} (models: {', '.join(SHAPES)})")
    given = _given(tokens=args.tokens, rounds=args.pairs, seconds=args.seconds, threads=args.threads)
    return moe.measure(models=args.model, layers=args.layers, device=_device(args), **_kept(args), **given)


CASES = {
    "packed_attention": Case(
        "whole training step of FastSFTTrainer beside stock SFTTrainer (sdpa), same packed rows", _packed_attention
    ),
    "attention": Case(
        "attention alone, forward and backward: every backend that loads, on packed rows of several shapes", _attention
    ),
    "lora": Case(
        "whole training step with LoRA or QLoRA: stock and stock compiled, with the same attention, beside fastpack",
        _lora,
    ),
    "host_overhead": Case(
        "time of a LoRA step outside of forward, backward, clipping and optimizer: both trainers' own loops",
        _host_overhead,
    ),
    "moe": Case(
        "mixture-of-experts, forward and backward: stock grouped_mm and PEFT beside fastpack, one block and decoders",
        _moe,
    ),
    "activation_memory": Case(
        "layer inputs in host memory: checkpointing without, upstream's offloads and ours; and the plan at its default",
        _activation_memory,
    ),
    "collator": Case("fetch and collate of packed rows: PackingCollator beside TRL's collator", _collator),
}
