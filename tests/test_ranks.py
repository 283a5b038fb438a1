"""Two ranks: sharded models train as under stock, and with uneven work, or where one fails, nobody waits longer."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import trl
from ranks import fork_ranks, free_port, run_ranks
from trainer_material import assert_same_log, make_dataset, train
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
UNEVEN = HERE / "uneven_ranks.py"
ALONE = """
import sys
from datetime import timedelta
import torch.distributed as dist
from fastpack_trl.model.sharded import Ranks

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=sys.argv[2], rank=rank, world_size=2, timeout=timedelta(seconds=300))
ranks = Ranks(2, timedelta(seconds=300))
ranks.all(True)
with ranks.propagate_failures(0.5):
    if rank:
        raise ValueError("alone")
    dist.barrier()
"""


def test_two_ranks_train_under_fsdp2_as_stock(tmp_path: Path) -> None:
    """Steps, compiled layers, plans, offload, proof, experts, merged rows: see `fsdp2_ranks.py`."""
    fork_ranks(HERE / "fsdp2_ranks.py", str(tmp_path), timeout=900)


def _trained(cls: Any, folder: Path, **more: Any) -> Any:
    options = {"packing": True, "per_device_train_batch_size": 1, "eval_strategy": "no"}
    return train(cls, folder, data=make_dataset("text", 40), **options | more)


def test_uneven_batches_log_what_stock_logs_and_runs_resume_in_more_and_in_fewer_processes(tmp_path: Path) -> None:
    for cls in (FastSFTTrainer, SFTTrainer):
        _trained(cls, tmp_path / f"one_{cls.__name__}", max_steps=2, save_strategy="steps", save_steps=2)
    fork_ranks(UNEVEN, str(tmp_path), "uneven")
    ours, stock = (
        _trained(cls, tmp_path / cls.__name__, resume="checkpoint-2", max_steps=6)
        for cls in (FastSFTTrainer, SFTTrainer)
    )
    assert_same_log(ours, stock)
    assert ours.state.global_step == 6


@pytest.mark.parametrize("what", ["one reason", "sharding"])
def test_what_one_rank_cannot_do_is_done_by_none_and_sharded_layers_stay_whole_for_a_step(
    what: str, tmp_path: Path
) -> None:
    fork_ranks(UNEVEN, str(tmp_path), what)


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("no memory", ["a step of several processes cannot run again", "lower activation_memory_gib"]),
        ("plan", ["RankFailedError: rank 1: RuntimeError: the kernel failed", "wait for this one", "in plan_memory"]),
        ("step", ["RuntimeError: the kernel failed", "in training_step"]),
        ("dispatched", ["TypeError: Can only concatenate tensors but got"]),  # as under stock
    ],
)
def test_one_rank_that_fails_ends_all_with_its_reason(where: str, said: list[str], tmp_path: Path) -> None:
    """Inside of the plan and the first step under FSDP 2; out of memory, or in a loader, under DDP."""
    with pytest.raises(AssertionError):  # not a timeout
        fork_ranks(UNEVEN, str(tmp_path), where, timeout=60)
    text = (tmp_path / f"said{int(where != 'dispatched')}").read_text(encoding="utf-8")
    assert [words for words in said if words not in text] == [], text


def test_a_process_that_gives_up_waiting_ends_at_once_whatever_the_timeout_of_the_group(tmp_path: Path) -> None:
    """Processes of their own: what a forked one leaves behind does not hold its end."""
    command = [sys.executable, "-c", ALONE]
    where = (tmp_path / "store").as_uri()
    ranks = [
        subprocess.Popen([*command, str(rank), where], stderr=subprocess.PIPE, text=True, cwd=HERE.parent)
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=100)[1] for rank in ranks]  # the groups would wait for 300 s
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode for rank in ranks)
    assert "RankFailedError: rank 1: ValueError: alone" in said[1]


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.parametrize(("stage", "dtype"), [(1, "no"), (2, "no"), (3, "no"), (2, "bf16")])
def test_a_stage_of_deepspeed_has_the_losses_and_gradients_of_stock(stage: int, dtype: str, tmp_path: Path) -> None:
    """As `accelerate launch` starts it; no compiled operators are needed: ``DS_BUILD_OPS=0 pip install deepspeed``."""
    config = Path(trl.__file__).parent / "accelerate_configs" / f"zero{stage}.yaml"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    launcher += ["--num_processes", "2", "--mixed_precision", dtype, "--main_process_port", free_port()]
    command = [*launcher, str(HERE / "deepspeed_ranks.py"), str(tmp_path), str(stage), dtype]
    run_ranks(*command, timeout=300, DS_ACCELERATOR="cpu", ACCELERATE_USE_CPU="false")
