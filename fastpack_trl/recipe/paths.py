"""Files of commands: shipped configs, local models, and suggestions for wrong paths."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path

from fastpack_trl.errors import UserError, command_line, did_you_mean, short_repr

_QUICKSTART = Path("quickstart-output")
"""``configs/quickstart.yaml`` names ``model`` and ``data`` in it, which a command makes."""


def configs_folder() -> Path:
    """Return the folder of the shipped YAML files: ``configs/`` of a checkout, ``fastpack_trl/configs`` of a wheel."""
    package = Path(__file__).parents[1]
    checkout = package.parent / "configs"
    return checkout if (checkout / "quickstart.yaml").is_file() else package / "configs"


def titled(rows: Mapping[str, object]) -> list[str]:
    """Return the lines of a table of names and values: ``{"a": 1, "bc": 2}`` -> ``["a   1", "bc  2"]``."""
    width = max(map(len, rows))
    return [f"{name.ljust(width)}  {value}" for name, value in rows.items()]


def looks_local(name: str) -> bool:
    """Return True if `name` is a path: it exists, is written as one, or cannot be a name on the hub.

    ``"./corpus"``, ``"~/corpus"``, ``"a/b/c"``, ``"quickstart-output/modle"`` -> ``True``; ``"trl-lib/Capybara"`` ->
    ``False``.
    """
    if "://" in name:
        return False
    written = name.startswith(("./", "../", "/", "~")) or name.count("/") > 1 or "\\" in name
    return written or Path(name).exists() or Path(name).parent == _QUICKSTART


def missing_hint(name: str) -> str:
    """Return where a local path was looked for, and a suggestion: ``" (looked for /a/b)"``."""
    path = Path(name).expanduser()
    made = path.parts[:2] in ((_QUICKSTART.name, "model"), (_QUICKSTART.name, "data"))
    hint = "; 'fastpack-trl init quickstart' makes it" if made else did_you_mean_path(name)
    return f" (looked for {path.absolute()}){hint}"


def did_you_mean_path(name: str) -> str:
    """Return ``"; did you mean 'quickstart-output/model'?"``; empty if no name in its folder is similar."""
    path = Path(name).expanduser()
    with contextlib.suppress(OSError):  # no folder, or one that may not be listed
        return did_you_mean(str(path), map(str, path.parent.iterdir()))
    return ""


def model_folder(option: str, name: str, needs: str = "config.json") -> str:
    """Return the name of a model or adapter as the libraries take it: ``~`` expanded in a local one.

    Raises `UserError`, naming `option`, for a local name without a folder, or a folder without the file it `needs`.
    """
    if not looks_local(name):
        return name
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise UserError(f"{option} {short_repr(name)} is not a folder{missing_hint(name)}")
    if (folder / needs).is_file():
        return str(folder)
    inside = sorted(folder.glob(f"*/{needs}"))
    fix = f"did you mean {str(inside[0].parent)!r}?" if inside else "name a folder that has one, or a hub name"
    if (folder / "adapter_config.json").is_file():
        use = f"or the folder that `{command_line('merge', name)}` writes"
        use = "and give this folder to --adapter" if option == "--model" else use
        fix = f"it is a PEFT adapter: name its base model, {use}"
    raise UserError(f"{option} {short_repr(name)} has no {needs}: {fix}")
