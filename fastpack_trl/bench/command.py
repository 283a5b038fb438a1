"""``fastpack-trl bench``: measures stock against fastpack on this machine; a table for people, JSON for machines."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastpack_trl.bench.tables import (
    aligned,
    attention_lines,
    disturbances,
    model_lines,
    moe_lines,
    offload_lines,
    overhead_lines,
)
from fastpack_trl.errors import UserError, did_you_mean

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it

COLLATOR_TOKENS = 8192
COLLATOR_ROUNDS = 7
COLLATOR_TARGET = 10.0
"""Least speed-up of fetch and collate at `COLLATOR_TOKENS`; other row lengths are reported only."""


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement: what it compares, and the function that makes its record from the parsed arguments."""

    help: str
    measure: Callable[[Namespace], dict[str, Any]]


def add_arguments(parser: ArgumentParser) -> None:
    """Options of ``fastpack-trl bench``; imports nothing heavy."""
    add = parser.add_argument
    add("--case", metavar="NAME", help=f"what to measure: {', '.join(CASES)}")
    add("--list", action="store_true", help="list the cases and stop")
    add("--json", metavar="FILE", help="write every figure, every single time, settings and versions to FILE")
    add(
        "--report",
        metavar="FILE",
        nargs="*",
        help="Markdown tables and plots from these JSON files, or from the folders they lie in (default: the FILE of "
        "--json); measures nothing without --case",
    )
    add("--out", metavar="DIR", help="folder of the report (default: bench-report)")
    add("--tokens", metavar="N", nargs="+", type=int, help="row lengths in tokens (default: those of the case)")
    add("--pairs", metavar="N", type=int, help="timed pairs (rounds) per row; 6 or more for an interval of 95 %%")
    add("--quick", action="store_true", help="fewer row lengths under TRL's defaults (minutes instead of tens)")
    add(
        "--seconds",
        metavar="S",
        type=float,
        help="time for the whole call, where the case has a budget (attention, and packed_attention with --model; "
        "default: 480); what finds no time is named",
    )
    add(
        "--model",
        metavar="NAME",
        nargs="+",
        help="packed_attention: these models' public shapes with random weights, beside stock and beside metadata "
        "rebuilt in each layer: qwen3-0.6b, llama-3.2-1b, gpt-oss-20b, small",
    )
    add("--backends", metavar="NAME", nargs="+", help="attention: only these, e.g. varlen per_document sdpa flex")
    add("--layers", metavar="N", type=int, help="with --model: only its first N decoder layers (stated in the row)")
    add("--no-checkpointing", action="store_true", help="with --model: no gradient checkpointing on any side")
    add("--threads", metavar="N", type=int, help="CPU threads of torch (default: 2)")
    add(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: CUDA where torch sees it, else the CPU"
    )
    add("--seed", metavar="N", type=int, default=0, help="of weights, documents and order (default: 0)")


def run(args: Namespace) -> int:
    """Measure, print the table, write the JSON.

    Returns:
        0, also where a target is missed: it is a measurement. 130 after an interrupt, with what was finished.

    Raises:
        UserError: no or an unknown case, an option that the case does not have, a JSON path that cannot be written.
    """
    if args.list:
        width = max(map(len, CASES))
        print("\n".join(f"{name.ljust(width)}  {case.help}" for name, case in CASES.items()))
        return 0
    if args.out is not None and args.report is None:
        raise UserError("--out names the folder of a report: give --report too")
    if args.report is not None and args.case is None:
        return _report(args.report, args.out)
    if args.case is None:
        raise UserError(f"no case: give --case, one of {', '.join(CASES)}")
    if args.case not in CASES:
        raise UserError(f"there is no case {args.case!r}{did_you_mean(args.case, CASES)} (cases: {', '.join(CASES)})")
    from fastpack_trl.bench.record import check_writable, write_json

    if args.report is not None:
        _check_report(args)
    file: Path | None = check_writable(args.json) if args.json else None
    record = CASES[args.case].measure(args)
    print(table(record))
    if file is not None:
        write_json(file, record)
    if args.report is not None:
        _report([*args.report, *([] if file is None else [str(file)])], args.out)
    return 0 if record["complete"] else EXIT_INTERRUPTED


def _report(paths: list[str], out: str | None) -> int:
    from fastpack_trl.bench.report import DEFAULT_FOLDER, write_report

    if not paths:
        raise UserError("--report has no file: name JSON files of fastpack-trl bench, or a folder with some")
    first, *pictures = write_report(paths, out or DEFAULT_FOLDER)
    print(f"\n{first}: tables, and {len(pictures)} plots beside it")
    return 0


def _check_report(args: Namespace) -> None:
    """What would make the report fail after the measurement."""
    from fastpack_trl.bench.plots import require_matplotlib
    from fastpack_trl.bench.report import json_files

    require_matplotlib()
    if args.json is None:
        raise UserError("--report with --case reads the file of --json: give --json FILE too")
    json_files(args.report)


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
    """The options that were given; the others keep the default of what they are handed to."""
    return {name: value for name, value in options.items() if value is not None}


def _attention(args: Namespace) -> dict[str, Any]:
    from fastpack_trl.bench import attention

    _without(args, "model", "layers", "no_checkpointing", "quick")
    given = _given(tokens=args.tokens, rounds=args.pairs, seconds=args.seconds, threads=args.threads)
    return attention.measure(backends=args.backends, device=_device(args), seed=args.seed, progress=True, **given)


def _models(args: Namespace) -> dict[str, Any]:
    from fastpack_trl.bench import model_steps
    from fastpack_trl.bench.model_shapes import shape_of

    _without(args, "quick", "backends")
    shapes = {name: shape_of(name).cut_to(args.layers) for name in args.model}
    given = _given(tokens=args.tokens, rounds=args.pairs, seconds=args.seconds, threads=args.threads)
    return model_steps.measure(
        shapes, checkpointing=not args.no_checkpointing, device=_device(args), seed=args.seed, progress=True, **given
    )


def _packed_attention(args: Namespace) -> dict[str, Any]:
    from fastpack_trl.bench import packed_attention

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
        seed=args.seed,
        progress=True,
    )


def _lora(args: Namespace) -> dict[str, Any]:
    from fastpack_trl.bench import lora
    from fastpack_trl.bench.lora_models import MODELS

    _without(args, "quick", "backends")
    device = _device(args)
    names = args.model or (["qwen3-0.6b", "qwen3-8b", "qwen3-14b"] if device == "cuda" else ["small"])
    for name in names:
        if name not in MODELS:
            raise UserError(
                f"there is no LoRA model {name!r}{did_you_mean(name, MODELS)} (models: {', '.join(MODELS)})"
            )
    given = _given(tokens=args.tokens, rounds=args.pairs, seconds=args.seconds, threads=args.threads)
    return lora.measure(
        {name: MODELS[name] for name in names}, layers=args.layers, checkpointing=not args.no_checkpointing,
        device=device, seed=args.seed, progress=True, **given,
    )  # fmt: skip


def _activation_memory(args: Namespace) -> dict[str, Any]:
    from fastpack_trl.bench import activation_memory

    _without(args, "quick", "backends", "no_checkpointing")
    device = _device(args)
    if len(args.tokens or ()) > 1:
        raise UserError("the case 'activation_memory' takes one row length: --tokens N")
    names = args.model or (["qwen3-8b", "qwen3-14b", "qwen3-32b"] if device == "cuda" else ["small"])
    given = _given(
        tokens=args.tokens[0] if args.tokens else None, layers=args.layers, rounds=args.pairs, seconds=args.seconds,
        threads=args.threads,
    )  # fmt: skip
    return activation_memory.measure(names, device=device, seed=args.seed, progress=True, **given)


def _collator(args: Namespace) -> dict[str, Any]:
    from tqdm.auto import tqdm

    from fastpack_trl.bench import collator
    from fastpack_trl.bench.record import OtherLoad, make_record

    _without(args, "model", "layers", "no_checkpointing", "seconds", "backends")
    if args.device == "cuda" or (args.threads or 1) != 1:
        raise UserError("the case 'collator' measures host work on one core: leave out --device and --threads")
    rounds = COLLATOR_ROUNDS if args.pairs is None else args.pairs
    rows: list[dict[str, Any]] = []
    settings: dict[str, Any] = {}
    complete = True
    try:
        for tokens in tqdm(args.tokens or [COLLATOR_TOKENS], unit="length", disable=None, dynamic_ncols=True):
            load = OtherLoad()
            try:
                measured = collator.measure(tokens_per_row=tokens, rounds=rounds, seed=args.seed)
            except ValueError as error:
                raise UserError(str(error)) from error
            settings = {name: value for name, value in measured["settings"].items() if name != "tokens_per_row"}
            rows.append({**_collator_row(tokens, measured), "other_load": load.cores()})
    except KeyboardInterrupt:
        complete = False
    return make_record(
        case="collator", settings=settings, rows=rows, complete=complete, threads=1, seed=args.seed, device="cpu"
    )


def _collator_row(tokens: int, measured: Mapping[str, Any]) -> dict[str, Any]:
    target = COLLATOR_TARGET if tokens == COLLATOR_TOKENS else None
    return {
        "setting": "fetch and collate, one core",
        "tokens": tokens,
        "path": "PackingCollator",
        "tokens_per_round": measured["tokens_per_round"],
        "documents": measured["documents"],
        "stock": measured["trl"],
        "fastpack": measured["fastpack"],
        "ratio": measured["ratio"],
        "target": target,
        "below_target": None if target is None else measured["ratio"]["median"] < target,
    }


def _host_overhead(args: Namespace) -> dict[str, Any]:
    from fastpack_trl.bench import host_overhead

    _without(args, "model", "layers", "no_checkpointing", "seconds", "backends", "quick")
    given = _given(tokens=args.tokens, pairs=args.pairs, threads=args.threads)
    return host_overhead.measure(device=_device(args), seed=args.seed, progress=True, **given)


def _moe(args: Namespace) -> dict[str, Any]:
    from fastpack_trl.bench import moe
    from fastpack_trl.bench.moe_sides import SHAPES

    _without(args, "quick", "backends")
    for name in args.model or ():
        if name not in SHAPES:
            raise UserError(f"there is no MoE model {name!r}{did_you_mean(name, SHAPES)} (models: {', '.join(SHAPES)})")
    given = _given(tokens=args.tokens, rounds=args.pairs, seconds=args.seconds, threads=args.threads)
    return moe.measure(
        models=args.model, layers=args.layers, device=_device(args), seed=args.seed, progress=True, **given
    )


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


def table(record: Mapping[str, Any]) -> str:
    """The record for people: rates, ratio with its interval and target, and where a step goes."""
    rows = record["rows"]
    out = [f"{record['case']}: {CASES[record['case']].help}", *_facts(record)]
    if not record["complete"]:
        out.append(f"INCOMPLETE: interrupted; {len(rows)} row(s) were finished")
    if record["case"] == "attention":
        return "\n".join([*out, *attention_lines(rows)])
    if record["case"] == "moe":
        return "\n".join([*out, *moe_lines(rows)])
    if record["case"] == "host_overhead":
        return "\n".join([*out, *overhead_lines(rows)])
    if record["case"] == "activation_memory":
        return "\n".join([*out, *model_lines(rows), *offload_lines(rows)])
    if any("sides" in row for row in rows):
        return "\n".join([*out, *model_lines(rows)])
    for setting in dict.fromkeys(row["setting"] for row in rows):
        chosen = [row for row in rows if row["setting"] == setting]
        out += ["", setting, *aligned(_rate_cells(chosen)), *disturbances(chosen)]
    phased = [row for row in rows if "phases" in row["fastpack"]]
    if phased:
        out += ["", "where a step goes (median ms)", *aligned(_phase_cells(phased))]
    return "\n".join(out)


def _facts(record: Mapping[str, Any]) -> list[str]:
    machine, source = record["machine"], record["source"]
    device = machine.get("gpu") or machine["processor"]
    driver = f", driver {machine['driver']}" if machine.get("driver") else ""
    versions = ", ".join(f"{name} {value}" for name, value in record["versions"].items())
    commit = "installed package"
    if source["commit"] is not None:
        commit = f"commit {source['commit'][:12]}{' with uncommitted changes' if source['modified'] else ''}"
    threads = machine["threads"]
    return [
        f"{device}{driver}, {threads} thread{'s' * (threads != 1)} of {machine['cores']} cores, {record['date']}",
        versions,
        f"{commit}, seed {record['seed']}",
    ]


def _rate_cells(rows: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    cells = [["tokens", "path", "stock tok/s", "fastpack tok/s", "ratio", "interval", "target"]]
    for row in rows:
        ratio = row["ratio"]
        cells.append(
            [
                f"{row['tokens']:,}",
                row["path"],
                f"{row['stock']['tokens_per_second']['median']:,.0f}",
                f"{row['fastpack']['tokens_per_second']['median']:,.0f}",
                f"{ratio['median']:.2f}x",
                f"{ratio['low']:.2f} to {ratio['high']:.2f} ({ratio['coverage']:.1%})",
                _verdict(row),
            ]
        )
    return cells


def _verdict(row: Mapping[str, Any]) -> str:
    if row["target"] is None:
        return "reported only"
    return f"{row['target']:g}x: {'below target' if row['below_target'] else 'reached'}"


def _phase_cells(rows: Iterable[Mapping[str, Any]]) -> list[list[str]]:
    cells: list[list[str]] = []
    for row in rows:
        for side in ("stock", "fastpack"):
            phases = row[side]["phases"]
            cells = cells or [["tokens", "setting", "side", *phases]]
            cells.append(
                [f"{row['tokens']:,}", row["setting"], side, *(f"{seconds * 1000:,.1f}" for seconds in phases.values())]
            )
    return cells
