"""Foreign objects are changed through `fastpack_trl.model.changes` alone, which takes each change back."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, TrainerControl, TrainerState
from trl import SFTConfig, SFTTrainer

import fastpack_trl

PACKAGE = Path(fastpack_trl.__file__).parent

VALUES = {"grad", "data"}
"""What a training step writes into a tensor: a value, no patch."""
ALLOWED: dict[str, dict[str, str]] = {
    "attention": {
        **dict.fromkeys(("*", "num_hidden_layers", "pad_token_id", "quantization_config"), "of a config of our own"),
    },
    "bench": dict.fromkeys(("should_log", "should_training_stop"), "how a callback speaks to its trainer"),
    "callbacks": {"callbacks": "a new order of them: `ThroughputCallback` stands before the reporters"},
    "checkpointing": {"inside": "of a thread's own values"},
    "cli": dict.fromkeys(
        ("error", "usage", "description", "epilog", "more", "msg"), "of a parser, a namespace, a log record made there"
    ),
    "compile": {"specialize_float": "a setting of torch and no attribute, put back after each call"},
    "config.py": {"*": "of the namespace that a parser fills", "__doc__": "of a class of ours"},
    "lora": {"__class__": "put back by `_restore`, unless FSDP 2 has put a class of its own over ours"},
    "model": {
        "*": "`changes`, and the property of `checkpoint_seam` that stands for an attribute of the layer",
        "reduceOp": "of options made there",
    },
    "packing": dict.fromkeys(("max_length", "shuffle_dataset", "dataset_num_proc"), "of a copy of the arguments"),
    "quickstart.py": dict.fromkeys(("pre_tokenizer", "decoder"), "of a tokenizer made there"),
    "recurrent": {"fp32_precision": "a setting of torch and no attribute, put back after each product"},
    "recipe": {
        **dict.fromkeys(
            ("model_init_kwargs", "model_name_or_path", "resume_from_checkpoint", "enable_jit_checkpoint"),
            "of arguments parsed for this run",
        ),
        **dict.fromkeys(("tie_word_embeddings", "weight"), "of a model that is loaded there to be merged and saved"),
        **dict.fromkeys(("bf16", "fp16"), "of a copy of the arguments"),
        "model_wrapped": "of a trainer made there, after its run",
        "type": "of an action of a parser made there",
    },
    "step": {
        "*": "what a descriptor of ours stands for",
        "_total_train_tokens": "the count that TRL's own step would make",
        "forward": "put back by `LossForward.close`, where it is still ours",
    },
    "trainers": {"_total_train_tokens": "a step that is run again counts its tokens once"},
}  # fmt: skip
"""By room: attributes that are written directly, and why; ``*`` is a name that is not spelt there."""

FRAMES = {
    "compile/graph.py": "torch counts graphs per code object",
    "measure/host_syncs.py": "names the line that waited",
    "model/changes.py": "callbacks are not handed the trainer",
    "model/facts.py": "transformers 5.17 repeats the heads of keys in the layer, later versions in the function",
}
"""Files that look at frames or take functions apart, and why."""


@cache
def trees() -> dict[str, ast.Module]:
    files = PACKAGE.rglob("*.py")
    return {path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in files}


@cache
def foreign_names() -> frozenset[str]:
    """Attributes of what we plug into: written on an object that may be theirs, they are foreign."""
    homes = (
        layer := nn.Linear(1, 1), layer.weight, torch.optim.SGD(layer.parameters()), LlamaConfig(), SFTTrainer,
        SFTConfig(use_cpu=True, bf16=False), TrainerControl(), TrainerState(),
    )  # fmt: skip
    return frozenset(name for home in homes for name in dir(home))


@cache
def own_classes() -> frozenset[str]:
    return frozenset(
        node.name for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )


@cache
def own_names() -> frozenset[str]:
    """Attributes that classes of this package declare or give to themselves, and no class that we plug into has."""
    found = set()
    for node in (node for tree in trees().values() for node in ast.walk(tree)):
        match node:
            case ast.AnnAssign(target=ast.Name(name)) | ast.Attribute(ast.Name("self"), name, ast.Store()):
                found.add(name)
    return frozenset(found - foreign_names())


def ours(scope: ast.AST) -> set[str]:
    """Return what holds an object of this package in a module or function: annotated as one, or made there."""
    found = {"self", "cls", "ctx", "run"}  # by convention: a context of autograd, our `Run`
    for node in ast.walk(scope):
        match node:
            case ast.arg(name, ast.Name(kind)) if kind in own_classes():
                found.add(name)
            case ast.Assign([target], ast.Call(ast.Name(kind))) | ast.AnnAssign(target, ast.Name(kind)) if (
                kind in own_classes()
            ):
                found.add(ast.unparse(target))
    return found


def writes(node: ast.AST, held: set[str]) -> Iterator[tuple[str, int]]:
    """Yield the attributes written on what may be an object of others, with their lines; ``*``: of any name."""
    found: tuple[ast.expr, ast.expr | str] | None = None
    match node:
        case ast.FunctionDef():
            held = held | ours(node)
        case ast.Attribute(owner, name, ast.Store() | ast.Del()):
            found = owner, name
        case ast.Call(ast.Name("setattr" | "delattr"), [owner, name, *_]):
            found = owner, name
        case ast.Call(_, [ast.Name("setattr" | "delattr"), owner, name, *_]):  # called later
            found = owner, name
        case ast.Subscript(ast.Attribute(owner, "__dict__") | ast.Call(ast.Name("vars"), [owner]), name, context) if (
            not isinstance(context, ast.Load)
        ):
            found = owner, name
        case ast.Call(ast.Attribute(ast.Attribute(owner, "__dict__"), "pop" | "update" | "setdefault"), [name, *_]):
            found = owner, name
    if found is not None:
        owner, key = found
        name = key if isinstance(key, str) else str(key.value) if isinstance(key, ast.Constant) else "*"
        own = ast.unparse(owner) in held or name in own_names() or name.startswith(("fastpack_", "_fastpack_"))
        if not own and name not in VALUES:
            yield name, node.lineno  # type: ignore[attr-defined]
    for child in ast.iter_child_nodes(node):
        yield from writes(child, held)


def test_foreign_objects_are_changed_by_patches_or_by_an_exception_that_is_still_one() -> None:
    written: dict[str, set[str]] = {room: set() for room in ALLOWED}
    for path, tree in trees().items():
        room = path.partition("/")[0]
        found = list(writes(tree, ours(tree)))
        wrong = [f"{path}:{line}: {name}" for name, line in found if name not in ALLOWED.get(room, {})]
        assert not wrong, "written directly, see model/changes.py"
        written.setdefault(room, set()).update(name for name, _ in found)
    assert {room: set(names) - written[room] for room, names in ALLOWED.items() if set(names) - written[room]} == {}


def test_frames_and_code_objects_are_looked_at_in_few_places() -> None:
    words = {"currentframe", "_getframe", "f_code", "f_locals", "__code__", "__closure__", "FunctionType", "CellType"}
    found = {
        path
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute | ast.Name)
        and (node.attr if isinstance(node, ast.Attribute) else node.id) in words
    }
    assert found == FRAMES.keys()
