"""The layout of the package: imports go down, features read the `Run` only, one file changes foreign objects."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, TrainerControl, TrainerState
from trl import SFTConfig, SFTTrainer

import fastpack_trl
from fastpack_trl.cli.main import COMMANDS
from fastpack_trl.config import Settings
from fastpack_trl.features import FEATURES
from fastpack_trl.run import DECIDED, Decisions

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fastpack_trl"

ARCHITECTURE = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").partition("## Package layout")[2]
TABLE = re.findall(r"^\| *(\d*) *\| `(\w+)` \|", ARCHITECTURE, re.MULTILINE)
"""Rooms and files of the package from the highest floor to the lowest: each imports from floors below its own."""

BUDGETS = {
    "attention": 1800,
    "bench": 1000,
    "callbacks": 300,
    "capture": 1200,
    "checkpointing": 1250,
    "cli": 1050,
    "features": 1650,
    "kernels": 2100,
    "layers": 1000,
    "lora": 1200,
    "measure": 600,
    "model": 1850,
    "moe": 950,
    "packing": 2150,
    "recipe": 2150,
    "recurrent": 750,
    "step": 1650,
    "trainers": 1100,
    "vision": 750,
}
"""Lines of Python that a room may have: what it has, to the next fifty. More needs a reader who would miss it."""
TOTALS = {"fastpack_trl": 25477, "benchmarks": 3677, "tests": 29548}


@cache
def nodes_of(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def modules() -> dict[str, Path]:
    """Return the file of every module of the package by its dotted name."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def home(dotted: str) -> str:
    """Return the module of a dotted name, which may go on inside of it; a lazy name of `__init__` is from its own."""
    lazy = dotted.split(".")[1:2]
    if lazy and lazy[0] in fastpack_trl._HOME:
        return f"fastpack_trl.{fastpack_trl._HOME[lazy[0]]}"
    while dotted not in modules():
        dotted = dotted.rpartition(".")[0]
    return dotted


LAZY = tuple(f"fastpack_trl.{module}" for module in fastpack_trl._HOME.values())
"""Within reach of whoever has the package itself."""


def imports(path: Path) -> Iterator[str]:
    """Yield the modules that a module imports: at its top, in functions, for types, and by name. ruff bans dots."""
    nodes = nodes_of(path)
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        match node:
            case ast.Import(names=names) if any(alias.name.partition(".")[0] == "fastpack_trl" for alias in names):
                yield from (*LAZY, *(home(alias.name) for alias in names if alias.name.startswith("fastpack_trl.")))
            case ast.ImportFrom(module=str() as module, names=names) if module.partition(".")[0] == "fastpack_trl":
                assert names[0].name != "*"
                yield from (home(f"{module}.{alias.name}") for alias in names)
            case ast.Constant(value=str() as text) if id(node) not in docstrings:
                # `COMMANDS`, and what is started as a process of its own.
                yield from map(home, re.findall(r"\bfastpack_trl(?:\.\w+)+", text))


@cache
def graph() -> dict[str, frozenset[str]]:
    """Return the modules that each module imports; the lazy names of the package's `__init__` left out."""
    return {name: frozenset(imports(path)) - {name} for name, path in modules().items() if name != "fastpack_trl"}


@cache
def floors() -> dict[str, int]:
    found, floor = dict[str, int](), 0
    for number, room in TABLE:
        floor = int(number or floor)
        assert room not in found, f"{room!r} is twice in docs/architecture.md"
        found[room] = floor
    return found


def room_of(module: str) -> str:
    return module.split(".")[1]


def floor_of(module: str) -> int:
    return floors()[room_of(module)]


def test_rooms_import_only_from_floors_below() -> None:
    wrong = [
        f"{name} imports {target}"
        for name, targets in graph().items()
        for target in sorted(targets)
        if target != "fastpack_trl" and room_of(name) != room_of(target) and floor_of(target) >= floor_of(name)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_module_needs_itself() -> None:
    assert sum(map(len, graph().values())) > 10
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def lines_of(folder: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py"))


def test_every_room_keeps_to_its_budget() -> None:
    over = {room: lines_of(PACKAGE / room) for room, most in BUDGETS.items() if lines_of(PACKAGE / room) > most}
    assert not over
    assert set(BUDGETS) == {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    whole = {folder: lines_of(ROOT / folder) for folder in TOTALS}
    assert all(whole[folder] <= most for folder, most in TOTALS.items()), whole
    records = [path for path in (ROOT / "benchmarks/results").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in records) <= 1_700_000


def test_the_architecture_has_every_room_on_one_floor() -> None:
    assert set(floors()) == {room_of(name) for name in modules() if name != "fastpack_trl"}
    numbers = [int(number) for number, _ in TABLE if number]
    assert numbers == [*range(len(numbers))][::-1]


def test_the_graph_knows_the_commands_and_the_top_level_has_ten_files_each_of_one_idea() -> None:
    assert {command.module for command in COMMANDS.values()} <= graph()["fastpack_trl.cli.main"]
    assert len(list(PACKAGE.glob("*.py"))) == 9
    long = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in modules().values()}
    assert not {name: count for name, count in long.items() if count > 400}


def test_each_decision_of_a_run_has_one_writer_and_the_step_one_override() -> None:
    writers: dict[str, set[str]] = {name: set() for name in DECIDED}
    for module, path in modules().items():
        for node in nodes_of(path):
            match node:
                case (
                    ast.Attribute(value=owner, attr=name, ctx=ast.Store() | ast.Del())
                    | ast.Call(
                        func=ast.Name("patch_attribute" | "setattr"),
                        args=[owner, ast.Constant(value=str() as name), *_],
                    )
                ) if ast.unparse(owner).split(".")[-1].removeprefix("_") in ("run", "fastpack_run"):
                    writers.get(name, set()).add(module)
    assert {name: sorted(found) for name, found in writers.items() if len(found) != 1} == {}
    steps = [module for module, path in modules().items() if "def training_step(" in path.read_text(encoding="utf-8")]
    assert steps == ["fastpack_trl.trainers.sft"]


def test_what_is_decided_cannot_be_decided_again_while_steps_run() -> None:
    decisions = Decisions(Settings())
    decisions.training = True
    decisions._are_fixed = True
    with pytest.raises(AssertionError, match=r"run\.training is decided before the first step"):
        decisions.training = False


def test_a_plain_config_has_the_defaults_of_ours() -> None:
    """It has none of our fields: `Settings.of` reads both kinds, once, and features read the `Run`."""
    own = {field.name: field.default for field in fields(Settings)}
    assert vars(Settings.of(SFTConfig(use_cpu=True))) == own
    config = fastpack_trl.FastSFTConfig(use_cpu=True)
    assert Settings.of(config) is config


BELONGS = {
    "activation_memory_gib": "activation_memory",
    "image_row_tokens": "vision_rows",
    "moe_quantize_experts": "moe",
}
"""Fields that are part of another option."""
READERS = {"recipe/forecast.py"}
"""Files that read settings to predict."""


def test_every_option_has_a_file_of_its_name_and_nothing_else_decides() -> None:
    names = {field.name for field in fields(Settings)}
    files = {path.stem for path in (PACKAGE / "features").glob("*.py")} - {"__init__", "feature"}
    assert files == names - BELONGS.keys()
    assert set(BELONGS.values()) <= files
    assert {feature.name for feature in FEATURES} - names == {"four_bit_layout", "side_stream"}
    for feature in FEATURES:
        assert list(inspect.signature(feature.install).parameters) == ["run"]
        assert feature.name not in names or feature.install.__module__ == f"fastpack_trl.features.{feature.name}"
    reads = {
        path.relative_to(PACKAGE).as_posix()
        for path in modules().values()
        for node in nodes_of(path)
        if isinstance(node, ast.Attribute) and node.attr in names and ast.unparse(node.value).endswith("settings")
    }
    assert {file for file in reads if not file.startswith("features/")} - READERS == {"config.py"}


ALLOWED = {
    "attention": "* num_hidden_layers pad_token_id",  # of a config of our own
    "bench": "device dtype warmup_steps should_log should_training_stop",  # of our result; a callback's control
    "config.py": "*",  # of a parser's namespace
    "lora": "__class__",  # put back by `_restore`, unless FSDP 2 has put a class of its own over ours
    "model": "*",  # `changes`, and the property of `checkpoint_seam` that stands for an attribute of the layer
    "packing": "dataset_num_proc max_length shuffle_dataset",  # of a copy of the arguments
    # Of arguments parsed there, of a control, of a model merged and saved there, of a parser.
    "recipe": "enable_jit_checkpoint gradient_accumulation_steps model_init_kwargs resume_from_checkpoint should_save "
    "should_training_stop tie_word_embeddings type weight",
    "trainers": "__doc__",  # of a class of ours
    "step": "* forward",  # of a descriptor of ours; put back by `LossForward.close`, where it is still ours
}
"""By package: names that models, trainers and their parts have too, and that are written directly; ``*``: any name."""
FRAMES = {
    "measure/host_syncs.py",  # names the line that waited
    "model/changes.py",  # callbacks are not handed the trainer
    "model/facts.py",  # transformers 5.17 repeats the heads of keys in the layer, later versions in the function
}
"""Files that look at frames or take functions apart."""


def all_nodes() -> Iterator[tuple[str, ast.AST]]:
    return ((path.relative_to(PACKAGE).as_posix(), node) for path in modules().values() for node in nodes_of(path))


@cache
def foreign_names() -> set[str]:
    homes = (
        layer := nn.Linear(1, 1), layer.weight, torch.optim.SGD(layer.parameters()), LlamaConfig(), SFTTrainer,
        SFTConfig(use_cpu=True, bf16=False), TrainerControl(), TrainerState(),
    )  # fmt: skip
    # A training step writes gradients and values.
    return {name for home in homes for name in dir(home)} - {"grad", "data"} | {"*"}


def written(node: ast.AST) -> Iterator[str]:
    """Yield the foreign name that is written on an object which is not of this package by its name."""
    match node:
        case ast.Attribute(owner, key, ast.Store() | ast.Del()):
            pass
        case (
            ast.Call(ast.Name("setattr" | "delattr"), [owner, key, *_])
            | ast.Call(_, [ast.Name("setattr" | "delattr"), owner, key, *_])  # called later
            | ast.Subscript(
                ast.Attribute(owner, "__dict__") | ast.Call(ast.Name("vars"), [owner]), key, ast.Store() | ast.Del()
            )
            | ast.Call(ast.Attribute(ast.Attribute(owner, "__dict__"), "pop" | "update" | "setdefault"), [key, *_])
        ):
            key = str(key.value) if isinstance(key, ast.Constant) else "*"
        case _:
            return
    if ast.unparse(owner) not in ("self", "cls", "ctx", "run") and key in foreign_names():
        yield key


def test_foreign_objects_are_changed_by_patches_or_by_an_exception_that_is_still_one() -> None:
    found: dict[str, set[str]] = {}
    for path, node in all_nodes():
        for name in written(node):
            found.setdefault(path.partition("/")[0], set()).add(name)
    assert found == {package: set(names.split()) for package, names in ALLOWED.items()}, "see model/changes.py"


def test_frames_and_code_objects_are_looked_at_in_few_places() -> None:
    words = {"currentframe", "_getframe", "f_code", "f_locals", "__code__", "__closure__", "FunctionType", "CellType"}
    assert {
        path for path, node in all_nodes() if words & {getattr(node, "attr", ""), getattr(node, "id", "")}
    } == FRAMES
