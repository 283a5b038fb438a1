"""The table of private names in `docs/upstream.md`: complete, and true of the installed versions."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

import fastpack_trl
from fastpack_trl.model.upstream import NEEDS, look_up, resolve

PACKAGE = Path(fastpack_trl.__file__).parent
ROWS = [
    [cell.strip() for cell in line.strip("| ").split(" | ")]
    for line in (PACKAGE.parent / "docs/upstream.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| `")
]
"""Names, when they are looked up, rooms that use them, what happens without them."""
NAMES = {name for names, *_ in ROWS for name in re.findall(r"`([^`]+)`", names)}
USED = {(name.rpartition(".")[2], room) for names, _, rooms, _ in ROWS
        for name in re.findall(r"`([^`]+)`", names) for room in re.findall(r"`([^`]+)`", rooms)}  # fmt: skip
LIBRARIES = ("accelerate", "peft", "torch", "transformers", "trl")
PUBLIC = re.compile(
    r"accelerate\.(logging|utils)|trl\.rewards|transformers\.utils|torch\.(profiler|nn(\.functional|\.modules(\.module)?|\.parallel)?"
    r"|nn\.attention\.flex_attention|autograd(\.function|\.graph)?|utils\.(benchmark|checkpoint|data|flop_counter|hooks))"
)
"""Modules below the top that their libraries document."""
OF_PYTHON = {
    "_actions", "_asdict", "_fields", "_getframe", "_option_string_actions", "_replace", "_SubParsersAction",
    "_C", "_autograd", "_dynamo",  # stand in the middle of a path; the names behind them are in the table
    "_proj", "_tokens_per_s", "_per_s", "_checkpointed", "_global",  # beginnings and endings of names
}  # fmt: skip
YOUNGER = {"transformers.integrations.moe._is_expert_parallel"}
"""Names that versions of transformers before 5.23 lack: experts there are never sharded."""


@functools.cache
def _nodes() -> list[tuple[Path, str, ast.AST, bool]]:
    """Return each node of the source with its file, its room and whether it stands at the top."""
    files = [path for path in PACKAGE.rglob("*.py") if path.name != "upstream.py"]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    return [(path, path.relative_to(PACKAGE).parts[0].removesuffix(".py"), node, node in tree.body)
            for path, tree in trees.items() for node in ast.walk(tree)]  # fmt: skip


def _defined() -> Iterator[str]:
    """Yield the names that this package gives to something of its own."""
    for *_, node, _ in _nodes():
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                yield name
            case ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name("self" | "trainer"), attr=name, ctx=ast.Store()):
                yield name


def test_every_private_name_in_the_source_is_in_the_table_with_its_room() -> None:
    """Attributes, strings for `getattr`, and methods of the library called by `super()`."""
    defined = set(_defined())
    parts = {id(value) for *_, node, _ in _nodes() if isinstance(node, ast.JoinedStr) for value in node.values}
    for path, room, node, _ in _nodes():
        if not isinstance(node, ast.Attribute | ast.Constant) or id(node) in parts:
            continue
        name = node.attr if isinstance(node, ast.Attribute) else str(node.value)
        above = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "super()"
        if not name.isidentifier() or not name.startswith("_") or name.startswith(("__", "_fastpack")):
            continue
        if name not in OF_PYTHON and (above or name not in defined):
            assert (name, room) in USED, f"{path.name}:{node.lineno}: {name}"


def test_every_import_from_deep_inside_is_in_the_table() -> None:
    """At the top of a module only documented ones: a name that moved must not stop the import of the package."""
    commands = {"bench", "cli", "quickstart", "recipe"}
    for path, room, node, at_top in _nodes():
        paths: list[str] = []
        if isinstance(node, ast.ImportFrom) and (node.module or "").count("."):
            paths = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            paths = [alias.name for alias in node.names if "." in alias.name]
        for name in paths:
            public = PUBLIC.fullmatch(name) or PUBLIC.fullmatch(name.rpartition(".")[0])
            if not public and name.partition(".")[0] in LIBRARIES:
                assert any(f"{known}.".startswith(f"{name}.") for known in NAMES), f"{path}: {name}"
                assert not at_top or room in commands or path.name == "host_syncs.py", f"{path}: {name}"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:60])
def test_a_row_of_the_table_is_true(row: list[str]) -> None:
    """Its rooms use one of its names, or ask for its feature; `NEEDS` has what is looked up before one."""
    names, when, rooms, without = row
    every = re.findall(r"`([^`]+)`", names)
    feature = when.removeprefix("before ") if when != "where used" else ""
    assert without
    assert (set(every) == set(NEEDS[feature])) if feature else when == "where used"
    for room in re.findall(r"`([^`]+)`", rooms):
        files = [PACKAGE / f"{room}.py"] if (PACKAGE / f"{room}.py").is_file() else (PACKAGE / room).rglob("*.py")
        text = "".join(file.read_text(encoding="utf-8") for file in files if file.name != "upstream.py")
        words = {name.rpartition(".")[2].removeprefix("_global") for name in every} | ({feature} - {""})
        assert any(word in text for word in words), room


def test_every_feature_of_needs_is_in_the_table_and_doctor_looks_its_names_up() -> None:
    assert {f"before {feature}" for feature in NEEDS} <= {row[1] for row in ROWS}
    assert {row["name"]: row["needed_by"] for row in look_up()} == {
        name: [feature for feature, names in NEEDS.items() if name in names] for names in NEEDS.values()
        for name in names}  # fmt: skip
    assert all(row["there"] for row in look_up())


_source = functools.cache(inspect.getsource)  # for a class, Python parses the whole file it is in


def is_there(path: str) -> bool:
    """Whether the installed versions have a name; one that only instances get is looked for in the source."""
    home, _, name = path.rpartition(".")
    if resolve(path) is None:
        for place in getattr(resolve(home), "__mro__", (resolve(home),)):
            try:
                if re.search(rf"\b{name}\b", _source(place)):
                    return True
            except (OSError, TypeError):  # built without source, or nothing that has any
                continue
        return False
    return True


def test_the_installed_versions_have_every_name_of_the_table() -> None:
    old = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 23)
    assert {name for name in NAMES if not is_there(name)} <= (YOUNGER if old else set())
    assert not any(map(is_there, ("torch.nn.Module._gone", "torch.gone.name", "torch.ops.aten._gone")))
