"""Files of the commands: shipped configs, ``--json``, local models and data, and what was meant by a wrong name."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from fastpack_trl.errors import UserError, nearest, short_repr

_QUICKSTART = Path("quickstart-output")
"""``configs/quickstart.yaml`` names ``model`` and ``data`` in it, which a command makes."""
_WRITTEN = ("./", "../", "/", "~")


def configs_folder() -> Path:
    """Return the folder of the shipped YAML files: ``configs/`` of a checkout, ``fastpack_trl/configs`` of a wheel."""
    package = Path(__file__).parents[1]
    folders = [package / "configs", package.parent / "configs"]
    found = [folder for folder in folders if (folder / "quickstart.yaml").is_file()]
    assert found, f"no configs in {' or '.join(map(str, folders))}"
    return found[0]


def check_new_file(file: Path, *, force: bool) -> None:
    """Check that a command may write `file`, the value of ``--output``; raise `UserError` if not."""
    if file.is_dir():
        raise UserError(f"--output {file} is a folder: name a file, e.g. {file / 'sft.yaml'}")
    if not file.absolute().parent.is_dir():
        raise UserError(f"--output {file} cannot be written: its folder does not exist; make it, or name another")
    if file.exists() and not force:
        raise UserError(f"{file} is there already: --force replaces it, --output names another file")


def add_json(parser: ArgumentParser, what: str) -> None:
    """Add ``--json FILE``: also write `what` to FILE."""
    parser.add_argument("--json", metavar="FILE", help=f"also write {what} to FILE")


def json_file(args: Namespace) -> Path | None:
    """Return the file of ``--json``; None without it. Ask before any work is done.

    Raises:
        UserError: nothing can be written there.
    """
    from fastpack_trl.measure.record import check_writable

    return check_writable(args.json) if args.json else None


def looks_local(name: str) -> bool:
    """Return True if `name` is a path: it exists, is written as one, or the hub cannot be meant.

    ``"./corpus"``, ``"~/corpus"``, ``"quickstart-output/modle"`` -> ``True``; ``"trl-lib/Capybara"`` -> ``False``,
    also beside a folder ``trl-lib``: it may hold some of what the hub has there, and the rest may be in its cache.
    """
    if "://" in name:
        return False
    # A hub name has one slash at most.
    written = name.startswith(_WRITTEN) or name.count("/") > 1 or "\\" in name
    return written or Path(name).exists() or Path(name).parent == _QUICKSTART


def absent(name: str, remedy: str) -> str:
    """Return where a local path was looked for, and what makes it or is meant, else `remedy`: ``" (looked for ...``."""
    path = Path(name).expanduser()
    where = f"looked for {path.absolute()}"
    if not name.startswith(_WRITTEN) and path.parent == _QUICKSTART and path.parent.is_dir():
        where += f", since the folder {path.parent.name!r} is here, and not on the hub"
    made = path.parts[:2] in ((_QUICKSTART.name, "model"), (_QUICKSTART.name, "data"))
    meant = "; 'fastpack-trl init quickstart' makes it" if made else did_you_mean_path(name)
    return f" ({where}){meant or f': {remedy}'}"


def did_you_mean_path(name: str) -> str:
    """Return ``"; did you mean 'quickstart-output/model'?"``; empty if nothing there has such a name."""
    try:
        near = _nearest(Path(name).expanduser())
    except OSError:  # a folder that may not be listed
        near = None
    return "" if near in (None, Path(name).expanduser()) else f"; did you mean {str(near)!r}?"


def _nearest(path: Path) -> Path | None:
    """Correct a path from its first folder on."""
    if path.exists() or path.parent == path:
        return path if path.exists() else None
    folder = _nearest(path.parent)
    if folder is None or not folder.is_dir():
        return None
    near = nearest(path.name, (child.name for child in folder.iterdir()))
    return folder / near[0] if near else None


def model_folder(option: str, name: str, needs: str = "config.json") -> str:
    """Return the name of a model or adapter as the libraries take it: ``~`` expanded in a local one.

    Raises `UserError`, naming `option`, for a local name without a folder, or a folder without the file it `needs`.
    """
    if not looks_local(name):
        return name
    folder = Path(name).expanduser()
    if not folder.is_dir():
        remedy = f"name a folder with {needs}, or a hub name"
        raise UserError(f"{option} {short_repr(name)} is not a folder{absent(name, remedy)}")
    if (folder / needs).is_file():
        return str(folder)
    inside = [str(file.parent) for file in sorted(folder.glob(f"*/{needs}"))]
    if inside:
        raise UserError(f"{option} {short_repr(name)} has no {needs}; did you mean {inside[0]!r}, which has one?")
    remedy = "name a folder that has one, or a hub name"
    if (folder / "adapter_config.json").is_file():
        also = "and give this folder to --adapter"
        if option != "--model":
            also = f"or the folder that `fastpack-trl merge {name}` writes"
        remedy = f"it is a PEFT adapter: name its base model, {also}"
    raise UserError(f"{option} {short_repr(name)} has no {needs}: {remedy}")
