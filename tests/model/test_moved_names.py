"""Upstream may move what is private or deep inside: the import works, a step trains as stock's, the report names it."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import forks
import pytest
from lora_material import adapted
from trainer_material import train

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention.backends import BACKENDS
from fastpack_trl.lora import frozen_base
from fastpack_trl.model.facts import read_features
from fastpack_trl.model.upstream import NEEDS, missing_reason
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
ON_REQUEST = {"frozen_base"}
"""Features that are on by name alone: without what they need they are refused, not left out."""
PATHS = sorted({path for feature, paths in NEEDS.items() if feature not in ON_REQUEST for path in paths})
DECIDES = ("batches", "packed_attention")
"""Parts without which others do not run either."""


def _rounds() -> list[list[str]]:
    """Names that are removed together: at most one of each part, and none beside one that others need."""
    rounds = [[path] for part in DECIDES for path in NEEDS[part] if "Collator" in path or part != "batches"]
    rounds.append([path for path in NEEDS["batches"] if "Collator" not in path])  # asked for together
    seen = {path for paths in rounds for path in paths}
    left: list[list[str]] = []
    for part in (part for part in NEEDS if part not in (*DECIDES, *ON_REQUEST)):
        left.append([path for path in NEEDS[part] if path not in seen])
        seen.update(left[-1])
    columns = itertools.zip_longest(*left)
    return [*rounds, *([path for path in column if path is not None] for column in columns)]


ROUNDS = _rounds()
assert sorted(path for paths in ROUNDS for path in paths) == PATHS, "every name is removed once"
Answers = dict[str, tuple[list[float], dict[str, Any]]]


@pytest.fixture(scope="module")
def answers() -> Answers:
    """Losses and report by name that was removed; those of a run with all names under the empty string."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support"), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [forks.python(), "-c", RUN, json.dumps([[], *ROUNDS])], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    rows = [json.loads(line[7:]) for line in run.stdout.splitlines() if line.startswith("ANSWER ")]
    assert len(rows) == 1 + len(ROUNDS), run.stderr[-3000:]
    whole, *rest = map(tuple, rows)
    return {"": whole, **{path: answer for paths, answer in zip(ROUNDS, rest, strict=True) for path in paths}}


@pytest.mark.parametrize("names", ROUNDS, ids=lambda names: names[0])
def test_a_name_that_upstream_moved_costs_its_feature_and_nothing_else(answers: Answers, names: list[str]) -> None:
    (expected, whole), (losses, report) = answers[""], answers[names[0]]
    assert len(expected) == 2, whole
    assert losses == pytest.approx(expected, rel=2e-5), report
    for path in names:
        assert path not in str(whole)
        # Not of this run: the kernel of another device, and a figure of the callback, which says so itself.
        if path not in (*NEEDS["varlen"], *NEEDS["mfu"]):
            assert path in str(report)
    if not set(names) & {path for part in DECIDES for path in NEEDS[part]}:
        for part in ("packed_attention", "batches", "lora", "moe", "activation_memory"):
            if not set(names) & set(NEEDS[part]):
                assert report["features"][part]["status"] == whole["features"][part]["status"] == "on", part


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
