"""``fastpack-trl bench``: stock beside fastpack on a run of your own; a table for people, JSON for machines."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from fastpack_trl.bench.views import COMPILED_OPTION
from fastpack_trl.errors import UserError, did_you_mean
from fastpack_trl.recipe.methods import SFT

if TYPE_CHECKING:
    from fastpack_trl.bench.result_file import ResultFile
    from fastpack_trl.bench.side import RoundPlan
    from fastpack_trl.recipe.arguments import Arguments

CASES_COMMAND = "python -m benchmarks"
ABLATE = "ablate"
BASELINES = {"stock": "stock", COMPILED_OPTION: "tuned", "tuned": "tuned", "rebuild": "rebuild"}
"""Names of ``--baseline`` and the keys of the sides in a record; ``tuned`` is the earlier name."""
_OPTIONS = (
    "--baseline", "--isolate", "--ablate", "--profile", "--gate-steps", "--warmup", "--pairs", "--threads", "--json",
    "--again", "--report", "--config",
)  # fmt: skip
"""Of ``fastpack-trl bench``, for a wrong one."""
_WITH_CONFIG = ("baseline", "isolate", "ablate", "profile", "gate_steps", "warmup")
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_PRIVATE = ("token", "output_dir", "logging_dir", "env", "run_name", "hub_model_id")
"""Parts of names whose values stay out of a record."""


class MovedToBenchmarks(Action):
    """An option of the in-house cases: says where they are."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> NoReturn:
        """Raise `UserError` with the command."""
        command = " ".join([CASES_COMMAND, str(option_string), *([str(values)] if values else [])])
        here = (Path(__file__).resolve().parents[2] / "benchmarks" / "__main__.py").is_file()
        without = "" if here else " (this is an installed package without them: clone the repository)"
        raise UserError(f"the in-house cases are no part of the package; in a checkout: {command}{without}")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``fastpack-trl bench``; imports nothing heavy."""
    add = parser.add_argument
    cases = f"the in-house cases are in benchmarks/ of the repository: `{CASES_COMMAND} --list` in a checkout"
    add("--case", metavar="NAME", nargs="?", action=MovedToBenchmarks, help=cases)
    add("--list", nargs=0, action=MovedToBenchmarks, help="as --case")
    add(
        "--json",
        metavar="FILE",
        help="write every figure, every single time, settings and versions to FILE once the run is finished; a "
        "finished run in FILE is taken over if it is the same (config, settings, versions, commit, device), another "
        "run's file is an error",
    )
    add("--again", action="store_true", help="measure anew and replace the FILE of --json")
    add(
        "--report",
        metavar="FILE",
        nargs="*",
        help="Markdown tables and plots from these JSON files, or from the folders they lie in; measures nothing",
    )
    add("--out", metavar="DIR", help="folder of the report (default: bench-report)")
    add("--pairs", metavar="N", type=int, help="timed pairs (rounds) of steps; 6 or more for an interval of 95 %%")
    add("--threads", metavar="N", type=int, help="CPU threads of torch (default: torch's own)")
    add("--seed", metavar="N", type=int, help="of weights, data and order (default: the YAML's)")
    add = parser.add_argument_group(
        "your own run", "with --config; every other option is one of the command that the YAML is for and overrides it"
    ).add_argument
    add(
        "--config",
        metavar="FILE",
        help="a YAML of `fastpack-trl sft`, `dpo`, `reward`, `kto`, `grpo` or `rloo` "
        "(--trainer NAME says which, if its keys do not): stock and fastpack on its model and data; of grpo and rloo "
        "the learner alone, on made-up completions",
    )
    add(
        "--baseline",
        metavar="NAME",
        nargs="+",
        help=f"beside fastpack: stock (as installed, the default), {COMPILED_OPTION} (stock with layers compiled by "
        "accelerate, the best attention that loads, Liger), rebuild (stock with metadata and mask made again in each "
        "layer)",
    )
    add("--isolate", action="store_true", help="one process per side, one after the other: each has the memory alone")
    add(
        "--ablate", action="store_true", help="each feature over none, or over the ones that it needs, and all together"
    )
    add("--profile", metavar="DIR", help="a Chrome trace of one step per side into DIR, and its longest operators")
    add("--gate-steps", metavar="N", type=int, help="steps in which losses must agree before (default: 2; 0: no gate)")
    add("--warmup", metavar="N", type=int, help="steps of each side that are not timed (default: 2)")
    parser.set_defaults(more=[])  # what `fastpack-trl sft` takes is parsed by its own parser


def run(args: Namespace) -> int:
    """Measure a config, or write a report of JSON files.

    Returns:
        0, also where fastpack is slower: it is a measurement. 130 after an interrupt, with what was finished.

    Raises:
        UserError: nothing asked for, options that do not go together, a file that cannot be read or written, a config
            that cannot be loaded, losses that differ, or no side that could run.
    """
    if args.config is not None:
        return _run_config(args)
    for name in _WITH_CONFIG:
        if getattr(args, name, None) not in (None, False):
            raise UserError(f"--{name.replace('_', '-')} goes with --config FILE only")
    if args.report is not None:
        return report(args.report, args.out)
    if args.out is not None:
        raise UserError("--out names the folder of a report: give --report too")
    raise UserError(
        "nothing to measure: give --config FILE for a run of your own, or --report FILE for tables and plots; the "
        f"in-house cases: {CASES_COMMAND} --list in a checkout"
    )


def report(paths: list[str], out: str | None) -> int:
    """Write the report of JSON files (`write_report`) and print its name."""
    from fastpack_trl.bench.report import DEFAULT_FOLDER, write_report

    if not paths:
        raise UserError("--report has no file: name JSON files of fastpack-trl bench, or a folder with some")
    first, *pictures = write_report(paths, out or DEFAULT_FOLDER)
    print(f"\n{first}: tables, and {len(pictures)} plots beside it")
    return 0


def _run_config(args: Namespace) -> int:
    """Measure a YAML, print the tables, write the JSON."""
    _check(args)
    from fastpack_trl.bench.environment import limited_threads
    from fastpack_trl.bench.result_file import ResultFile
    from fastpack_trl.measure.record import check_writable
    from fastpack_trl.measure.tables import fact_lines

    file = ResultFile(check_writable(args.json), again=args.again) if args.json else None
    if args.profile is not None:
        try:
            Path(args.profile).expanduser().mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"--profile {args.profile!r} cannot be a folder ({reason}): name another one") from error
    threads = contextlib.nullcontext() if args.threads is None else limited_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="fastpack-bench-") as folder, threads:
        record = _record(args, folder, file)
    print("\n".join([f"{record['case']}: {Path(args.config).name}", *fact_lines(record), *_lines(record)]))
    return 0 if record["complete"] else EXIT_INTERRUPTED


def _check(args: Namespace) -> None:
    from fastpack_trl.report import disabled_by_environment

    if args.report is not None or args.out is not None:
        raise UserError("--report and --out do not go with --config: call --report on the FILE of --json afterwards")
    if any(word.partition("=")[0] == "--device" for word in args.more):
        raise UserError(
            "--device does not go with --config: use_cpu in the YAML, or --use_cpu True, says where it runs"
        )
    for word in args.more:  # the parser of `sft`, which gets these, knows nothing of ours
        near = get_close_matches(word.partition("=")[0], _OPTIONS, n=1, cutoff=0.85) if word.startswith("--") else []
        if near:
            raise UserError(f"unknown option {word!r}; did you mean {near[0]!r}?")
    for name in args.baseline or ():
        if name not in BASELINES:
            names = ", ".join(known for known in BASELINES if known != "tuned")
            raise UserError(f"there is no baseline {name!r}{did_you_mean(name, BASELINES)} (baselines: {names})")
    if args.ablate and (args.isolate or args.baseline or args.profile):
        raise UserError("--ablate compares fastpack with itself: leave out --isolate, --baseline and --profile")
    if disabled_by_environment():
        raise UserError("FASTPACK_DISABLE is set: both sides would be stock; unset it")
    if args.threads is not None and args.threads < 1:
        raise UserError(f"--threads {args.threads}: give 1 or more")


def _plan(args: Namespace) -> RoundPlan:
    from fastpack_trl.bench.side import RoundPlan

    given = {name: getattr(args, name) for name in ("pairs", "warmup", "gate_steps", "seed")}
    profile = None if args.profile is None else Path(args.profile).expanduser()
    plan = RoundPlan(**{name: value for name, value in given.items() if value is not None}, profile=profile)
    plan.check()
    return plan


def _record(args: Namespace, folder: str, file: ResultFile | None) -> dict[str, Any]:
    """Return the record; taken over from `file` where the same run has finished it."""
    from fastpack_trl.bench import baselines
    from fastpack_trl.bench.compare import CASE, record_of
    from fastpack_trl.recipe.make_trainer import short_run_arguments

    plan = _plan(args)
    flags = [*args.more, *([] if args.seed is None else ["--seed", str(args.seed)])]
    # A wrong name or value is said before anything is loaded.
    arguments = short_run_arguments(args.config, folder, *flags)
    training = arguments.training
    if getattr(training, "use_vllm", False):
        raise UserError("bench times the learner alone, on made-up completions: give --use_vllm False")
    if arguments.method is not SFT and (args.ablate or "rebuild" in (args.baseline or ())):
        raise UserError(f"--ablate and the baseline rebuild are of `sft`: this YAML is for {arguments.method.command}")
    sides = [*dict.fromkeys(BASELINES[name] for name in args.baseline or [baselines.STOCK]), baselines.OURS]
    if training.device.type == "cuda" and training.gradient_checkpointing and training.activation_memory != "off":
        sides.append(baselines.PLANNED)
    values = _public(args.config, flags)
    asked = {
        "sides": [] if args.ablate else sides,
        "isolate": args.isolate,
        "profile": args.profile is not None,
        # Which run it was, where the settings without their folders leave that open.
        "hash": hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()[:16],
    }
    settings = {"config": settings_of(args.config, args.more), "asked": asked}
    case = ABLATE if args.ablate else CASE
    if file is not None:
        head = record_of(plan, [{"device": training.device.type}], False, case=case, **settings)
        found = file.whole(head)
        if found is not None:
            print(f"{case}: finished before, taken over from {file.path}; --again measures anew")
            return found

    def keep(rows: Sequence[Mapping[str, Any]], complete: bool = False) -> dict[str, Any]:
        record = record_of(plan, rows, complete, case=case, **settings)
        if file is not None:
            file.save(record)
        return record

    return keep(*_measured(args, folder, flags, plan, sides, arguments, keep))


def _measured(
    args: Namespace, folder: str, flags: Sequence[str], plan: RoundPlan, sides: Sequence[str], arguments: Arguments,
    save: Callable[[list[dict[str, Any]]], Any],
) -> tuple[list[dict[str, Any]], bool]:  # fmt: skip
    """Return the rows, and whether all are there."""
    from fastpack_trl.bench.isolation import isolated, yaml_build

    if args.isolate:
        return isolated(args.config, flags, sides, plan)
    build = yaml_build(args.config, flags, folder)
    if args.ablate:
        from fastpack_trl.bench.ablation import ablate, features

        configured = {name: str(getattr(arguments.training, name)) for name in features()}
        return ablate(build, plan, configured=configured, save=save)
    from fastpack_trl.bench.compare import in_turn

    return in_turn(build, plan, sides, method=arguments.method)


def _lines(record: Mapping[str, Any]) -> list[str]:
    from fastpack_trl.bench.ablation import ablation_lines
    from fastpack_trl.bench.compare_tables import table

    return ["", *ablation_lines(record["rows"])] if record["case"] == ABLATE else [table(record)]


def settings_of(config: str, flags: Sequence[str]) -> dict[str, Any]:
    """Return the YAML and what overrides it, for a record: of paths only the last part, no names of people, no tokens.

    ``{"model_name_or_path": "/data/me/Qwen3-8B", "hub_token": "..."}`` -> ``{"model_name_or_path": "Qwen3-8B"}``
    """
    return {key: _without_folders(value) for key, value in _public(config, flags).items()}


def _public(config: str, flags: Sequence[str]) -> dict[str, Any]:
    from fastpack_trl.recipe.yaml import load_config

    values: dict[str, Any] = dict(load_config(config))
    name = ""
    for word in flags:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            values[name] = value if equals else "true"
        elif name:
            values[name] = word
    return {key: value for key, value in values.items() if not any(part in key for part in _PRIVATE)}


def _without_folders(value: Any) -> Any:
    if isinstance(value, str) and "/" in value and (value[0] in "/~." or Path(value).exists()):
        return Path(value).name
    if isinstance(value, Mapping):
        return {str(key): _without_folders(item) for key, item in value.items()}
    return [_without_folders(item) for item in value] if isinstance(value, list) else value
