"""The table of private names: complete, true of the installed versions, and in the documentation."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import transformers
import upstream_doc

import fastpack_trl
from fastpack_trl.model.upstream import TABLE, is_there, look_up

PACKAGE = Path(fastpack_trl.__file__).parent
LIBRARIES = ("accelerate", "peft", "torch", "transformers", "trl")
PUBLIC = {
    "accelerate.logging", "accelerate.utils", "torch.autograd", "torch.autograd.function", "torch.autograd.graph",
    "torch.nn", "torch.nn.attention.flex_attention", "torch.nn.functional", "torch.nn.modules",
    "torch.nn.modules.module", "torch.nn.parallel", "torch.profiler", "torch.utils.benchmark", "torch.utils.checkpoint",
    "torch.utils.data", "torch.utils.flop_counter", "torch.utils.hooks", "transformers.utils", "trl.rewards",
}  # fmt: skip
"""Modules below the top that their libraries document."""
OF_PYTHON = {
    "_actions", "_asdict", "_fields", "_getframe", "_option_string_actions", "_replace", "_SubParsersAction",
    "_C", "_autograd", "_dynamo",  # stand in the middle of a path; what is used of them is in the table
    "_proj", "_tokens_per_s", "_per_s", "_checkpointed",  # endings of names
}  # fmt: skip
TRANSFORMERS = tuple(map(int, transformers.__version__.split(".")[:2]))
YOUNGER = {"transformers.integrations.moe._is_expert_parallel"}
"""Names that older versions of transformers lack, with what they say: experts there are never sharded."""
NAMES = {name for group in TABLE for name in group.names}
USED = {(name.rpartition(".")[2], room) for group in TABLE for name in group.names for room in group.rooms}


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _sources() -> Iterator[tuple[Path, ast.Module]]:
    for path in PACKAGE.rglob("*.py"):
        if path.name != "upstream.py":
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def _defined() -> set[str]:
    """Names that this package gives to something of its own."""
    names: set[str] = set()
    for _, tree in _sources():
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.arg(arg=name):
                    names.add(name)
                case ast.Name(id=name, ctx=ast.Store()):
                    names.add(name)
                case ast.Attribute(value=ast.Name("self" | "trainer"), attr=name, ctx=ast.Store()):
                    names.add(name)
    return names


def _private(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Names with an underscore: attributes, strings for `getattr`, methods of stock called by `super()`."""
    parts = {id(value) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for value in node.values}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Call(func=ast.Name("super")), attr=name):
                yield f"super.{name}", node.lineno
            case ast.Attribute(attr=name) | ast.Constant(value=str(name)) if id(node) not in parts:
                yield name, node.lineno


def test_every_private_name_in_the_source_is_in_the_table_with_its_room() -> None:
    defined = _defined()
    for path, tree in _sources():
        for name, line in _private(tree):
            name, stock = name.removeprefix("super."), name.startswith("super.")
            if not name.isidentifier() or not name.startswith("_") or name.startswith(("__", "_fastpack")):
                continue
            if name not in OF_PYTHON and (stock or name not in defined):
                assert (name, _room(path)) in USED, f"{path.name}:{line}: {name}"


def test_every_import_of_what_is_deep_is_in_the_table_with_its_room() -> None:
    """At the top of a module only what is documented: what moved must not stop the import of the package."""
    commands = {"bench", "cli", "quickstart", "recipe"}
    for path, tree in _sources():
        for node in ast.walk(tree):
            paths: list[str] = []
            if isinstance(node, ast.ImportFrom) and (node.module or "").count("."):
                paths = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                paths = [alias.name for alias in node.names if "." in alias.name]
            for name in paths:
                if name.partition(".")[0] not in LIBRARIES or name.rpartition(".")[0] in PUBLIC or name in PUBLIC:
                    continue
                group = any(name == known or known.startswith(f"{name}.") for known in NAMES)
                assert group, f"{path.name}:{node.lineno}: {name}"
                if node in tree.body:
                    assert _room(path) in commands or path.name == "host_syncs.py", f"{path.name}:{node.lineno}: {name}"


def test_every_room_of_the_table_uses_its_names() -> None:
    for group in TABLE:
        for room in group.rooms:
            files = (PACKAGE / f"{room}.py",) if (PACKAGE / f"{room}.py").is_file() else (PACKAGE / room).rglob("*.py")
            text = "".join(file.read_text(encoding="utf-8") for file in files if file.name != "upstream.py")
            # A name that is looked up through `lacks` alone stands there by its part.
            words = {name.rpartition(".")[2] for name in group.names} | ({group.part} if group.part else set())
            assert any(word.removeprefix("_global") in text for word in words), (room, group.names)


def test_the_installed_versions_have_every_name() -> None:
    missing = {name for name in NAMES if not is_there(name)}
    assert missing <= (YOUNGER if TRANSFORMERS < (5, 23) else set())
    rows = look_up()
    assert {row["name"] for row in rows} == NAMES
    assert all((row["there"] or row["name"] in missing) and row["used_in"] and row["without"] for row in rows)


def test_a_name_that_nobody_has_is_not_there() -> None:
    for name in ("torch.nn.Module._gone", "torch.gone.name", "transformers.Trainer._renamed", "torch.ops.aten._gone"):
        assert not is_there(name), name


def test_the_documentation_has_the_table() -> None:
    text = upstream_doc.FILE.read_text(encoding="utf-8")
    assert upstream_doc.table() in text, "run: python tests/support/upstream_doc.py"
