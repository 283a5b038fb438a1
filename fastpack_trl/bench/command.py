"""``fastpack-trl bench``: TRL vs. fastpack on a run of your own; a table for people, JSON for machines, a picture."""

from __future__ import annotations

import tempfile
from argparse import SUPPRESS, Action, ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from fastpack_trl.errors import UserError, did_you_mean, preparing
from fastpack_trl.recipe.methods import SFT

BASELINES = ("stock", "stock_compiled", "rebuild")
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_REMOVED = ("--isolate", "--again", "--pairs", "--report", "--out", "--case", "--list")
_PRIVATE = ("token", "output_dir", "logging_dir", "env", "run_name", "hub_model_id")
"""Parts of names whose values stay out of a record."""


class Refused(Action):
    """An option that is gone: says what to do instead."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> NoReturn:
        """Raise `UserError` with the remedy."""
        from fastpack_trl.config import removal

        raise UserError(removal(f"fastpack-trl bench {option_string}"))


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``fastpack-trl bench``; imports nothing heavy."""
    add = parser.add_argument
    config = (
        "a YAML of `fastpack-trl sft`, `dpo`, `reward`, `kto`, `grpo` or `rloo` (--trainer NAME says which, if its "
        "keys do not); other options are those of that command. Of grpo and rloo the learner is timed, on made-up text"
    )
    baseline = (
        "compared with fastpack: stock (TRL as installed, the default), stock_compiled (the best attention that loads, "
        "Liger, layers compiled by accelerate), rebuild (metadata and mask rebuilt in each layer)"
    )
    add("--config", metavar="FILE", help=config)
    add("--baseline", metavar="NAME", nargs="+", help=baseline)
    add("--ablate", action="store_true", help="fastpack with each feature alone, with what it needs, and with all")
    for name, default, text in (
        ("rounds", 2, "how often each side trains"),
        ("steps", 8, "timed steps of a side in a round"),
        ("warmup", 4, "least number of steps before these"),
        ("gate-steps", 2, "first steps whose losses must agree"),
        ("seed", None, "of weights, data and order (default: the YAML's)"),
        ("threads", None, "CPU threads of torch (default: torch's own)"),
    ):
        shown = text if default is None else f"{text} (%(default)s)"
        add(f"--{name}", metavar="N", type=int, default=default, help=shown)
    add("--json", metavar="FILE", help="also write every figure, every step, settings, versions and commit to FILE")
    add("--plot", metavar="FILE", help="also draw time, memory and losses of all sides to FILE, a PNG")
    add("--profile", metavar="DIR", help="also write a Chrome trace of two steps per side to DIR")
    for name in _REMOVED:
        add(name, nargs="*", action=Refused, help=SUPPRESS)
    parser.set_defaults(more=[])  # what `fastpack-trl sft` takes is parsed by its own parser


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

    from fastpack_trl.bench import sides
    from fastpack_trl.bench.compare import record_of, subject_of, table
    from fastpack_trl.bench.engine import compare_sides
    from fastpack_trl.bench.picture import draw
    from fastpack_trl.bench.process import OwnProcess
    from fastpack_trl.bench.watch import SideResult
    from fastpack_trl.measure.record import write_json
    from fastpack_trl.measure.tables import facts_line
    from fastpack_trl.recipe.make_trainer import short_run_arguments

    seed = args.seed or 0
    flags = [*args.more, *([] if args.seed is None else ["--seed", str(seed)])]
    with tempfile.TemporaryDirectory(prefix="fastpack-bench-") as folder:
        arguments = short_run_arguments(args.config, folder, *flags)  # a wrong value stops before anything is loaded
    training, method = arguments.training, arguments.method
    if getattr(training, "use_vllm", False):
        raise UserError("bench times the learner alone, on made-up completions: give --use_vllm False")
    if method is not SFT and (args.ablate or "rebuild" in (args.baseline or ())):
        raise UserError(f"--ablate and the baseline rebuild are of `sft`: this YAML is for {method.command}")
    names = sides.ablations() if args.ablate else list(dict.fromkeys(args.baseline or BASELINES[:1]))
    names.append(sides.OURS)
    if training.device.type == "cuda" and training.gradient_checkpointing and training.activation_memory != "off":
        names.append(sides.PLANNED)
    steps = {"warmup": max(args.warmup, args.gate_steps), "timed": args.steps, "gate": args.gate_steps}
    row = {
        "config": args.config, "flags": flags, "trace": args.profile, "seed": seed,
        "threads": args.threads or torch.get_num_threads(), **steps,
    }  # fmt: skip
    launch = OwnProcess("fastpack_trl.bench.command:measure_side")

    def measure(name: str) -> SideResult:
        answer = launch(row, name)
        if failed := answer.get("failed"):
            raise (torch.OutOfMemoryError if "OutOfMemory" in failed else RuntimeError)(failed.partition(": ")[2])
        return SideResult(**answer)

    found = compare_sides(
        {name: partial(measure, name) for name in names}, subject=subject_of(names), rounds=args.rounds,
        gate=args.gate_steps,
    )  # fmt: skip
    settings = {"config": settings_of(args.config, args.more), "seed": seed, "rounds": args.rounds, **steps}
    record = record_of(found, settings, "ablate" if args.ablate else "config")
    print(f"{Path(args.config).name}: {facts_line(record)}\n{table(record)}")
    if files["json"] is not None:
        write_json(files["json"], record)
    if files["plot"] is not None:
        draw(record, files["plot"])
        print(f"picture: {files['plot']}")
    return 0 if record["complete"] else EXIT_INTERRUPTED


def measure_side(row: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Measure one side of a YAML in this process; return its `SideResult` as plain data."""
    import torch

    from fastpack_trl.bench.compare import train_side
    from fastpack_trl.bench.sides import features, side_of
    from fastpack_trl.recipe.make_trainer import make_trainer, short_run_arguments

    torch.set_num_threads(row["threads"])
    with tempfile.TemporaryDirectory(prefix="fastpack-bench-") as folder:

        def build(trainer_class: Any, _config_class: Any, **changes: Any) -> Any:
            words = [word for key, value in changes.items() for word in (f"--{key}", str(value))]
            with preparing():
                arguments = short_run_arguments(row["config"], folder, *row["flags"], "--output_dir", folder, *words)
                return make_trainer(arguments, None, trainer_class)

        plain = short_run_arguments(row["config"], folder, *row["flags"])
        configured = {key: str(value) for key, value in vars(plain.training).items() if key in features()}
        side = side_of(name, plain.method, configured)
        trace = Path(row["trace"]).expanduser() / f"{name}.json" if row["trace"] else None
        steps = {key: row[key] for key in ("warmup", "timed", "gate", "seed")}
        return asdict(train_side(build, side, trace=trace, **steps))


def _check(args: Namespace) -> dict[str, Path | None]:
    """Refuse options that do not go together; return the files that are written."""
    from fastpack_trl.measure.record import check_writable
    from fastpack_trl.report import disabled_by_environment

    if args.config is None:
        raise UserError(
            "nothing to measure: give --config FILE for a run of your own (the project's own cases: `python -m "
            "benchmarks --list` in a checkout)"
        )
    known = ArgumentParser(add_help=False)
    add_arguments(known)
    options = list(known._option_string_actions)
    for word in args.more:  # the parser of `sft`, which gets these, knows nothing of ours
        near = get_close_matches(word.partition("=")[0], options, n=1, cutoff=0.85) if word.startswith("--") else []
        if word.partition("=")[0] == "--device":
            raise UserError("--device does not go with --config: give --use_cpu True, or set use_cpu in the YAML")
        if near:
            raise UserError(f"unknown option {word!r}; did you mean {near[0]!r}?")
    for name in args.baseline or ():
        if name not in BASELINES:
            raise UserError(
                f"there is no baseline {name!r}{did_you_mean(name, BASELINES)} (baselines: {', '.join(BASELINES)})"
            )
    if args.ablate and args.baseline:
        raise UserError("--ablate compares fastpack with itself: leave out --baseline")
    if disabled_by_environment():
        raise UserError("FASTPACK_DISABLE is set: both sides would be TRL's trainer; unset it")
    for name, least in (("rounds", 1), ("steps", 1), ("warmup", 0), ("gate_steps", 0), ("threads", 1), ("seed", 0)):
        value = getattr(args, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} must be >= {least}, got {value}")
    if args.profile is not None:
        try:
            Path(args.profile).expanduser().mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--profile {args.profile!r} is not a folder: name another one") from error
    if args.plot is not None:
        from fastpack_trl.bench.picture import require_matplotlib

        require_matplotlib()
    given = {"json": args.json, "plot": args.plot}
    return {name: check_writable(file, f"--{name}") if file else None for name, file in given.items()}


def settings_of(config: str, flags: Sequence[str]) -> dict[str, Any]:
    """Return the YAML and what overrides it, for a record: of paths only the last part, no names of people, no tokens.

    ``{"model_name_or_path": "/data/me/Qwen3-8B", "hub_token": "..."}`` -> ``{"model_name_or_path": "Qwen3-8B"}``
    """
    from fastpack_trl.recipe.yaml import load_config

    values: dict[str, Any] = dict(load_config(config))
    name = ""
    for word in flags:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            values[name] = value if equals else "true"
        elif name:
            values[name] = word
    public = {key: value for key, value in values.items() if not any(part in key for part in _PRIVATE)}
    return {key: _without_folders(value) for key, value in public.items()}


def _without_folders(value: Any) -> Any:
    if isinstance(value, str) and "/" in value and (value[0] in "/~." or Path(value).exists()):
        return Path(value).name
    if isinstance(value, Mapping):
        return {str(key): _without_folders(item) for key, item in value.items()}
    return [_without_folders(item) for item in value] if isinstance(value, list) else value
