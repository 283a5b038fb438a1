"""`trl/scripts/*.py` of the wheel on local data, with the import of the trainer changed and nothing else."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset
from preference_material import judged, pairs, prompts
from sft_material import save_model
from side_by_side import assert_equal
from trainer_material import TIMES

import fastpack_trl

SCRIPTS = Path(trl.__file__).parent / "scripts"


def turns() -> Dataset:
    """Prompts as conversations, which the rewards of TRL's scripts read."""
    rows = [{"prompt": [{"role": "user", "content": row["prompt"]}]} for row in prompts()]
    return Dataset.from_list(rows)


DATA = {"DPO": pairs, "KTO": judged, "Reward": pairs, "GRPO": turns, "RLOO": turns}
FLAGS = {
    "max_steps": 3, "logging_steps": 1, "per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 3,
    "report_to": "none", "use_cpu": True, "bf16": False, "learning_rate": 1e-3, "disable_tqdm": True,
}  # fmt: skip
ONLINE = {"num_generations": 4, "max_completion_length": 8, "reward_funcs": "think_format_reward"}


def log_of(name: str, folder: Path, model: Path, *, fast: bool, patch: pytest.MonkeyPatch) -> list[Any]:
    """Run a script as a program and return the log in its last checkpoint."""
    source = (SCRIPTS / f"{name.lower()}.py").read_text(encoding="utf-8")
    stock, whole = f"{name}Trainer", "    from trl import "
    (line,) = [each for each in source.splitlines() if each.startswith(whole) and stock in each]
    if fast:
        others = ", ".join(part for part in line.removeprefix(whole).split(", ") if part != stock)
        ours = f"    from fastpack_trl import Fast{stock} as {stock}\n{whole}{others}"
        source = source.replace(line, ours)
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(source.replace("from .", "from trl.scripts."), encoding="utf-8")
    data = folder / "data"
    data.mkdir()
    DATA[name]().to_json(data / "train.jsonl")
    flags = {**FLAGS, "output_dir": folder / "out", "model_name_or_path": model, "dataset_name": data}
    flags |= ONLINE if name in ("GRPO", "RLOO") else {"max_length": 128}
    patch.setattr(sys, "argv", [str(script), *(f"--{key}={value}" for key, value in flags.items())])
    runpy.run_path(str(script), run_name="__main__")
    state = json.loads((folder / "out" / "checkpoint-3" / "trainer_state.json").read_text(encoding="utf-8"))
    assert (folder / "out" / "fastpack_report.json").exists() == fast
    return [{k: v for k, v in row.items() if not any(t in k for t in TIMES)} for row in state["log_history"]]


@pytest.mark.parametrize("name", DATA)
def test_script_with_changed_import_logs_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hasattr(fastpack_trl, f"Fast{name}Trainer")
    model = save_model(tmp_path / "model")
    ours, stock = (log_of(name, tmp_path / str(fast), model, fast=fast, patch=monkeypatch) for fast in (True, False))
    assert len(ours) == len(stock) == 3
    assert_equal(ours, stock, atol=3e-5)
