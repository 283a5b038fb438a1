"""``fastpack-trl bench --config FILE``: a training run of the user's own, from its YAML, beside stock."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastpack_trl.bench.names import COMPILED_OPTION
from fastpack_trl.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from fastpack_trl.bench.plan import RoundPlan
    from fastpack_trl.bench.result_file import ResultFile
    from fastpack_trl.config import FastSFTConfig

ABLATE = "ablate"
BASELINES = {"stock": "stock", COMPILED_OPTION: "tuned", "tuned": "tuned", "rebuild": "rebuild"}
"""Names of ``--baseline`` and the keys of the sides in a record; ``tuned`` is the earlier name."""
_OPTIONS = (
    "--baseline", "--isolate", "--ablate", "--profile", "--gate-steps", "--warmup", "--pairs", "--threads", "--json",
    "--again", "--report", "--config",
)  # fmt: skip
"""Of ``fastpack-trl bench``, for a wrong one."""
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_PRIVATE = ("token", "output_dir", "logging_dir", "env", "run_name", "hub_model_id")
"""Parts of names whose values stay out of a record."""


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``fastpack-trl bench --config``; imports nothing heavy."""
    group = parser.add_argument_group(
        "your own run", "with --config; every other option is one of `fastpack-trl sft` and overrides the YAML"
    )
    add = group.add_argument
    add("--config", metavar="FILE", help="a YAML of `fastpack-trl sft`: stock and fastpack on its model and data")
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
    add("--profile", metavar="DIR", help="a Chrome trace of one step per side into DIR, and the largest gaps")
    add("--gate-steps", metavar="N", type=int, help="steps in which losses must agree before (default: 2; 0: no gate)")
    add("--warmup", metavar="N", type=int, help="steps of each side that are not timed (default: 2)")
    add(
        "--save", action="store_true", help="write the JSON under its default name, into the checkout's results or here"
    )
    # What `fastpack-trl sft` takes is parsed by its own parser.
    parser.set_defaults(more=[])


def given(args: Namespace) -> list[str]:
    """Return the options of this module that were given, as typed."""
    names = ("baseline", "isolate", "ablate", "profile", "gate_steps", "warmup", "save")
    return [f"--{name.replace('_', '-')}" for name in names if getattr(args, name, None) not in (None, False)]


def run(args: Namespace) -> int:
    """Measure, print the tables, write the JSON.

    Args:
        args: of ``fastpack-trl bench``; ``args.more`` is what goes to the parser of ``fastpack-trl sft``.

    Returns:
        0, or 130 after an interrupt, with what was measured.

    Raises:
        UserError: a wrong option, a config that cannot be loaded, losses that differ, or no side that could run.
    """
    _check(args)
    from fastpack_trl.measure.record import write_json
    from fastpack_trl.measure.tables import fact_lines

    file = _json_file(args)
    _make_folder(args.profile)
    with tempfile.TemporaryDirectory(prefix="fastpack-bench-") as folder, _threads(args.threads):
        record, lines = _measure(args, folder, file)
    print("\n".join([f"{record['case']}: {Path(args.config).name}", *fact_lines(record), *lines]))
    if args.save:
        target = default_file(record)
        write_json(target, record)
        print(f"\nwritten to {target}")
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
            names = [known for known in BASELINES if known != "tuned"]
            raise UserError(
                f"there is no baseline {name!r}{did_you_mean(name, BASELINES)} (baselines: {', '.join(names)})"
            )
    if args.ablate and (args.isolate or args.baseline or args.profile):
        raise UserError("--ablate compares fastpack with itself: leave out --isolate, --baseline and --profile")
    if disabled_by_environment():
        raise UserError("FASTPACK_DISABLE is set: both sides would be stock; unset it")


def _json_file(args: Namespace) -> ResultFile | None:
    from fastpack_trl.bench.result_file import ResultFile
    from fastpack_trl.measure.record import check_writable

    return ResultFile(check_writable(args.json), again=getattr(args, "again", False)) if args.json else None


def _make_folder(profile: str | None) -> None:
    if profile is None:
        return
    try:
        Path(profile).expanduser().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--profile {profile!r} cannot be a folder ({error.strerror or error}): name another one"
        ) from error


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    from fastpack_trl.bench.environment import limited_threads

    if count is not None and count < 1:
        raise UserError(f"--threads {count}: give 1 or more")
    with limited_threads(count) if count is not None else contextlib.nullcontext():
        yield


def plan_from(args: Namespace) -> RoundPlan:
    """Return the `RoundPlan` of the options."""
    from fastpack_trl.bench.plan import DEFAULT_PAIRS, GATE_STEPS, WARMUP, RoundPlan

    plan = RoundPlan(
        pairs=DEFAULT_PAIRS if args.pairs is None else args.pairs,
        warmup=WARMUP if args.warmup is None else args.warmup,
        gate_steps=GATE_STEPS if args.gate_steps is None else args.gate_steps,
        seed=args.seed or 0,
        profile=None if args.profile is None else Path(args.profile).expanduser(),
    )
    plan.check()
    return plan


def _measure(args: Namespace, folder: str, file: ResultFile | None) -> tuple[dict[str, Any], list[str]]:
    """Return the record, and its lines for people; taken over from `file` where the same run has finished it."""
    from fastpack_trl.bench import baselines
    from fastpack_trl.bench.compare import CASE, record_of
    from fastpack_trl.recipe.make_trainer import short_run_arguments

    plan, seed = plan_from(args), [] if args.seed is None else ["--seed", str(args.seed)]
    flags = [*args.more, *seed]
    # A wrong name or value is said before anything is loaded.
    training = short_run_arguments(args.config, folder, *flags).training
    sides = [*dict.fromkeys(BASELINES[name] for name in args.baseline or [baselines.STOCK]), baselines.OURS]
    if training.device.type == "cuda" and training.gradient_checkpointing and training.activation_memory != "off":
        sides.append(baselines.PLANNED)
    asked = {
        "sides": [] if args.ablate else sides,
        "isolate": args.isolate,
        "profile": args.profile is not None,
        "hash": _hash_of(args.config, flags),
    }
    settings = {"config": settings_of(args.config, args.more), "asked": asked}
    if file is not None:
        case = ABLATE if args.ablate else CASE
        head = record_of([{"device": training.device.type}], plan, False, case=case, **settings)
        record = file.whole(head)
        if record is not None:
            print(f"{case}: finished before, taken over from {file.path}; --again measures anew")
            return record, _lines(record)
    record = _measured(args, folder, flags, plan, sides, settings, training, file)
    if file is not None:
        file.save(record)
    return record, _lines(record)


def _lines(record: Mapping[str, Any]) -> list[str]:
    from fastpack_trl.bench.ablation import ablation_lines
    from fastpack_trl.bench.compare_tables import table

    return ["", *ablation_lines(record["rows"])] if record["case"] == ABLATE else [table(record)]


def _measured(
    args: Namespace,
    folder: str,
    flags: list[str],
    plan: RoundPlan,
    sides: list[str],
    settings: dict[str, Any],
    training: FastSFTConfig,
    file: ResultFile | None,
) -> dict[str, Any]:
    from fastpack_trl.bench.compare import bar, compare, record_of
    from fastpack_trl.bench.yaml_build import yaml_build

    build = yaml_build(args.config, flags, folder)
    if args.ablate:
        from fastpack_trl.bench.ablation import ablate, features

        configured = {name: str(getattr(training, name)) for name in features()}

        def keep(rows: list[dict[str, Any]], complete: bool = False) -> dict[str, Any]:
            return record_of(rows, plan, complete, case=ABLATE, **settings)

        def save(rows: list[dict[str, Any]]) -> None:
            if file is not None:
                file.save(keep(rows))

        return keep(*ablate(build, plan, configured=configured, bar=bar, save=save))
    if args.isolate:
        from fastpack_trl.bench.isolation import isolated

        return isolated(args.config, flags, sides, plan, settings)
    record = compare(
        build, pairs=plan.pairs, warmup=plan.warmup, gate_steps=plan.gate_steps, seed=plan.seed, sides=sides,
        profile=plan.profile,
    )  # fmt: skip
    record["settings"] |= settings
    return record


def settings_of(config: str, flags: Sequence[str]) -> dict[str, Any]:
    """Return the YAML and what overrides it, for a record: of paths only the last part, no names of people, no tokens.

    ``{"model_name_or_path": "/data/me/Qwen3-8B", "hub_token": "..."}`` -> ``{"model_name_or_path": "Qwen3-8B"}``
    """
    return {key: _without_folders(value) for key, value in _public(config, flags).items()}


def _hash_of(config: str, flags: Sequence[str]) -> str:
    """Return a hash of the same values with their folders: which run it was, where `settings_of` leaves that open."""
    text = json.dumps(_public(config, flags), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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


def default_file(record: Mapping[str, Any]) -> Path:
    """Return ``benchmarks/results/config_cpu_2026-11-20.json`` in a checkout, the same name here elsewhere.

    A file that exists is kept: the next gets ``_2`` behind its name.
    """
    results = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
    folder = results if record["source"]["commit"] is not None and results.is_dir() else Path.cwd()
    stem = f"{record['case']}_{record['machine']['device']}_{record['date'][:10]}"
    names = [f"{stem}.json", *(f"{stem}_{number}.json" for number in range(2, 1000))]
    return next(folder / name for name in names if not (folder / name).exists())
