"""``fastpack-trl merge``: write a model with the adapter of a run in its weights."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from fastpack_trl.errors import UserError, preparing


def add_arguments(parser: ArgumentParser) -> None:
    """Add the options of ``fastpack-trl merge``."""
    from fastpack_trl.recipe.trained import add_trained

    add_trained(parser)
    parser.add_argument("--output", metavar="DIR", help="where to write it (default: the adapter's folder + -merged)")
    parser.add_argument("--push_to_hub", metavar="NAME", help="also push it to the hub under this name")


def run(args: Namespace) -> int:
    """Merge and write; name what comes next."""
    from fastpack_trl.model.preflight import unwritable
    from fastpack_trl.recipe.trained import find_trained, merge

    found = find_trained(args)
    output = Path(args.output or f"{found.folder.rstrip('/')}-merged").expanduser()
    if output.is_dir() and any(output.iterdir()):
        raise UserError(f"--output {output} is not empty: name another folder")
    if reason := unwritable(output):
        raise UserError(f"--output {output}: {reason}")
    into = merge(found, output)
    print(f"{found.folder} merged into {into}\nwritten: {output}")
    if args.push_to_hub:
        from huggingface_hub import HfApi

        with preparing():
            repository = HfApi().create_repo(args.push_to_hub, exist_ok=True).repo_id
            HfApi().upload_folder(repo_id=repository, folder_path=output)
        print(f"pushed: https://huggingface.co/{repository}")
    print(f"try it: fastpack-trl generate {output} --prompt 'Hello'")
    return 0
