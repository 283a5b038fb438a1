"""A run that is ended from outside: a checkpoint that loads, and one line that says how to resume it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import forks
import pytest
import torch
from sft_material import Material, settings, write_yaml
from transformers import TrainerCallback

from fastpack_trl.cli.main import main
from fastpack_trl.errors import TerminatedError
from fastpack_trl.features import packed_attention as feature
from fastpack_trl.model.preflight import checkpoint_fault
from fastpack_trl.recipe.train import train


@pytest.mark.parametrize(("number", "every"), [(signal.SIGTERM, 1), (signal.SIGTERM, 10**6), (signal.SIGINT, 10**6)])
def test_signal_leaves_a_checkpoint_that_resumes(material: Material, number: signal.Signals, every: int) -> None:
    path = material.yaml(max_steps=10**6, save_strategy="steps", save_steps=every, save_total_limit=2)
    flags = ["--config", str(path), "--learning_rate", "1e-4"]
    process = subprocess.Popen(
        [forks.python(), "-m", "fastpack_trl", "sft", *flags],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2],
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job of a shell ignores it
    )  # fmt: skip
    for _ in range(5):
        while "'loss'" not in process.stdout.readline():
            assert process.poll() is None
    process.send_signal(number)
    said = process.communicate(timeout=120)[1].splitlines()[-1]
    assert process.returncode == 128 + number
    if number == signal.SIGINT and every > 1:
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
    assert logged == [*range(1, steps + 2)]


STEPS = 6


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class At(TrainerCallback):
    """Sends SIGTERM once, at an event or in a pass of the model, after some steps."""

    def __init__(self, event: str, step: int) -> None:
        self.event, self.step = event, step
        if event.startswith("on_"):
            setattr(self, event, lambda args, state, *_, **__: self.act(state))

    def on_train_begin(self, args: Any, state: Any, *_: Any, model: Any, **__: Any) -> None:
        if not self.event.startswith("on_"):
            getattr(model.model.layers[0], self.event)(lambda *_: self.act(state))

    def act(self, state: Any) -> None:
        if state.global_step == self.step:
            self.step = -1
            terminate()


MOMENTS: dict[str, tuple[str, int, int]] = {
    "backward": ("register_full_backward_hook", 0, 1),
    "between micro-batches": ("on_substep_end", 1, 2),
    "evaluation": ("on_prediction_step", 2, 2),
    "saving": ("on_save", 4, 4),
    "logging": ("on_log", 3, 3),
    "end of an epoch": ("on_epoch_end", 3, 3),
    "last step": ("on_step_begin", STEPS - 1, STEPS),
}
"""The event, the steps before it, and the step that is saved."""


def arguments(folder: Path, sft_folder: Path, **more: object) -> list[str]:
    """Two epochs of three steps of two micro-batches, with dropout; evaluated after each second step."""
    rows = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_length": 40}
    often = {"save_steps": 4, "eval_steps": 2, "save_strategy": "steps", "eval_strategy": "steps", "max_steps": STEPS}
    other = {"model_init_kwargs": {"attention_dropout": 0.1}, "dataset_test_split": "train"}
    values = settings(sft_folder / "model", sft_folder / "train.jsonl", folder / "out", **rows, **often | other | more)
    return ["--config", str(write_yaml(folder / "sft.yaml", values))]


@pytest.fixture(scope="module")
def uninterrupted(sft_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train(arguments(tmp_path_factory.mktemp("whole"), sft_folder))


@pytest.mark.parametrize("moment", MOMENTS)
def test_run_resumed_after_sigterm_equals_the_uninterrupted_run(
    moment: str, uninterrupted: Any, sft_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    event, steps, step = MOMENTS[moment]
    callback = At(event, steps)
    flags = arguments(tmp_path, sft_folder)
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    if step < STEPS:
        with pytest.raises(TerminatedError, match=rf"^at step {step}; resume from checkpoint-{step}: fastpack-trl sft"):
            train(flags, callbacks=[callback])
    else:
        train(flags, callbacks=[callback])
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    capsys.readouterr()
    resumed = train([*flags, "--resume_from_checkpoint", "true"])
    assert f"resumed from step {step}: {step} of {STEPS} steps done" in capsys.readouterr().out
    assert resumed.state.global_step == STEPS
    expected = uninterrupted.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in resumed.model.state_dict().items())
    logs = ([row for row in each.state.log_history if "train_loss" not in row] for each in (resumed, uninterrupted))
    losses = [[(row["step"], row.get("loss"), row.get("eval_loss")) for row in log] for log in logs]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("moment", ["preparation", "packing check"])
def test_sigterm_before_the_first_step_ends_the_run_at_once(
    moment: str, material: Material, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    owner, name = (feature, "prove") if moment == "packing check" else (feature, "choose")
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: (terminate(), original(*args, **kwargs))[1])
    assert main(["sft", "--config", str(material.yaml(save_strategy="steps"))]) == 143
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "fastpack-trl sft: terminated before the end of its first step: nothing was saved"
    assert not material.out.exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


HANGS = """
import os, sys, threading, time
from transformers import TrainerCallback
from fastpack_trl.recipe.train import train

def hang(self, *_, **__):
    send = lambda: [(os.kill(os.getpid(), int(number)), time.sleep(0.3)) for number in sys.argv[2].split()]
    threading.Thread(target=send, daemon=True).start()
    time.sleep(60)

train(sys.argv[3:], callbacks=[type("Hangs", (TrainerCallback,), {sys.argv[1]: hang})()])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("event", "signals", "code"),
    [
        ("on_init_end", "15 15 15", 1),
        ("on_prediction_step", "15 15 15", -signal.SIGTERM),
        ("on_step_begin", "15 2", -signal.SIGINT),
    ],
)
def test_second_signal_ends_hanging_run(event: str, signals: str, code: int, sft_folder: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    command = [forks.python(), "-c", HANGS, event, signals, *arguments(tmp_path, sft_folder, save_steps=2)]
    assert subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True).returncode == code
    assert time.monotonic() - began < 45
