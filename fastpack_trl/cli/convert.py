"""``fastpack-trl convert``: write a YAML of Axolotl, LLaMA-Factory or an Unsloth-style script in our names."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path

from fastpack_trl.errors import UserError
from fastpack_trl.recipe.paths import write_new_file
from fastpack_trl.recipe.yaml import load_config


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``fastpack-trl convert``."""
    add = parser.add_argument
    add("file", metavar="FILE", nargs="?", help="a YAML of Axolotl, LLaMA-Factory or an Unsloth-style script")
    add("--output", metavar="FILE", help="where to write ours (default: NAME-fastpack.yaml in this folder)")
    add("--force", action="store_true", help="replace the output if it is there")


def run(args: Namespace) -> int:
    """Write the file; name what was renamed, what has no equivalent, and the command that trains with it."""
    if not args.file:
        raise UserError("no file: name a YAML of Axolotl, LLaMA-Factory or an Unsloth-style script")
    config = load_config(args.file)
    source = Path(args.file).expanduser()
    output = Path(args.output or f"{source.stem}-fastpack.yaml").expanduser()
    from fastpack_trl.recipe.foreign import convert

    found = convert(config, source.absolute().parent)
    write_new_file(output, found.text(source.name, str(output)), force=args.force)
    print(f"{source.name} is of {found.tool}: {len(found.values)} settings")
    print("\n".join([*_rows("renamed", found.mapped), *_rows("left out", found.without)]))
    print(f"written: {output}\ntrain: fastpack-trl {found.method.command} --config {output}")
    return 0


def _rows(title: str, rows: Mapping[str, str]) -> list[str]:
    width = max(map(len, rows), default=0)
    return [f"{title}:", *(f"  {key.ljust(width)}  {value}" for key, value in rows.items())] if rows else []
