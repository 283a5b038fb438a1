"""Code blocks and commands of the pages: README, docs/, CONTRIBUTING, configs/README."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from textwrap import dedent
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
NAMED = ("README.md", "CONTRIBUTING.md", "configs/README.md")
PAGES = [*(ROOT / name for name in NAMED), *sorted(ROOT.glob("docs/**/*.md"))]


class Block(NamedTuple):
    """A fenced block. Two of the same text are one, whatever their pages."""

    kind: str
    text: str
    page: str
    line: int

    @property
    def name(self) -> str:
        """Page and line, for people."""
        return f"{self.page}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Return the fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^( *)```(\w*)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    name = str(page.relative_to(ROOT))
    made = [Block(m[2], dedent(m[3]), name, text.count("\n", 0, m.start()) + 1) for m in found]
    assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(made), f"{name}: a block is not closed"
    return made


def text_of(page: Path) -> str:
    """Return a page without its blocks."""
    return re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def all_blocks(*kinds: str) -> list[Block]:
    """Return the blocks of all pages that are of these kinds, each text once."""
    found = {block.text: block for page in reversed(PAGES) for block in reversed(blocks(page)) if block.kind in kinds}
    return list(found.values())[::-1]


def commands() -> dict[str, str]:
    """Return the command lines of the pages: the line without comment -> where it is.

    Those of console blocks, and what stands as `fastpack-trl ...` in the text, unless it has a word to fill in.
    """
    found: dict[str, str] = {}
    for block in all_blocks("console"):
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            if words:
                found.setdefault(shlex.join(words), block.name)
    for page in PAGES:
        for command in re.findall(r"(?<!`)`(fastpack-trl [^`]+)`", text_of(page)):
            line = " ".join(command.split())
            if not re.search(r"\b[A-Z]{3,}\b|\.\.\.|/\.\.", line):
                found.setdefault(line, str(page.relative_to(ROOT)))
    return found


def sides(diff: str) -> tuple[str, str]:
    """Return the text before and after a diff without header."""
    lines = diff.splitlines(keepends=True)
    before = "".join(line[1:] if line.strip() else line for line in lines if not line.startswith("+"))
    return before, "".join(line[1:] if line.strip() else line for line in lines if not line.startswith("-"))
