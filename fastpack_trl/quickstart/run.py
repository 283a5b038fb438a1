"""``fastpack-trl quickstart``: full fine-tune, LoRA and a comparison with stock TRL on real text; offline, on the CPU.

Nothing is downloaded: the text is the standard library's own documentation (`corpus`), the model a few million random
weights (`small_model`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter

from fastpack_trl.errors import UserError
from fastpack_trl.recipe.paths import add_json, configs_folder, json_file

DEFAULT_FOLDER = Path("quickstart-output")
MARKER = ".fastpack-quickstart"
"""A file that marks the folder, and all of `OUR_NAMES` in it, as written by the quickstart."""
OUR_NAMES = {
    "data": "the text: train.jsonl, test.jsonl",
    "init": "tokenizer and random model",
    "model": "the model after the full fine-tune",
    "adapter": "the LoRA adapter",
    "quickstart.yaml": "the LoRA run's settings; yours to change: fastpack-trl sft --config ...",
    "quickstart.json": "every figure",
    "cache": "tokenized rows",
    "comparison": "working folder of the comparison",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``fastpack-trl quickstart``."""
    add = parser.add_argument
    folder_help = f"folder for everything it writes ({DEFAULT_FOLDER})"
    add("--output_dir", type=Path, default=DEFAULT_FOLDER, metavar="DIR", help=folder_help)
    add_json(parser, "every figure, setting, version and logged loss")
    for name, default, text in (
        ("steps", 60, "optimizer steps of the full fine-tune"),
        ("lora_steps", 30, "optimizer steps of the LoRA run"),
        ("compare_steps", 8, "timed steps per round of the comparison with stock TRL, two rounds of each side"),
        ("seed", 0, "seed of weights and data order"),
    ):
        add(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (%(default)s)")
    overwrite_help = "write into a folder that holds other files; those stay as they are"
    add("--overwrite", action="store_true", help=overwrite_help)


def run(args: argparse.Namespace) -> int:
    """Run all stages; return 1 if a promise was broken, else 0, with a line for each broken or not made.

    Raises:
        UserError: a wrong setting, or a folder that holds something else.
    """
    figures_file, folder = _checked(args), args.output_dir.expanduser()
    prepare_folder(folder, overwrite=args.overwrite)
    start = perf_counter()
    print(f"Writing to {folder}/; offline, float32, CPU.")
    (folder / "quickstart.yaml").write_text(yaml_text(folder), encoding="utf-8")
    with _environment(folder / "cache"), _quiet():
        from fastpack_trl.measure.record import write_json
        from fastpack_trl.quickstart import report, stages

        figures = stages.run_all(args, folder.resolve())
        figures["seconds"]["total"] = perf_counter() - start
        promises = figures["promises"] = report.promises(figures)
    for path in filter(None, (folder / "quickstart.json", figures_file)):
        write_json(path, figures)
    width = max(map(len, OUR_NAMES))
    written = [f"  {name.ljust(width)}  {what}" for name, what in OUR_NAMES.items() if (folder / name).exists()]
    print("\n".join([f"\n{report.table(figures)}\n", f"Files in {folder}/", *written]))
    for promise in promises:
        if not promise["kept"]:
            said = "too short to promise" if promise["kept"] is None else "failed"
            print(f"fastpack-trl quickstart: {said}: {promise['text']}")
    return 1 if any(promise["kept"] is False for promise in promises) else 0


def _checked(args: argparse.Namespace) -> Path | None:
    """Check the options; return the file of ``--json``."""
    for name, least in {"steps": 2, "lora_steps": 1, "compare_steps": 1, "seed": 0}.items():
        value = getattr(args, name)
        if value < least:
            raise UserError(f"--{name} {value} is below {least}")
    if args.seed >= 2**32:
        raise UserError(f"--seed {args.seed} is above {2**32 - 1}, the largest that numpy takes")
    return json_file(args)


def prepare_folder(folder: Path, *, overwrite: bool) -> None:
    """Make `folder` with no file of `OUR_NAMES` in it; those of an earlier quickstart are removed.

    Raises:
        UserError: `folder` is a file, or has files that the quickstart did not write. With `overwrite` they may be
            there, but not under our names: they would have to be deleted.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: choose another --output_dir")
    ours = (folder / MARKER).is_file()
    if folder.is_dir() and any(folder.iterdir()) and not ours:
        if not overwrite:
            raise UserError(
                f"{folder} is not empty and was not written by the quickstart: choose another --output_dir, or "
                "--overwrite to write beside what is there"
            )
        taken = [name for name in OUR_NAMES if (folder / name).exists()]
        if taken:
            raise UserError(
                f"{folder} already has {', '.join(taken)}, not written by the quickstart: move it away or choose "
                "another --output_dir"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in OUR_NAMES:
            path = folder / name
            if path.is_symlink() or path.is_file():
                path.unlink()  # a link: what it points to is not ours
            elif path.is_dir():
                shutil.rmtree(path)
        (folder / MARKER).write_text("Written by `fastpack-trl quickstart`, which replaces it.\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder} cannot be written: {error}") from error


def yaml_text(folder: Path) -> str:
    """Return ``configs/quickstart.yaml``; its paths lead to `folder`."""
    text = (configs_folder() / "quickstart.yaml").read_text(encoding="utf-8")

    def moved(match: re.Match[str]) -> str:
        # A JSON string is a YAML string, whatever characters the path has.
        return match[1] + json.dumps(str(folder / match[2]), ensure_ascii=False)

    return re.sub(rf"(?m)^(\w+: ){DEFAULT_FOLDER}/(\S+)", moved, text)


def make_for_sft(folder: Path = DEFAULT_FOLDER) -> str:
    """Make the data and a random model for ``configs/quickstart.yaml``; return a line that says which there are.

    Raises:
        UserError: `folder` holds something else.
    """
    if (folder / "model").is_dir() and (folder / "data").is_dir():
        return f"model and data: those in {folder}/"
    if folder.exists() and not (folder / MARKER).is_file():
        raise UserError(f"{folder} is there, and not of the quickstart, which keeps its files in it: move it away")
    prepare_folder(folder, overwrite=False)
    with _environment(folder / "cache"), _quiet():
        from fastpack_trl.quickstart import stages

        stages.make_inputs(folder, seed=0)
    (folder / "init").rename(folder / "model")
    weights = "a small model of random weights, which learns little (`fastpack-trl quickstart` trains it first)"
    return f"made {folder}/: docstrings of the standard library, and {weights}"


@contextmanager
def _environment(cache: Path) -> Iterator[None]:
    """Set variables: no network, no telemetry, the data cache inside our folder, threads that wait without spinning.

    The libraries read these variables when they are imported, so this comes before their import.
    """
    wanted = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_DATASETS_CACHE": str(cache.resolve()),
        # On a machine with other work, an OpenMP thread that spins at a barrier keeps the one it waits for from
        # running: steps then take several times as long.
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _quiet() -> Iterator[None]:
    """Drop known noise of the libraries; warnings, errors, progress bars and the trainer's banner stay.

    Not errors alone: at that level transformers shows no progress bars.
    """
    import datasets
    import transformers

    with ExitStack() as stack:
        for library in (datasets, transformers):
            stack.callback(library.logging.set_verbosity, library.logging.get_verbosity())
            library.logging.set_verbosity_warning()
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", FutureWarning)  # TRL's defaults use names that transformers renames
        yield
