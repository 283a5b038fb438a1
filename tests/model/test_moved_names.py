"""Upstream may move what is private or deep inside: the import works, a step trains as stock's, the report names it.

The table of such names in `docs/upstream.md` is complete, and true of the installed versions.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forks
import pytest
import transformers
from lora_material import adapted
from trainer_material import train

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention.backends import BACKENDS
from fastpack_trl.features import frozen_base
from fastpack_trl.model.facts import read_features
from fastpack_trl.model.upstream import NEEDS, look_up, missing_reason, resolve
from fastpack_trl.testing import tiny_model

# In one process, a fork per round: what is removed was never seen by this package there.
RUN = """
import gc, json, os, pkgutil, sys, tempfile
import datasets, peft, torch, transformers, trl.trainer.sft_trainer
import transformers.models.qwen3_moe.modeling_qwen3_moe

def remove(paths):
    # For this package alone: the libraries themselves go on using what they define.
    find = pkgutil.resolve_name
    def without(name):
        if name in paths:
            raise AttributeError(name)
        return find(name)
    pkgutil.resolve_name = without

def step(folder):
    from fastpack_trl import FastSFTTrainer, ThroughputCallback
    from trainer_material import train
    lora = peft.LoraConfig(r=4, target_modules=["q_proj"])
    trainer = train(
        FastSFTTrainer, folder, family="qwen3_moe", fast={"activation_memory_gib": 1.0},
        packing=True, max_steps=2, eval_strategy="no", gradient_accumulation_steps=2,
        trainer={"peft_config": lora, "callbacks": [ThroughputCallback()]},
    )
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, trainer.fastpack_report.to_dict()

assert "fastpack_trl" not in sys.modules
torch.set_num_threads(1)
gc.collect()
gc.freeze()  # a collection in each training would walk over the libraries, and copy their pages
for paths in json.loads(sys.argv[1]):
    read, write = os.pipe()
    if not os.fork():
        try:
            remove(paths)
            with tempfile.TemporaryDirectory() as folder:
                answer = step(folder)
        except BaseException as error:
            answer = [], {"features": {}, "error": f"{type(error).__name__}: {error}"}
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        print("ANSWER", pipe.read(), flush=True)
    os.wait()
"""
ROOT = Path(__file__).parents[2]
DECIDES = ("batches", "packed_attention")
"""Parts without which others do not run either."""
LAYERS = ("varlen", "lora", "activation_memory", "checkpoint_offload", "mfu")
GROUPS = (("batches",), ("packed_attention",), ("sync_free", "moe", "cuda_graph"), LAYERS)
"""Parts whose names are removed together; `frozen_base` is on by name alone."""
ROUNDS = {group: sorted({name for part in group for name in NEEDS[part]}) for group in GROUPS}
Answers = dict[tuple[str, ...], tuple[list[float], dict[str, Any]]]


@pytest.fixture(scope="module")
def answers() -> Answers:
    """Losses and report by the group whose names were removed; those of a run with all names under ()."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")])
    command = [forks.python(), "-c", RUN, json.dumps([[], *ROUNDS.values()])]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": path})
    rows = [tuple(json.loads(line[7:])) for line in run.stdout.splitlines() if line.startswith("ANSWER ")]
    assert len(rows) == 1 + len(ROUNDS), run.stderr[-3000:]
    return dict(zip([(), *ROUNDS], rows, strict=True))


@pytest.mark.parametrize("group", GROUPS, ids="-".join)
def test_names_that_upstream_moved_cost_their_feature_alone(answers: Answers, group: tuple[str, ...]) -> None:
    assert {part for parts in GROUPS for part in parts} == NEEDS.keys() - {"frozen_base"}
    (expected, whole), (losses, report) = answers[()], answers[group]
    assert len(expected) == 2, whole
    assert losses == pytest.approx(expected, rel=2e-5), report
    # Not of this run: the kernel of another device, and a figure of the callback, which says so itself.
    for path in {name for part in set(group) - {"varlen", "mfu"} for name in NEEDS[part]}:
        assert path in str(report)
        assert path not in str(whole)
    for other in ("packed_attention", "batches", "lora", "moe", "activation_memory") if group[0] not in DECIDES else ():
        if set(NEEDS[other]).isdisjoint(ROUNDS[group]):
            assert report["features"][other]["status"] == whole["features"][other]["status"] == "on", other


def test_a_missing_name_refuses_its_feature_with_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {missing_reason(part) for part in NEEDS} == {""}
    monkeypatch.setitem(NEEDS, "moe", ("transformers.integrations.moe.Gone", "transformers.nowhere.Gone"))
    assert missing_reason("moe") == (
        "the installed transformers has no transformers.integrations.moe.Gone, transformers.nowhere.Gone"
    )
    features = read_features(tiny_model("qwen3"))
    assert "needs CUDA" in BACKENDS["varlen"].refuses(features)
    monkeypatch.setitem(NEEDS, "varlen", ("torch.ops.aten._gone",))
    assert BACKENDS["varlen"].refuses(features) == "the installed torch has no torch.ops.aten._gone"
    monkeypatch.setitem(NEEDS, "frozen_base", ("torch.ops.aten._gone",))
    monkeypatch.setattr(frozen_base, "_refused_by_device", lambda run: "")
    with pytest.raises(ValueError, match=r"no torch\.ops\.aten\._gone; set frozen_base='as_loaded'"):
        train(FastSFTTrainer, tmp_path, model=adapted("qwen3"), packing=True, fast={"frozen_base": "fp8"})


PACKAGE = ROOT / "fastpack_trl"
ROWS = [
    [cell.strip() for cell in line.strip("| ").split(" | ")]
    for line in (ROOT / "docs/upstream.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| `")
]
"""Names, when they are looked up, rooms that use them, what happens without them."""
TICKED = re.compile(r"`([^`]+)`")
NAMES = {name for names, *_ in ROWS for name in TICKED.findall(names)}
ROOMS = [(name.rpartition(".")[2], TICKED.findall(rooms)) for own, _, rooms, _ in ROWS for name in TICKED.findall(own)]
USED = {(name, room) for name, rooms in ROOMS for room in rooms}
LIBRARIES = ("accelerate", "peft", "torch", "transformers", "trl")
PUBLIC = re.compile(
    r"accelerate\.(logging|utils)|trl\.rewards|transformers\.(modeling_outputs|utils)|torch\.(profiler|nn(\.functional|\.modules(\.module)?|\.parallel)?"
    r"|nn\.attention\.flex_attention|func|autograd(\.function|\.graph)?|utils\.(benchmark|checkpoint|data|flop_counter|hooks))"
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
    known = {*_defined()} | OF_PYTHON
    parts = {id(value) for *_, node, _ in _nodes() if isinstance(node, ast.JoinedStr) for value in node.values}
    for path, room, node, _ in _nodes():
        if not isinstance(node, ast.Attribute | ast.Constant) or id(node) in parts:
            continue
        name = node.attr if isinstance(node, ast.Attribute) else str(node.value)
        above = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "super()" and name not in OF_PYTHON
        private = name.isidentifier() and name.startswith("_") and not name.startswith(("__", "_fastpack"))
        if private and (above or name not in known):
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


def test_every_row_of_the_table_is_true_and_doctor_looks_its_names_up() -> None:
    """Its rooms use one of its names, or ask for its feature; `NEEDS` has what is looked up before one."""
    for names, when, rooms, without in ROWS:
        every, feature = TICKED.findall(names), when.removeprefix("before ") if when != "where used" else ""
        assert without, names
        assert (set(every) == set(NEEDS[feature])) if feature else when == "where used", names
        for room in TICKED.findall(rooms):
            files = [PACKAGE / f"{room}.py"] if (PACKAGE / f"{room}.py").is_file() else (PACKAGE / room).rglob("*.py")
            text = "".join(file.read_text(encoding="utf-8") for file in files if file.name != "upstream.py")
            words = {name.rpartition(".")[2].removeprefix("_global") for name in every} | ({feature} - {""})
            assert any(word in text for word in words), (room, names)
    assert {f"before {feature}" for feature in NEEDS} <= {row[1] for row in ROWS}
    needed = {name: [part for part in NEEDS if name in NEEDS[part]] for names in NEEDS.values() for name in names}
    assert {row["name"]: row["needed_by"] for row in look_up()} == needed
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
