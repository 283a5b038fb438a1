"""Batches that two ranks share out unevenly, and a rank that raises, for `test_uneven_ranks.py`."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import leave
from trainer_material import assert_same_log, make_dataset, make_tokenizer, settings
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.testing import tiny_model

FOLDER = Path(sys.argv[1])
OWN_BATCHES = {"accelerator_config": {"dispatch_batches": False}}


def run(cls: Any, *, streamed: int = 0, callbacks: Any = (), **more: Any) -> Any:
    base = {"packing": True, "per_device_train_batch_size": 1, "eval_strategy": "no", "max_steps": 4}
    data: Any = make_dataset("text", 40)
    if streamed:
        data = data.to_iterable_dataset(num_shards=streamed)
    trainer = cls(
        tiny_model("qwen3"), args=SFTConfig(**settings(FOLDER / cls.__name__, **base | more)), train_dataset=data,
        processing_class=make_tokenizer(), callbacks=list(callbacks),
    )  # fmt: skip
    trainer.train()
    return trainer


def uneven() -> None:
    """Stock itself cannot dispatch packed rows from one rank to the others: their lengths differ."""
    for options in (
        {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 3},
        {"accelerator_config": {"even_batches": False}, "per_device_train_batch_size": 2},
        {"accelerator_config": {"split_batches": True}, "per_device_train_batch_size": 2},
        {"streamed": 2, **OWN_BATCHES},
        {"streamed": 1, **OWN_BATCHES},  # the second rank has no shard
        {"save_strategy": "steps", "save_steps": 2},
    ):
        assert_same_log(run(FastSFTTrainer, **options), run(SFTTrainer, **options))


class NoMemory(TrainerCallback):
    """Lets one rank run out of memory inside of its second step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1 and dist.get_rank() == 1:
            model.register_forward_pre_hook(self.fail)

    def fail(self, *_: Any) -> None:
        raise torch.OutOfMemoryError("no memory is left")


def raising() -> None:
    try:
        run(FastSFTTrainer, callbacks=[NoMemory()])
    except torch.OutOfMemoryError as error:
        (FOLDER / "said").write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        raise


if __name__ == "__main__":
    {"uneven": uneven, "raising": raising}[sys.argv[2]]()
    leave()
