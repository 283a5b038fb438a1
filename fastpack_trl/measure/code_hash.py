"""A hash of each subpackage and of the benchmarks: it identifies the code that made a measurement.

Comments, docstrings and empty lines are left out, so that better wording requires no new measurement.
"""

from __future__ import annotations

import hashlib
import io
import tokenize
from functools import cache
from pathlib import Path

BENCHMARKS = "benchmarks"
_DIGITS = 12
_BETWEEN = {tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING}


@cache
def code_hashes() -> dict[str, str]:
    """Return the hash of each subpackage by its folder or file, ``{"lora": "1f0e...", "run.py": "99ab..."}``.

    Read once per process. `BENCHMARKS` is one more in a checkout; an installed package has none.
    """
    package = Path(__file__).resolve().parents[1]
    folders = {package: package}
    if (package.parent / "pyproject.toml").is_file():
        folders[package.parent / BENCHMARKS] = package.parent
    files = {path.relative_to(top).as_posix(): path for folder, top in folders.items() for path in folder.rglob("*.py")}
    texts: dict[str, str] = {}
    for path in sorted(files):
        name = path.partition("/")[0]
        texts[name] = texts.get(name, "") + f"{path}\n{code_of(files[path].read_bytes())}\n"
    return {name: hashlib.sha256(text.encode()).hexdigest()[:_DIGITS] for name, text in texts.items()}


def code_of(source: bytes) -> str:
    """Return Python source without comments, docstrings, empty lines and trailing spaces.

    The parts are cut from the text, because the tokens of f-strings depend on the version of Python.
    """
    lines = source.decode("utf-8").splitlines()
    tokens = [token for token in tokenize.tokenize(io.BytesIO(source).readline) if token.type != tokenize.NL]
    cuts = [token for token in tokens if token.type == tokenize.COMMENT]
    code = [token for token in tokens if token.type != tokenize.COMMENT]
    for before, token, after in zip(code, code[1:], code[2:], strict=False):
        if token.type == tokenize.STRING and before.type in _BETWEEN and after.type == tokenize.NEWLINE:
            cuts.append(token)
    for token in sorted(cuts, key=lambda token: token.start, reverse=True):
        (first, begin), (last, end) = token.start, token.end
        lines[first - 1 : last] = [lines[first - 1][:begin] + lines[last - 1][end:]]
    return "\n".join(line.rstrip() for line in lines if line.strip())
