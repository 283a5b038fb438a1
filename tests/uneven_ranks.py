"""Batches that two ranks share out unevenly, a rank that raises, and sharded models, for `test_ranks.py`."""

from __future__ import annotations

import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fsdp2 import fsdp2
from ranks import leave
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trainer_material import assert_same_log, build, callback, make_dataset
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.model.sharded import Ranks, keep_unsharded, layer_units, whole_bytes
from fastpack_trl.run import run as runs
from fastpack_trl.testing import tiny_model

FOLDER = Path(sys.argv[1])


def make(cls: Any, *, streamed: bool = False, callbacks: Any = (), fast: Any = None, **more: Any) -> Any:
    base = {"packing": True, "per_device_train_batch_size": 1, "eval_strategy": "no", "max_steps": 4}
    data: Any = make_dataset("text", 40)
    data = data.to_iterable_dataset(num_shards=1) if streamed else data
    return build(cls, FOLDER / cls.__name__, data=data, fast=fast, trainer={"callbacks": [*callbacks]}, **base | more)


def run(cls: Any, resume: str = "", **options: Any) -> Any:
    trainer = make(cls, **options)
    trainer.train(resume_from_checkpoint=str(FOLDER / f"one_{cls.__name__}" / resume) if resume else None)
    return trainer


def uneven() -> None:
    """Stock itself cannot dispatch packed rows from one rank to the others: their lengths differ."""
    dispatched = {"dispatch_batches": True, "split_batches": True}
    for options in (
        {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 3},
        {"accelerator_config": {"even_batches": False}, "per_device_train_batch_size": 2},
        {
            "packing": False,
            "per_device_train_batch_size": 4,
            "accelerator_config": dispatched | {"split_batches": True},
        },
        {"streamed": True, "accelerator_config": {"dispatch_batches": False}},  # the second rank has no shard
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
    """One rank fails in the forward pass of a layer that FSDP 2 shards, while the other gathers the next one."""
    runs.FAILURE_GRACE_SECONDS = 0.5  # type: ignore[attr-defined]
    trainer = make(FastSFTTrainer, gradient_checkpointing=True, fast={"verify_packing": "off"} | fast)
    if dist.get_rank():
        trainer.model.model.layers[0].mlp.forward = partial(fail, RuntimeError("the kernel failed"))
    with fsdp2(trainer):
        trainer.train()


def left_alike() -> None:
    """A process that fails takes the others along, also where a question of theirs was another."""
    ranks, rank = Ranks(2), dist.get_rank()
    for fails in ((1,), (0, 1), ()):
        here, said = rank in fails, ""
        try:
            with ranks.propagate_failures():
                if here:
                    raise ValueError(f"of {rank}")
        except (ValueError, RuntimeError) as error:
            said = f"{type(error).__name__}: {error}"
        assert said == (f"ValueError: of {rank}" if here else "RuntimeError: rank 1: ValueError: of 1" * bool(fails))
    assert ranks.first_reason(lambda: "no" * rank) == ("no" if rank else "rank 1: no")


def sharded(model: Any) -> Any:
    """A model in the units that accelerate makes, which starts no FSDP on a CPU by itself."""
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
    return model


def gathered() -> None:
    """Weights stay whole from forward to backward, not longer; an exception shards them; gradients are the same."""
    ids = (torch.arange(24).view(1, 24) * 7 + dist.get_rank()) % 60

    def whole() -> set[bool]:
        return {not isinstance(p, DTensor) for layer in layers for p in layer.parameters()}

    gradients = []
    for keep in (False, True):
        model = sharded(tiny_model("qwen3"))
        layers = layer_units(model)
        assert layers == list(model.model.layers)
        assert whole_bytes(layers, 2) == 2 * sum(p.numel() for layer in layers for p in layer.parameters())
        with keep_unsharded(layers if keep else []):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            assert whole() == {keep}
            loss.backward()
            assert whole() == {False}
        gradients.append([p.grad.full_tensor() for p in model.parameters()])
    assert all(map(torch.equal, *gradients))
    with pytest.raises(ValueError, match="stopped"), keep_unsharded(layers):
        model(input_ids=ids, use_cache=False)
        raise ValueError("stopped")
    assert whole() == {False}
    with keep_unsharded(layers):  # a batch that is replaced by a zero has no backward pass
        model(input_ids=ids, use_cache=False)
    assert whole() == {False}


def sharding() -> None:
    dist.init_process_group("gloo")
    left_alike()
    gathered()


CASES = {
    "uneven": uneven,
    "no memory": partial(run, FastSFTTrainer, callbacks=[callback("on_step_begin", no_memory)()]),
    "dispatched": partial(run, FastSFTTrainer, accelerator_config={"dispatch_batches": True}),
    "one reason": one_reason,
    "sharding": sharding,
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
