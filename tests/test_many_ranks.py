"""Four and eight processes under gloo train as TRL's do, and all end if one dies."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import BASE, fork_ranks, fsdp2
from torch.distributed.tensor import DTensor
from trainer_material import assert_same_log, build, callback, make_dataset
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer

pytestmark = pytest.mark.slow
SIZE = int(os.environ.get("WORLD_SIZE", "1"))


def make(cls: Any, **more: Any) -> Any:
    """A trainer of one epoch, whose last micro-batches do not fill all processes."""
    torch.manual_seed(0)
    return build(cls, Path(cls.__name__), data=make_dataset("text", 19 * SIZE + 5), **BASE | more)


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    """Return whole weights."""
    named = ((name, p.detach()) for name, p in trainer.model.named_parameters())
    return {name.removeprefix("module."): p.full_tensor() if isinstance(p, DTensor) else p for name, p in named}


def _equal() -> None:
    options = {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 2}
    for sharded in (False, True):
        trainers = []
        for cls in (FastSFTTrainer, SFTTrainer):
            trainer = make(cls, **options)
            with fsdp2(trainer) if sharded else nullcontext():
                trainer.train()
                trainers.append((trainer, weights(trainer)))
        (ours, mine), (stock, theirs) = trainers
        assert len(ours.train_dataset) % (2 * SIZE), "the last batch is as large as the others"
        assert ours.fastpack_report["packed_attention"].status == "on"
        assert_same_log(ours, stock, rtol=1e-5, atol=1e-6)
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=2e-5, msg=lambda said, n=name: f"{n}: {said}")


@pytest.mark.parametrize("count", [4, 8])
def test_losses_and_weights_are_those_of_trl(count: int, tmp_path: Path) -> None:
    fork_ranks(_equal, tmp_path, count=count)


def die(state: Any, model: Any) -> None:
    if state.global_step == 1 and dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def _dies() -> None:
    make(FastSFTTrainer, max_steps=4, trainer={"callbacks": [callback("on_step_begin", die)()]}).train()


def test_if_a_process_is_killed_the_others_end_with_an_error_within_a_minute(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):  # not a timeout
        fork_ranks(_dies, tmp_path, count=4, waits=True, timeout=60)
    assert sorted(path.name for path in tmp_path.glob("said*")) == ["said0", "said1", "said3"]
