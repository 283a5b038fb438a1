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
ALLOWED = {
    "attention": "* num_hidden_layers pad_token_id",  # of a config of our own
    "bench": "device dtype warmup_steps should_log should_training_stop",  # of our result; a callback's control
    "config.py": "* __doc__",  # of a parser's namespace, of a class of ours
    "lora": "__class__",  # put back by `_restore`, unless FSDP 2 has put a class of its own over ours
    "model": "*",  # `changes`, and the property of `checkpoint_seam` that stands for an attribute of the layer
    "packing": "dataset_num_proc max_length shuffle_dataset",  # of a copy of the arguments
    # Of arguments parsed there, of a model that is merged and saved there, of a parser.
    "recipe": "enable_jit_checkpoint model_init_kwargs resume_from_checkpoint tie_word_embeddings type weight",
    "step": "* forward",  # of a descriptor of ours; put back by `LossForward.close`, where it is still ours
}
"""By package: names that models, trainers and their parts have too, and that are written directly; ``*``: any name."""
FRAMES = {
    "compile/graph.py",  # torch counts graphs per code object
    "measure/host_syncs.py",  # names the line that waited
    "model/changes.py",  # callbacks are not handed the trainer
    "model/facts.py",  # transformers 5.17 repeats the heads of keys in the layer, later versions in the function
}
"""Files that look at frames or take functions apart."""


@cache
def nodes() -> list[tuple[str, ast.AST]]:
    files = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    return [(name, node) for name, text in files.items() for node in ast.walk(ast.parse(text))]


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
    for path, node in nodes():
        for name in written(node):
            found.setdefault(path.partition("/")[0], set()).add(name)
    assert found == {package: set(names.split()) for package, names in ALLOWED.items()}, "see model/changes.py"


def test_frames_and_code_objects_are_looked_at_in_few_places() -> None:
    words = {"currentframe", "_getframe", "f_code", "f_locals", "__code__", "__closure__", "FunctionType", "CellType"}
    assert {path for path, node in nodes() if words & {getattr(node, "attr", ""), getattr(node, "id", "")}} == FRAMES
