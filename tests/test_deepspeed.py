"""DeepSpeed as `accelerate launch` starts it with TRL's own configurations: ours logs what stock logs.

Not among the requirements of the tests: without it these are skipped. It needs none of its compiled operators
(``DS_BUILD_OPS=0 pip install deepspeed``); on a CPU its processes speak through gloo.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import trl
from ranks import HERE, free_port

SCRIPT = Path(__file__).with_name("deepspeed_ranks.py")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.parametrize(("stage", "dtype"), [(1, "no"), (2, "no"), (3, "no"), (2, "bf16")])
def test_losses_and_gradients_of_a_stage_are_those_of_stock(stage: int, dtype: str, tmp_path: Path) -> None:
    drop = ("WORLD_SIZE", "LOCAL_RANK", "RANK", "ACCELERATE_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    path = os.pathsep.join([str(SCRIPT.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")])
    environment |= {"PYTHONPATH": path, "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    config = Path(trl.__file__).parent / "accelerate_configs" / f"zero{stage}.yaml"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    launcher += ["--num_processes", "2", "--mixed_precision", dtype, "--main_process_port", free_port()]
    command = [*launcher, str(SCRIPT), str(tmp_path), str(stage), dtype]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-4000:]
