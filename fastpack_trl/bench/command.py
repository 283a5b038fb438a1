"""``fastpack-trl bench``: TRL vs. fastpack on a run of your own; a table for people, JSON for machines, a picture."""

from __future__ import annotations

import json
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

from fastpack_trl.errors import UserError, preparing

BASELINES = ("stock", "stock_compiled")
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_NUMBERS = {
    "rounds": (1, 2, "how often each side trains"),
    "steps": (1, 8, "timed steps of a side in a round"),
    "warmup": (0, 4, "minimum number of steps before these"),
    "gate-steps": (0, 2, "first steps whose losses must agree"),
}
"""Option -> least value, default, help."""
_PRIVATE = ("token", "output_dir", "logging_dir", "env", "run_name", "hub_model_id")
"""Parts of names whose values stay out of a record."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``fastpack-trl bench``; imports nothing heavy."""
    add = parser.add_argument
    config = (
        "a YAML of a command that trains (--trainer NAME says which, if its keys do not); other options are those of "
        "that command. Of grpo and rloo the learner is timed, on made-up completions"
    )
    baseline = (
        "compared with fastpack: stock (TRL as installed, the default), stock_compiled (the best attention that loads, "
        "Liger, layers compiled by accelerate)"
    )
    add("--config", metavar="FILE", help=config)
    add("--baseline", metavar="NAME", nargs="+", choices=BASELINES, default=["stock"], help=baseline)
    for name, (_, default, text) in _NUMBERS.items():
        add(f"--{name}", metavar="N", type=int, default=default, help=f"{text} (%(default)s)")
    add("--json", metavar="FILE", help="also write every figure, every step, settings, versions and commit to FILE")
    add("--plot", metavar="FILE", help="also draw time, memory and losses of all sides to FILE, a PNG")
    parser.set_defaults(more=[])  # the options of `fastpack-trl sft` are parsed by its own parser


def run(args: Namespace) -> int:
    """Measure a config, each side in a process of its own; print the table, write JSON and picture.

    Returns:
        0, also if fastpack is slower: it is a measurement. 130 after an interrupt, with what was finished.

    Raises:
        UserError: no config, options that do not go together, a file that cannot be written, a config that cannot be
            loaded, losses that differ, or no side that could run.
    """
    files = _check(args)
    import torch

    from fastpack_trl.bench.compare import compare_sides, record_of, table
    from fastpack_trl.bench.picture import draw
    from fastpack_trl.bench.process import OwnProcess
    from fastpack_trl.bench.sides import OURS, PLANNED
    from fastpack_trl.bench.watch import SideResult
    from fastpack_trl.measure.record import write_json
    from fastpack_trl.measure.tables import facts_line
    from fastpack_trl.recipe.make_trainer import short_run_arguments

    with tempfile.TemporaryDirectory(prefix="fastpack-bench-") as folder:
        training = short_run_arguments(args.config, folder, *args.more).training  # a wrong value stops here
    if getattr(training, "use_vllm", False):
        raise UserError("bench times the learner alone, on made-up completions: give --use_vllm False")
    names = [*dict.fromkeys(args.baseline), OURS]
    if training.device.type == "cuda" and training.gradient_checkpointing and training.activation_memory != "off":
        names.append(PLANNED)
    steps = {
        "warmup": max(args.warmup, args.gate_steps), "timed": args.steps, "gate": args.gate_steps,
        "seed": training.seed,
    }  # fmt: skip
    row = {"config": args.config, "flags": args.more, "threads": torch.get_num_threads(), "steps": steps}
    launch = OwnProcess("fastpack_trl.bench.command:measure_side")

    def measure(name: str) -> SideResult:
        answer = launch(row, name)
        if failed := answer.get("failed"):
            raise (torch.OutOfMemoryError if "OutOfMemory" in failed else RuntimeError)(failed.partition(": ")[2])
        return SideResult(**answer)

    comparison = compare_sides(
        {name: partial(measure, name) for name in names}, rounds=args.rounds, gate=args.gate_steps
    )
    record = record_of(comparison, {"config": settings_of(args.config, args.more), "rounds": args.rounds, **steps})
    print(f"{Path(args.config).name}: {facts_line(record)}\n{table(record)}")
    if "json" in files:
        write_json(files["json"], record)
    if "plot" in files:
        draw(record, files["plot"])
        print(f"picture: {files['plot']}")
    return 0 if record["complete"] else EXIT_INTERRUPTED


def measure_side(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Measure one side of a YAML in this process; return its `SideResult` as plain data."""
    import torch

    from fastpack_trl.bench.compare import train_side
    from fastpack_trl.bench.sides import side_of
    from fastpack_trl.recipe.arguments import as_flags
    from fastpack_trl.recipe.make_trainer import make_trainer, short_run_arguments

    torch.set_num_threads(row["threads"])
    with tempfile.TemporaryDirectory(prefix="fastpack-bench-") as folder:
        parse = partial(short_run_arguments, row["config"], folder, *row["flags"])

        def build(trainer_class: Any, _config_class: Any, **changes: Any) -> Any:
            with preparing():
                return make_trainer(parse("--output_dir", folder, *as_flags(changes)), None, trainer_class)

        return asdict(train_side(build, side_of(name, parse().method), **row["steps"]))


def _check(args: Namespace) -> dict[str, Path]:
    """Refuse options that do not go together; return the files that are written."""
    from fastpack_trl.measure.record import check_writable
    from fastpack_trl.report import disabled_by_environment

    known = ArgumentParser(add_help=False)
    add_arguments(known)
    for word in (word.partition("=")[0] for word in args.more if word.startswith("--")):
        if word == "--device":
            raise UserError("bench runs where its YAML runs: give --use_cpu True, or set CUDA_VISIBLE_DEVICES")
        if near := get_close_matches(word, known._option_string_actions, n=1, cutoff=0.85):
            raise UserError(f"unknown option {word!r}; did you mean {near[0]!r}?")  # the parser of `sft` has no ours
    if args.config is None:
        raise UserError("nothing to measure: give --config FILE, the YAML of a run of your own")
    for name, (least, _, _) in _NUMBERS.items():
        if (value := getattr(args, name.replace("-", "_"))) < least:
            raise UserError(f"--{name}: must be >= {least}, got {value}")
    if disabled_by_environment():
        raise UserError("FASTPACK_DISABLE is set: both sides would be TRL's trainer; unset it")
    if args.plot is not None:
        from fastpack_trl.bench.picture import require_matplotlib

        require_matplotlib()
    files = {"json": args.json, "plot": args.plot}
    return {name: check_writable(file, f"--{name}") for name, file in files.items() if file is not None}


def settings_of(config: str, flags: Sequence[str]) -> dict[str, Any]:
    """Return the YAML and its overrides for a record: only the last part of paths, no names of people, no tokens.

    ``{"model_name_or_path": "/data/me/Qwen3-8B", "hub_token": "..."}`` -> ``{"model_name_or_path": "Qwen3-8B"}``
    """
    from fastpack_trl.recipe.yaml import load_config

    values, name = dict(load_config(config)), ""
    for word in flags:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            values[name] = value if equals else "true"
        elif name:
            values[name] = word
    public = {key: value for key, value in values.items() if not any(part in key for part in _PRIVATE)}
    settings: dict[str, Any] = _without_folders(json.loads(json.dumps(public, default=str)))
    return settings


def _without_folders(value: Any) -> Any:
    match value:
        case str() if "/" in value and (value[0] in "/~." or Path(value).exists()):
            return Path(value).name
        case dict():
            return {key: _without_folders(item) for key, item in value.items()}
        case list():
            return [_without_folders(item) for item in value]
    return value
