"""``fastpack-trl init`` and ``convert``: write a YAML file, a shipped one or the translation of another tool's."""

from __future__ import annotations

import shlex
import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from fastpack_trl.errors import UserError, command_line, did_you_mean, one_line, printable, short_repr
from fastpack_trl.measure.record import check_writable
from fastpack_trl.quickstart import make_inputs
from fastpack_trl.recipe.arguments import check
from fastpack_trl.recipe.foreign import NEEDS_YOU, convert
from fastpack_trl.recipe.paths import configs_folder
from fastpack_trl.recipe.yaml import load_config

QUICKSTART = "quickstart"
_LONGEST_NAME = 255  # bytes of a file name


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``init`` or ``convert``: the last word of the parser's program says which."""
    name, what = "NAME", "which config to write; without a name they are listed"
    if parser.prog.endswith(" convert"):
        name, what = "FILE", "a YAML of Axolotl, LLaMA-Factory or an Unsloth-style script"
    parser.add_argument("name", metavar=name, nargs="?", help=what)
    output = "where to write it (default: NAME.yaml, or NAME-fastpack.yaml, in this folder)"
    parser.add_argument("--output", metavar="FILE", help=output)
    parser.add_argument("--force", action="store_true", help="replace the output if it exists and differs")


def run(args: Namespace, record: dict[str, Any]) -> int:
    """Write the file; name the commands that use it."""
    if args.command == "convert":
        _convert(args)
    elif args.name is None:
        print(_list(shipped()))
    else:
        _init(args)
    return 0


def _write(args: Namespace, default: str, text: str) -> Path:
    """Write ``--output``; raise `UserError` if that is impossible or would replace another text."""
    name = args.output or default
    if printable(name) != name or len(Path(name).name.encode()) > _LONGEST_NAME:
        raise UserError(f"--output {short_repr(name)} has control characters or is too long: name another file")
    file = check_writable(name, "--output")
    is_same = file.is_file() and file.read_text(encoding="utf-8", errors="replace") == text
    if file.exists() and not args.force and not is_same:
        raise UserError(f"{file} exists: --force replaces it, --output names another file")
    file.write_text(text, encoding="utf-8")
    return file


def _convert(args: Namespace) -> None:
    """Translate a YAML; name the omitted keys, and the command that trains with it."""
    if not args.name:
        raise UserError("no file: name a YAML of Axolotl, LLaMA-Factory or an Unsloth-style script")
    source = Path(args.name).expanduser()
    if source.suffix not in ("", ".yaml", ".yml", ".json") and source.is_file():
        raise UserError(f"{args.name!r}: only YAML is read; for a script see From Unsloth in docs/migrating.md")
    converted, default = convert(load_config(args.name), source.absolute().parent), f"{source.stem}-fastpack.yaml"
    check(converted.values, converted.method, source.name, converted.origins)
    file = _write(args, default, converted.text(source.name, args.output or default))
    print(one_line(f"{source.name} is of {converted.tool}: {len(converted.values)} settings"))
    first = f"settle what needs you in {file}, then " * any(group == NEEDS_YOU for group, _ in converted.notes.values())
    train = f"{first}train: {command_line(converted.method.command, '--config', file)}"
    print(*converted.lines(), f"written: {file}", train, sep="\n")


def _init(args: Namespace) -> None:
    """Write a shipped file; ``quickstart`` gets the model and the data it needs."""
    found, name = shipped(), args.name.removesuffix(".yaml").removeprefix("configs/")
    if name not in found:
        raise UserError(f"config {name!r} does not exist{did_you_mean(name, found)} (`fastpack-trl init` lists them)")
    default = f"{name.replace('/', '-')}.yaml"
    shipped_text, output = found[name].read_text(encoding="utf-8"), args.output or default
    file = _write(args, default, shipped_text.replace(f"configs/{name}.yaml", shlex.quote(output)))
    if name == QUICKSTART:
        print(make_inputs())
    print(f"written: {file} ({_about(found[name])})")
    if name != QUICKSTART:
        print("yours to change: model_name_or_path, dataset_name, output_dir")
    if name.startswith("bench/"):
        print(f"measure: {command_line('bench', '--config', file)}")
        return
    command = shipped_text.partition("#     fastpack-trl ")[2].partition(" ")[0]
    print(f"what would run here: {command_line('doctor', '--config', file)}")
    print(f"train: {command_line(command, '--config', file)}")


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
    wrapper = textwrap.TextWrapper(80, subsequent_indent=" " * width, break_on_hyphens=False)
    rows = [wrapper.fill(name.ljust(width) + _about(file)) for name, file in found.items()]
    return "\n".join([*rows, "", "fastpack-trl init NAME writes one of them here."])
