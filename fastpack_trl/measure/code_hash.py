"""A hash of each room of the package and of its benchmarks: what a measurement was made with, not how it is explained.

Comments, docstrings and empty lines are left out, so that a sentence made better asks for no new measurement.
"""

from __future__ import annotations

import hashlib
import io
import tokenize
from collections.abc import Mapping
from functools import cache
from pathlib import Path, PurePosixPath

BENCHMARKS = "benchmarks"
_DIGITS = 12
_BETWEEN = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}


@cache
def code_hashes() -> dict[str, str]:
    """Return the hash of each room of the package, by the name of its folder or file; read once per process.

    In a checkout `BENCHMARKS` is one more: an installed package has none beside it.
    """
    package = Path(__file__).resolve().parents[1]
    folders = {package: package}
    if (package.parent / "pyproject.toml").is_file():
        folders[package.parent / BENCHMARKS] = package.parent
    return hashes_of(
        {
            path.relative_to(top).as_posix(): path.read_bytes()
            for folder, top in folders.items()
            for path in folder.rglob("*.py")
        }
    )


def hashes_of(files: Mapping[str, bytes]) -> dict[str, str]:
    """Return the hash of each room: ``{"lora": "1f0e...", "run.py": "99ab..."}``.

    Args:
        files: text of the Python files by their path within the package, e.g. ``lora/linear.py``.
    """
    rooms: dict[str, list[str]] = {}
    for path in sorted(files):
        rooms.setdefault(PurePosixPath(path).parts[0], []).append(f"{path}\n{code_of(files[path])}\n")
    return {room: hashlib.sha256("".join(texts).encode()).hexdigest()[:_DIGITS] for room, texts in rooms.items()}


def code_of(source: bytes) -> str:
    """Return Python source without comments, docstrings, empty lines and spaces at the end of a line.

    The same on every version of Python, whose tokens of f-strings differ: what is left out is cut from the text.
    """
    lines = source.decode("utf-8").splitlines()
    tokens = [token for token in tokenize.tokenize(io.BytesIO(source).readline) if token.type != tokenize.NL]
    cuts = [token for token in tokens if token.type == tokenize.COMMENT]
    said = [token for token in tokens if token.type != tokenize.COMMENT]
    for before, token, after in zip(said, said[1:], said[2:], strict=False):
        if token.type == tokenize.STRING and before.type in _BETWEEN and after.type == tokenize.NEWLINE:
            cuts.append(token)
    for token in sorted(cuts, key=lambda token: token.start, reverse=True):
        (first, begin), (last, end) = token.start, token.end
        lines[first - 1 : last] = [lines[first - 1][:begin] + lines[last - 1][end:]]
    return "\n".join(line.rstrip() for line in lines if line.strip())
