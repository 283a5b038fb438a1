"""A run that is ended from outside: a checkpoint that loads, and one line that says how to resume it."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
from pathlib import Path

import forks
import pytest
from sft_material import Material

from fastpack_trl.cli.main import main
from fastpack_trl.model.preflight import checkpoint_fault


@pytest.mark.parametrize(
    ("number", "save_steps"), [(signal.SIGTERM, 1), (signal.SIGTERM, 10**6), (signal.SIGINT, 10**6)]
)
def test_signal_leaves_a_checkpoint_that_resumes(material: Material, number: signal.Signals, save_steps: int) -> None:
    path = material.yaml(max_steps=10**6, save_strategy="steps", save_steps=save_steps, save_total_limit=2)
    flags = ["--config", str(path), "--learning_rate", "1e-4"]
    process = subprocess.Popen(
        [forks.python(), "-m", "fastpack_trl", "sft", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job of a shell ignores it
    )  # fmt: skip
    assert process.stdout is not None
    for _ in range(5):
        while "'loss'" not in process.stdout.readline():
            assert process.poll() is None
    process.send_signal(number)
    said = process.communicate(timeout=120)[1].splitlines()[-1]
    assert process.returncode == 128 + number
    if number == signal.SIGINT and save_steps > 1:
        assert "interrupted at step" in said
        assert "before any checkpoint: nothing to resume" in said
        return
    assert f"{'terminated' if number == signal.SIGTERM else 'interrupted'} at step" in said
    checkpoint = said.partition("resume from ")[2].partition(":")[0]
    assert not checkpoint_fault(material.out / checkpoint)
    again = shlex.split(said.rpartition("fastpack-trl ")[2])
    assert again == ["sft", *flags, "--resume_from_checkpoint", "true"]
    steps = int(checkpoint.removeprefix("checkpoint-"))
    assert main([*again, "--max_steps", str(steps + 1)]) == 0
    state = json.loads((material.out / f"checkpoint-{steps + 1}" / "trainer_state.json").read_text(encoding="utf-8"))
    logged = [row["step"] for row in state["log_history"] if "loss" in row]
    # At SIGTERM transformers may save at the end of a step, before its log.
    assert logged in ([*range(1, steps + 2)], [*range(1, steps), steps + 1])
