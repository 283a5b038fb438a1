"""``fastpack-trl bench``: TRL vs. fastpack on a run of your own; a table for people, JSON for machines, a picture."""

from __future__ import annotations

import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from fastpack_trl.bench.picture import draw, require_matplotlib
from fastpack_trl.bench.process import OwnProcess
from fastpack_trl.errors import UserError, preparing
from fastpack_trl.measure.record import check_writable, finite
from fastpack_trl.measure.tables import facts_line
from fastpack_trl.recipe.arguments import as_flags
from fastpack_trl.recipe.make_trainer import make_trainer, method_of_run, short_run_arguments
from fastpack_trl.recipe.methods import add_trainer
from fastpack_trl.recipe.yaml import load_config
from fastpack_trl.report import disabled_by_environment

BASELINES = ("stock", "stock_compiled")
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_NUMBERS = {
    "rounds": (1, 2, "training runs per side"),
    "steps": (1, 8, "timed steps per side and round"),
    "warmup": (0, 4, "minimum warm-up steps before the timed ones"),
    "gate-steps": (0, 2, "number of first steps in which losses must agree"),
}
"""Option -> least value, default, help."""
_PRIVATE = ("output_dir", "logging_dir", "run_name", "hub_model_id")
"""Ends of names whose values stay out of a record, as secrets do."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``fastpack-trl bench``; imports nothing heavy."""
    add = parser.add_argument
    config = "YAML of a training command; that command's options are accepted too. "
    add("--config", metavar="FILE", help=config + "Of grpo and rloo only the learner is timed, on random completions")
    add_trainer(parser)
    baseline = "what to compare fastpack with: stock (TRL as installed, the default), stock_compiled "
    baseline += "(the best attention that loads, Liger, layers compiled by accelerate)"
    add("--baseline", metavar="NAME", nargs="+", choices=BASELINES, default=["stock"], help=baseline)
    for name, (_, default, text) in _NUMBERS.items():
        add(f"--{name}", metavar="N", type=int, default=default, help=f"{text} (default: %(default)s)")
    add("--plot", metavar="FILE", help="also draw time, memory and losses of all sides to FILE, a PNG")


def run(args: Namespace, record: dict[str, Any]) -> int:
    """Measure a config, each side in a process of its own; print the table, draw the picture.

    Returns 0, even if fastpack is slower; 130 after an interrupt, with the finished sides.
    """
    picture = _check(args)
    with tempfile.TemporaryDirectory(prefix="fastpack-bench-") as folder:
        arguments = short_run_arguments(args.config, folder, *args.more)  # a wrong value stops here
    import torch

    from fastpack_trl.bench.compare import compare_sides, record_of, table
    from fastpack_trl.bench.sides import OURS, PLANNED
    from fastpack_trl.bench.watch import SideResult

    training = arguments.training
    if tokens := getattr(training, "image_row_tokens", None):
        raise UserError(f"image_row_tokens={tokens}: TRL has no such rows to compare with; leave it out for bench")
    if getattr(training, "use_vllm", False):
        raise UserError("bench times only the learner, on random completions: give --use_vllm False")
    names = [*dict.fromkeys(args.baseline), OURS]
    if training.device.type == "cuda" and training.gradient_checkpointing and training.activation_memory != "off":
        names.append(PLANNED)
    warmup, gate = max(args.warmup, args.gate_steps), args.gate_steps
    steps = {"warmup": warmup, "timed": args.steps, "gate": gate, "seed": training.seed}
    launch = OwnProcess("fastpack_trl.bench.command:measure_side")

    def measure(name: str) -> SideResult:
        answer = launch({"config": args.config, "flags": args.more, "steps": steps}, name)
        if failed := answer.get("failed"):
            raise (torch.OutOfMemoryError if "OutOfMemory" in failed else RuntimeError)(failed.partition(": ")[2])
        return SideResult(**answer)

    row = compare_sides({name: partial(measure, name) for name in names}, rounds=args.rounds, gate=gate)
    settings = {"config": settings_of(arguments, args.config, args.more), "rounds": args.rounds, **steps}
    record |= record_of(row, settings)
    print(f"{Path(args.config).name}: {facts_line(record)}\n{table(record)}")
    if picture is not None:
        draw(record, picture)
        print(f"picture: {picture}")
    return 0 if record["complete"] else EXIT_INTERRUPTED


def measure_side(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Measure one side of a YAML in this process; return its `SideResult` as plain data."""
    from fastpack_trl.bench.sides import train_side

    with tempfile.TemporaryDirectory(prefix="fastpack-bench-") as folder:

        def build(trainer_class: Any, _config_class: Any, **changes: Any) -> Any:
            flags = [*row["flags"], "--output_dir", folder, *as_flags(changes)]
            with preparing():
                return make_trainer(short_run_arguments(row["config"], folder, *flags), None, trainer_class)

        return asdict(train_side(build, name, method_of_run(row["config"], row["flags"]), **row["steps"]))


def _check(args: Namespace) -> Path | None:
    """Refuse options that do not go together; return the file of the picture."""
    if args.config is None:
        raise UserError("nothing to measure: give --config FILE, the YAML of a run of your own")
    for name, (least, _, _) in _NUMBERS.items():
        if (value := getattr(args, name.replace("-", "_"))) < least:
            raise UserError(f"--{name}: must be >= {least}, got {value}")
    if disabled_by_environment():
        raise UserError("FASTPACK_DISABLE is set: both sides would be TRL's trainer; unset it")
    if args.plot is None:
        return None
    require_matplotlib()
    return check_writable(args.plot, "--plot")


def settings_of(arguments: Any, config: str, flags: Sequence[str]) -> dict[str, Any]:
    """Return the settings that a YAML and its overrides name, without folders, user names or secrets, at every depth.

    ``{"model_name_or_path": "/data/me/Qwen3-8B", "hub_token": "..."}`` -> ``{"model_name_or_path": "Qwen3-8B"}``
    """
    named = {*load_config(config), *(word[2:].partition("=")[0].replace("-", "_") for word in flags)}
    values = {**vars(arguments.script), **vars(arguments.model), **vars(arguments.training)}
    kept = {name: value for name, value in values.items() if name in named and not name.endswith(_PRIVATE)}
    kinds = (str, int, float, list, dict)
    return dict(finite({name: value for name, value in kept.items() if isinstance(value, kinds)}, bare=True))
