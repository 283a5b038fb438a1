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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastpack_trl.errors import UserError

MIN_CHARS = 30
MAX_CHARS = 6_000
# Installed packages, test suites and bundled applications are not the library's reference text.
EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "turtledemo", "lib2to3", "ensurepip"}
)
# Below this the interpreter was installed without its sources (a zipped or stripped library).
MIN_DOCUMENTS = 500

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# The fields of a statement that hold statements, in the order of their lines.
_BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")
_QUESTIONS = {
    "module": ("What is the Python module {} for?", "Describe the module {}.", "What does the module {} offer?"),
    "class": ("What is the class {} for?", "Describe the class {}.", "What does an instance of {} represent?"),
    "function": ("What does {} do?", "Explain the function {}.", "How does the function {} behave?"),
    "method": ("What does the method {} do?", "Explain the method {}.", "How does {} behave?"),
}


@dataclass(frozen=True, slots=True)
class Document:
    """``Document("posixpath.join", "function", "What does `posixpath.join` do?", "Join two or more ...")``."""

    name: str
    kind: str
    """``module``, ``class``, ``function`` or ``method``."""
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


def stdlib_folder() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def collect(folder: Path | None = None, *, progress: bool = True) -> Corpus:
    """Collect the docstrings under `folder` (default: the standard library) of 30 to 6,000 characters, each text once.

    Raises:
        UserError: fewer than a few hundred documents, as with an interpreter without its sources.
    """
    from tqdm.auto import tqdm

    folder = stdlib_folder() if folder is None else folder
    documents: dict[str, Document] = {}
    unparsed: list[str] = []
    answers: set[str] = set()
    paths = source_files(folder)
    for path in tqdm(paths, desc="Reading docstrings", unit="file", disable=not progress, dynamic_ncols=True):
        relative = path.relative_to(folder)
        try:
            tree = _parse(path)
        except (SyntaxError, ValueError, OSError):  # bad syntax; null bytes or undecodable; unreadable
            unparsed.append(relative.as_posix())
            continue
        module = ".".join(relative.with_suffix("").parts).removesuffix(".__init__")
        for name, kind, answer in _docstrings(tree, module, "module"):
            # One question has one answer and one answer one question: a redefinition (another platform's branch, a
            # property's setter) or a text copied between modules would count twice.
            if name in documents or answer in answers or not _usable(answer):
                continue
            answers.add(answer)
            # A checksum of the name, unlike `hash`, is the same in every process.
            question = _QUESTIONS[kind][zlib.crc32(name.encode()) % len(_QUESTIONS[kind])].format(f"`{name}`")
            documents[name] = Document(name, kind, question, answer)
    if len(documents) < MIN_DOCUMENTS:
        raise UserError(
            f"only {len(documents)} docstrings in {folder}: this interpreter has no source files of its standard "
            "library; run the quickstart with a complete Python installation"
        )
    return Corpus(tuple(documents.values()), len(paths) - len(unparsed), tuple(unparsed))


def write_splits(documents: tuple[Document, ...], folder: Path) -> dict[str, int]:
    """Write ``train.jsonl`` and ``test.jsonl``; return the number of documents in each.

    Every 40th document is held out, 2.5 %: the order is that of the library, so these come from all of it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts: dict[str, list[str]] = {"train": [], "test": []}
    for index, document in enumerate(documents):
        line = json.dumps({"messages": document.messages()}, ensure_ascii=False)
        parts["test" if index % 40 == 39 else "train"].append(f"{line}\n")
    for split, lines in parts.items():
        (folder / f"{split}.jsonl").write_bytes("".join(lines).encode())
    return {split: len(lines) for split, lines in parts.items()}


def source_files(folder: Path) -> list[Path]:
    """Return the Python files under `folder` in order, without those in `EXCLUDED_FOLDERS`, which are not entered."""
    found: list[Path] = []
    for place, folders, files in os.walk(folder):
        folders[:] = set(folders) - EXCLUDED_FOLDERS
        found += [Path(place, name) for name in files if name.endswith(".py")]
    return sorted(found)


def _parse(path: Path) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escape sequences in files of the library
        return ast.parse(path.read_bytes())


def _docstrings(node: ast.AST, name: str, kind: str) -> Iterator[tuple[str, str, str]]:
    """Yield qualified name, kind and cleaned docstring of everything in `node`, in the order of its lines."""
    if isinstance(node, _DOCUMENTED) and (answer := ast.get_docstring(node)):
        yield name, kind, answer
    for child in (child for block in _BLOCKS for child in getattr(node, block, ())):
        if isinstance(child, ast.ClassDef):
            yield from _docstrings(child, f"{name}.{child.name}", "class")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings(child, f"{name}.{child.name}", "method" if kind == "class" else "function")
        else:  # `if`, `try`, `with`: same scope, deeper in the tree
            yield from _docstrings(child, name, kind)


def _usable(answer: str) -> bool:
    try:
        answer.encode()  # a lone surrogate is legal in a Python string and not in UTF-8, the encoding of the data files
    except UnicodeEncodeError:
        return False
    return MIN_CHARS <= len(answer) <= MAX_CHARS
