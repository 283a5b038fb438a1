"""``fastpack-trl init``: write one of the shipped YAML files here, or list them."""

from __future__ import annotations

import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

from fastpack_trl.errors import UserError, did_you_mean
from fastpack_trl.recipe.paths import configs_folder, write_new_file

QUICKSTART = "quickstart"


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``fastpack-trl init``."""
    add = parser.add_argument
    add("name", metavar="NAME", nargs="?", help="which config to write; without a name they are listed")
    add("--output", metavar="FILE", help="where to write it (default: NAME.yaml in this folder)")
    add("--force", action="store_true", help="replace FILE if it is there")


def run(args: Namespace) -> int:
    """Write the config and name the commands that use it; ``quickstart`` gets the model and the data it needs."""
    found = shipped()
    if args.name is None:
        print(_list(found))
        return 0
    name = args.name.removesuffix(".yaml").removeprefix("configs/")
    if name not in found:
        raise UserError(f"there is no config {name!r}{did_you_mean(name, found)} (`fastpack-trl init` lists them)")
    file = Path(args.output or f"{name.replace('/', '-')}.yaml").expanduser()
    text = found[name].read_text(encoding="utf-8").replace(f"configs/{name}.yaml", file.name)
    write_new_file(file, text, force=args.force)
    if name == QUICKSTART:
        from fastpack_trl.quickstart import make_inputs

        print(make_inputs())
    print(f"written: {file} ({_about(found[name])})\n{_next(name, str(file), text)}")
    return 0


def shipped() -> Mapping[str, Path]:
    """Return the YAML files that come with the package: ``{"quickstart": ..., "bench/qwen3-0.6b-full": ...}``."""
    folder = configs_folder()
    files = sorted(folder.rglob("*.yaml"), key=lambda file: (file.stem != QUICKSTART, len(file.parts), file.name))
    return {file.relative_to(folder).with_suffix("").as_posix(): file for file in files}


def _about(file: Path) -> str:
    """Return the first sentence of the comment that a file begins with."""
    comment = takewhile(lambda line: line.startswith("# "), file.read_text(encoding="utf-8").splitlines())
    return " ".join(line.removeprefix("# ") for line in comment).partition(". ")[0].rstrip(".")


def _list(found: Mapping[str, Path]) -> str:
    width = max(map(len, found)) + 2
    rows = [
        textwrap.fill(name.ljust(width) + _about(file), 80, subsequent_indent=" " * width, break_on_hyphens=False)
        for name, file in found.items()
    ]
    return "\n".join([*rows, "", "fastpack-trl init NAME writes one of them here."])


def _next(name: str, file: str, text: str) -> str:
    """Name the next commands; the last one trains."""
    yours = "" if name == QUICKSTART else "yours to change: model_name_or_path, dataset_name, output_dir\n"
    if name.startswith("bench/"):
        return f"{yours}measure: fastpack-trl bench --config {file}"
    command = text.partition("#     fastpack-trl ")[2].partition(" ")[0]
    doctor = f"what would run here: fastpack-trl doctor --config {file}"
    return f"{yours}{doctor}\ntrain: fastpack-trl {command} --config {file}"
