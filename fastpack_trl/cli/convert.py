"""``fastpack-trl convert``: write a YAML of Axolotl, LLaMA-Factory or an Unsloth-style script in our names."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from fastpack_trl.errors import UserError
from fastpack_trl.recipe.paths import write_new_file
from fastpack_trl.recipe.yaml import load_config


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``fastpack-trl convert``."""
    add = parser.add_argument
    add("file", metavar="FILE", nargs="?", help="a YAML of Axolotl, LLaMA-Factory or an Unsloth-style script")
    add("--output", metavar="FILE", help="where to write ours (default: NAME-fastpack.yaml in this folder)")
    add("--force", action="store_true", help="replace the output if it exists")


def run(args: Namespace) -> int:
    """Write the file; name the omitted keys, and the command that trains with it."""
    if not args.file:
        raise UserError("no file: name a YAML of Axolotl, LLaMA-Factory or an Unsloth-style script")
    from fastpack_trl.recipe.foreign import convert

    source = Path(args.file).expanduser()
    converted = convert(load_config(args.file), source.absolute().parent)
    output = Path(args.output or f"{source.stem}-fastpack.yaml").expanduser()
    write_new_file(output, converted.text(source.name, str(output)), force=args.force)
    print(f"{source.name} is of {converted.tool}: {len(converted.values)} settings")
    print("\n".join(f"left out: {key}: {why}" for key, why in converted.left_out.items()))
    print(f"written: {output}\ntrain: fastpack-trl {converted.method.command} --config {output}")
    return 0
