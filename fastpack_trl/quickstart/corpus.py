"""Real text without a download: the docstrings of the standard library of the running interpreter.

Every module is read and parsed with `ast`; none is imported, so nothing of it runs.
"""

from __future__ import annotations

import ast
import json
import os
import sysconfig
import warnings
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastpack_trl.errors import UserError

Kind = Literal["module", "class", "function", "method"]

MIN_CHARS = 30
MAX_CHARS = 6_000
# Installed packages, test suites and bundled applications are not the library's reference text.
EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "turtledemo", "lib2to3", "ensurepip"}
)
# Below this the interpreter was installed without its sources (a zipped or stripped library).
MIN_DOCUMENTS = 500

# The fields of a statement that hold statements, in the order of their lines.
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")

_QUESTIONS: dict[Kind, tuple[str, ...]] = {
    "module": (
        "What is the Python module `{name}` for?",
        "Describe the module `{name}`.",
        "What does the module `{name}` offer?",
    ),
    "class": (
        "What is the class `{name}` for?",
        "Describe the class `{name}`.",
        "What does an instance of `{name}` represent?",
    ),
    "function": (
        "What does `{name}` do?",
        "Explain the function `{name}`.",
        "How does the function `{name}` behave?",
    ),
    "method": (
        "What does the method `{name}` do?",
        "Explain the method `{name}`.",
        "How does `{name}` behave?",
    ),
}


@dataclass(frozen=True, slots=True)
class Document:
    """``Document("posixpath.join", "function", "What does `posixpath.join` do?", "Join two or more ...")``."""

    name: str
    kind: Kind
    question: str
    answer: str

    def messages(self) -> list[dict[str, str]]:
        """Return the document in the conversational format of TRL's ``messages`` column."""
        return [{"role": "user", "content": self.question}, {"role": "assistant", "content": self.answer}]


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents in the order of file and line, and what was read to get them."""

    documents: tuple[Document, ...]
    files: int
    """Files parsed."""
    unparsed: tuple[str, ...]
    """Files that do not parse, relative to the library's folder."""

    @property
    def characters(self) -> int:
        """Characters in all answers."""
        return sum(len(document.answer) for document in self.documents)


def stdlib_folder() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def collect(folder: Path | None = None, *, progress: bool = True) -> Corpus:
    """Collect the docstrings under `folder` (default: the standard library) of 30 to 6,000 characters, each text once.

    Raises:
        UserError: fewer than a few hundred documents, as with an interpreter without its sources.
    """
    folder = stdlib_folder() if folder is None else folder
    documents: list[Document] = []
    unparsed: list[str] = []
    names: set[str] = set()
    answers: set[str] = set()
    paths = source_files(folder)
    for path in _with_bar(paths, progress):
        relative = path.relative_to(folder)
        try:
            tree = _parse(path)
        except (SyntaxError, ValueError, OSError):  # bad syntax; null bytes or undecodable; unreadable
            unparsed.append(relative.as_posix())
            continue
        for name, kind, answer in _docstrings(tree, _module_name(relative)):
            # One question has one answer and one answer one question: a redefinition (another platform's branch, a
            # property's setter) or a text copied between modules would count twice.
            if name in names or answer in answers or not _usable(answer):
                continue
            names.add(name)
            answers.add(answer)
            documents.append(Document(name, kind, _question(name, kind), answer))
    if len(documents) < MIN_DOCUMENTS:
        raise UserError(
            f"only {len(documents)} docstrings in {folder}: this interpreter has no source files of its standard "
            "library; run the quickstart with a complete Python installation"
        )
    return Corpus(tuple(documents), len(paths) - len(unparsed), tuple(unparsed))


def write_splits(corpus: Corpus, folder: Path, *, test_every: int) -> dict[str, int]:
    """Write ``train.jsonl`` and ``test.jsonl``; return the number of documents in each.

    Every `test_every`-th document is held out. The order is that of the library, so the held-out documents come from
    all of it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[Document]] = {"train": [], "test": []}
    for index, document in enumerate(corpus.documents):
        parts["test" if index % test_every == test_every - 1 else "train"].append(document)
    for split, documents in parts.items():
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8", newline="\n") as file:
            for document in documents:
                file.write(json.dumps({"messages": document.messages()}, ensure_ascii=False) + "\n")
    return {split: len(documents) for split, documents in parts.items()}


def source_files(folder: Path) -> list[Path]:
    """Return the Python files under `folder` in order, without those in `EXCLUDED_FOLDERS`, which are not entered."""
    found: list[Path] = []
    for place, folders, files in os.walk(folder):
        folders[:] = set(folders) - EXCLUDED_FOLDERS
        found += [Path(place, name) for name in files if name.endswith(".py")]
    return sorted(found)


def _parse(path: Path) -> ast.Module:
    with warnings.catch_warnings():
        # Invalid escape sequences in files of the library.
        warnings.simplefilter("ignore")
        return ast.parse(path.read_bytes())


def _module_name(relative: Path) -> str:
    parts = list(relative.with_suffix("").parts)
    if parts[-1] == "__init__" and len(parts) > 1:
        parts.pop()
    return ".".join(parts)


def _docstrings(tree: ast.Module, module: str) -> Iterator[tuple[str, Kind, str]]:
    """Yield qualified name, kind and cleaned docstring of everything in the module, in the order of its lines."""
    stack: list[tuple[ast.AST, str, Kind]] = [(tree, module, "module")]
    while stack:
        node, name, kind = stack.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            answer = ast.get_docstring(node)
            if answer:
                yield name, kind, answer
        inner: list[tuple[ast.AST, str, Kind]] = []
        for child in (child for block in _BLOCKS for child in getattr(node, block, ())):
            if isinstance(child, ast.ClassDef):
                inner.append((child, f"{name}.{child.name}", "class"))
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inner.append((child, f"{name}.{child.name}", "method" if kind == "class" else "function"))
            else:  # `if`, `try`, `with`: same scope, deeper in the tree
                inner.append((child, name, kind))
        stack.extend(reversed(inner))


def _usable(answer: str) -> bool:
    if not MIN_CHARS <= len(answer) <= MAX_CHARS:
        return False
    # A lone surrogate is legal in a Python string and not in UTF-8, the encoding of the data files.
    try:
        answer.encode()
    except UnicodeEncodeError:
        return False
    return True


def _question(name: str, kind: Kind) -> str:
    forms = _QUESTIONS[kind]
    # A checksum of the name, unlike `hash`, is the same in every process.
    return forms[zlib.crc32(name.encode()) % len(forms)].format(name=name)


def _with_bar(paths: list[Path], progress: bool) -> Iterable[Path]:
    from tqdm.auto import tqdm

    return tqdm(paths, desc="Reading docstrings", unit="file", disable=not progress, dynamic_ncols=True)
