"""Gemma 4, whose last layers may share the keys of an earlier one and which reads token ids beside embeddings."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import forks
import pytest
import torch
from gemma4_uses import gemma4, refuse_cut_rows

from fastpack_trl import verify_packing

ROOT = Path(__file__).parents[2]
ALL = ("proof", "past_window", "cut", "packed", "padded", "lora", "off", "dpo", "grpo", "verify")
FEW = ("proof", "cut", "packed", "off")


@pytest.mark.parametrize(
    ("kind", "shared", "last", "uses"),
    [
        pytest.param("text", 2, "full", ALL, marks=pytest.mark.slow),
        pytest.param("composite", 3, "three", ALL, marks=pytest.mark.slow),
        ("text", 0, "full", FEW),
        ("text", 2, "sliding", FEW),
        ("composite", 3, "three", FEW),
    ],
)
def test_it_is_used_as_any_other_model(kind: str, shared: int, last: str, uses: tuple[str, ...]) -> None:
    """In a process of its own: a kernel that reads past its tensors ends it."""
    command = [forks.python(), str(ROOT / "tests/support/gemma4_uses.py"), kind, str(shared), last, *uses]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    passed = [line.removeprefix("passed: ") for line in run.stdout.splitlines() if line.startswith("passed: ")]
    assert (passed, run.returncode) == ([*uses], 0), run.stderr[-3000:]


@pytest.mark.cuda
def test_a_device_proves_it_in_16_bits_and_refuses_rows_that_are_cut_inside_of_the_model() -> None:
    assert {"varlen", "per_document", "sdpa"} <= set(refuse_cut_rows("cuda", gemma4("text", 2, "full")))
    for shared in (0, 2):
        for path in ("auto", "varlen", "per_document", "off"):
            model = gemma4("text", shared, "full", torch.bfloat16).cuda()
            assert verify_packing(model, implementation=path).raise_if_failed()
