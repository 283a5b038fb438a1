"""Upstream may move what is private or deep inside: the import works, a step trains as stock's, the report names it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import fastpack_trl
from fastpack_trl.attention.backends import BACKENDS
from fastpack_trl.model.facts import read_features
from fastpack_trl.model.upstream import NEEDS, found, lacks
from fastpack_trl.testing import tiny_model

# In one process, a fork per name: what is removed was never seen by this package there.
RUN = """
import json, os, pkgutil, sys, tempfile
import datasets, peft, torch, transformers, trl
from trainer_material import make_dataset, make_tokenizer, settings
from peft import LoraConfig

def remove(path):
    # For this package alone: the libraries themselves go on using what they define.
    find = pkgutil.resolve_name
    def without(name):
        if name == path:
            raise AttributeError(name)
        return find(name)
    pkgutil.resolve_name = without

def step(folder):
    from fastpack_trl import FastSFTConfig, FastSFTTrainer, ThroughputCallback
    from fastpack_trl.testing import tiny_model
    args = settings(folder, packing=True, max_steps=2, eval_strategy="no", gradient_accumulation_steps=2)
    trainer = FastSFTTrainer(
        tiny_model("qwen3_moe"), args=FastSFTConfig(**args, activation_memory_gib=1.0),
        train_dataset=make_dataset("text"), processing_class=make_tokenizer(), callbacks=[ThroughputCallback()],
        peft_config=LoraConfig(r=4, target_modules=["q_proj"]),
    )
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, trainer.fastpack_report.table()

torch.set_num_threads(1)
for path in json.loads(sys.argv[1]):
    read, write = os.pipe()
    if not os.fork():
        try:
            if path:
                remove(path)
            with tempfile.TemporaryDirectory() as folder:
                answer = step(folder)
        except BaseException as error:
            answer = [], f"{type(error).__name__}: {error}"
        os.write(write, json.dumps([path, *answer]).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        print("ANSWER", pipe.read(), flush=True)
    os.wait()
"""
PUBLIC = {
    "accelerate.logging", "accelerate.utils", "torch.autograd.function", "torch.autograd.graph", "torch.nn",
    "torch.nn.attention.flex_attention", "torch.nn.functional", "torch.nn.modules", "torch.nn.modules.module",
    "torch.utils.checkpoint", "torch.utils.data", "torch.utils.flop_counter", "torch.utils.hooks", "transformers.utils",
}  # fmt: skip
"""Modules below the top that their libraries document."""
LIBRARIES = ("accelerate", "bitsandbytes", "datasets", "peft", "torch", "transformers", "trl")
PACKAGE = Path(fastpack_trl.__file__).parent
PATHS = sorted({path for paths in NEEDS.values() for path in paths})


def test_no_module_that_training_needs_imports_what_is_private_or_deep() -> None:
    commands = {"bench", "cli", "quickstart", "recipe"}
    for path in PACKAGE.rglob("*.py"):
        if path.relative_to(PACKAGE).parts[0] in commands or path.name in ("host_syncs.py", "upstream.py"):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                if name.partition(".")[0] in LIBRARIES and "." in name:
                    assert name in PUBLIC, (path.name, name)


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[list[float], str]]:
    run = subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(["", *PATHS])], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[1] / "support",
    )  # fmt: skip
    rows = [json.loads(line[7:]) for line in run.stdout.splitlines() if line.startswith("ANSWER ")]
    assert len(rows) == 1 + len(PATHS), run.stderr[-3000:]
    return {path: (losses, table) for path, losses, table in rows}


@pytest.mark.parametrize("path", PATHS)
def test_a_name_that_upstream_moved_costs_its_feature_and_nothing_else(
    answers: dict[str, tuple[list[float], str]], path: str
) -> None:
    expected, whole = answers[""]
    assert len(expected) == 2, whole
    losses, table = answers[path]
    assert losses == pytest.approx(expected, rel=2e-5), table
    # Not of this run: the kernel of another device, and a figure of the callback, which says so itself.
    if path not in (*NEEDS["varlen"], *NEEDS["mfu"]):
        assert path in table
    assert path not in whole


def test_every_name_is_there_and_lacks_says_which_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [path for path in PATHS if found(path) is None] == []
    assert {lacks(part) for part in NEEDS} == {""}
    monkeypatch.setitem(NEEDS, "moe", ("transformers.integrations.moe.Gone", "transformers.nowhere.Gone"))
    assert lacks("moe") == (
        "the installed transformers has no transformers.integrations.moe.Gone, transformers.nowhere.Gone"
    )


def test_every_name_is_in_the_documentation() -> None:
    text = (PACKAGE.parent / "docs" / "compatibility.md").read_text(encoding="utf-8")
    assert [path for path in PATHS if f"`{path}`" not in text] == []


def test_varlen_is_refused_by_name_where_torch_lacks_its_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    features = read_features(tiny_model("qwen3"))
    assert "needs CUDA" in BACKENDS["varlen"].refuses(features)
    monkeypatch.setitem(NEEDS, "varlen", ("torch.ops.aten._gone",))
    assert BACKENDS["varlen"].refuses(features) == "the installed torch has no torch.ops.aten._gone"
