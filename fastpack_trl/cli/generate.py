"""``fastpack-trl generate``: what a trained model answers; of an adapter, beside its base."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path

from fastpack_trl.errors import UserError
from fastpack_trl.recipe.paths import add_json, json_file


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``fastpack-trl generate``."""
    from fastpack_trl.recipe.trained import add_trained

    add_trained(parser)
    add = parser.add_argument
    add("--prompt", metavar="TEXT", help="one prompt; what a user says, where the model has a chat template")
    add("--file", metavar="FILE", help="prompts: a text with one per line, or JSON lines with `prompt`")
    add("--raw", action="store_true", help="take prompts as they are, without the chat template")
    add("--max_new_tokens", metavar="N", type=int, default=128, help="longest answer (default: %(default)s)")
    add("--temperature", metavar="T", type=float, default=0.0, help="0 takes the likeliest token (default)")
    add("--seed", metavar="N", type=int, default=0, help="of the random numbers above a temperature of 0")
    add_json(parser, "prompts and answers")


def run(args: Namespace) -> int:
    """Print each prompt with its answers."""
    from fastpack_trl.measure.record import write_json
    from fastpack_trl.recipe.trained import answers, find_trained

    if bool(args.prompt) == bool(args.file):
        raise UserError("give --prompt TEXT or --file FILE")
    if args.max_new_tokens < 1:
        raise UserError(f"--max_new_tokens {args.max_new_tokens} is below 1")
    if args.temperature < 0:
        raise UserError(f"--temperature {args.temperature} is below 0: 0 takes the likeliest token")
    prompts = [args.prompt] if args.prompt else _prompts(Path(args.file).expanduser())
    file, rows = json_file(args), []
    given = {"max_new_tokens": args.max_new_tokens, "temperature": args.temperature, "seed": args.seed}
    for row in answers(find_trained(args), prompts, template=not args.raw, **given):
        rows.append(row)
        print("\n".join(f"{name}: {text.strip() or '(no text)'}" for name, text in row.items()), end="\n\n", flush=True)
    if file is not None:
        write_json(file, {"rows": rows, **given})
    return 0


def _prompts(file: Path) -> list[str]:
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--file {file} cannot be read as UTF-8 text: {error}") from error
    if not lines:
        raise UserError(f"--file {file} has no prompts: write one per line")
    if file.suffix not in (".jsonl", ".json"):
        return lines
    try:
        return [str(json.loads(line)["prompt"]) for line in lines]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f'--file {file}: write one object per line, e.g. {{"prompt": "Hello"}}') from error
