"""Batches that two ranks share out unevenly, and a rank that raises, for `test_ranks.py`."""

from __future__ import annotations

import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fsdp2 import fsdp2
from ranks import leave
from trainer_material import assert_same_log, build, callback, make_dataset
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.run import run as runs

FOLDER = Path(sys.argv[1])
OWN_BATCHES = {"accelerator_config": {"dispatch_batches": False}}
DISPATCHED = {"accelerator_config": {"dispatch_batches": True, "split_batches": True}}


def make(cls: Any, *, streamed: int = 0, callbacks: Any = (), fast: Any = None, **more: Any) -> Any:
    base = {"packing": True, "per_device_train_batch_size": 1, "eval_strategy": "no", "max_steps": 4}
    data: Any = make_dataset("text", 40)
    data = data.to_iterable_dataset(num_shards=streamed) if streamed else data
    return build(cls, FOLDER / cls.__name__, data=data, fast=fast, trainer={"callbacks": [*callbacks]}, **base | more)


def run(cls: Any, resume: str = "", **options: Any) -> Any:
    trainer = make(cls, **options)
    trainer.train(resume_from_checkpoint=str(FOLDER / f"one_{cls.__name__}" / resume) if resume else None)
    return trainer


def uneven() -> None:
    """Stock itself cannot dispatch packed rows from one rank to the others: their lengths differ."""
    for options in (
        {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 3},
        {"accelerator_config": {"even_batches": False}, "per_device_train_batch_size": 2},
        {"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 2},
        DISPATCHED | {"packing": False, "per_device_train_batch_size": 4},
        {"streamed": 2, **OWN_BATCHES},
        {"streamed": 1, **OWN_BATCHES},  # the second rank has no shard
        {"save_strategy": "steps", "save_steps": 2},
        {"resume": "checkpoint-2", "max_steps": 6},
    ):
        assert_same_log(run(FastSFTTrainer, **options), run(SFTTrainer, **options))


def hook(model: Any) -> None:
    model.register_forward_pre_hook(lambda *_: None)


def replace(model: Any) -> None:
    model.forward = partial(_same, model.forward)


def _same(forward: Any, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def one_reason() -> None:
    """One process has a reason for stock's batches or for its loss, which gathers in each micro-batch: all have it."""
    for rank, add, feature, why, options in (
        (0, hook, "batches", "may expect the rows that TRL makes", {"packing": False}),
        (1, replace, "sync_free", "the model's forward was replaced", {}),
    ):
        ours, stock = (make(cls, gradient_accumulation_steps=2, **options) for cls in (FastSFTTrainer, SFTTrainer))
        for trainer in (ours, stock):
            if dist.get_rank() == rank:
                add(trainer.model)
            trainer.train()
        assert_same_log(ours, stock)
        line = ours.fastpack_report[feature]
        assert why in line.reason, line
        assert (f"rank {rank}: " in line.reason) == (dist.get_rank() != rank), line


def fail(error: Exception, *_: Any, **__: Any) -> None:
    raise error


def no_memory(state: Any, model: Any) -> None:
    """Let one rank run out of memory inside of its second step."""
    if state.global_step == 1 and dist.get_rank() == 1:
        model.register_forward_pre_hook(partial(fail, torch.OutOfMemoryError("no memory is left")))


def inside(**fast: Any) -> None:
    """One rank fails in the forward pass of a layer that FSDP 2 has parted, while the other gathers the next one."""
    runs.FAILURE_GRACE_SECONDS = 0.5  # type: ignore[attr-defined]
    trainer = make(FastSFTTrainer, gradient_checkpointing=True, fast={"verify_packing": "off"} | fast)
    if dist.get_rank():
        trainer.model.model.layers[0].mlp.forward = partial(fail, RuntimeError("the kernel failed"))
    with fsdp2(trainer):
        trainer.train()


CASES = {
    "uneven": uneven,
    "no memory": partial(run, FastSFTTrainer, callbacks=[callback("on_step_begin", no_memory)()]),
    "dispatched": partial(run, FastSFTTrainer, accelerator_config={"dispatch_batches": True}),
    "one reason": one_reason,
    "plan": partial(inside, activation_memory_gib=1.0),
    "step": inside,
}

if __name__ == "__main__":
    try:
        CASES[sys.argv[2]]()
    except Exception as error:
        (FOLDER / f"said{dist.get_rank()}").write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        raise
    leave()
