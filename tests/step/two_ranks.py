"""Trains stock and ours on two ranks, for `test_step_metrics.py`; rank 0 writes both logs to a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from peft import LoraConfig
from ranks import leave
from trainer_material import figures, train
from transformers import TrainerCallback
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer

HOOKED = "hooks on one rank, three rows a step"
"""There micro-batches run one by one and give stock's outputs; on the other rank they are merged."""


class HooksOneRank(TrainerCallback):
    """Hooks the model of the first rank when the second step begins; one of the hooks edits labels."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step != 1 or not state.is_world_process_zero:
            return

        def edit(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
            if kwargs.get("labels") is not None:
                kwargs["labels"][kwargs["input_ids"] % 3 == 0] = -100

        model.register_forward_pre_hook(edit, with_kwargs=True)
        model.register_forward_hook(lambda *_: None)


# 25 packed rows for training and 3 for evaluation: the last batch of each has one row, which accelerate repeats on the
# second rank, where metrics leave it out.
CASES: dict[str, dict[str, Any]] = {
    "accumulated": {"gradient_accumulation_steps": 2, "num_train_epochs": 2, "max_steps": -1, "eval_steps": 3},
    "one row per rank": {"per_device_train_batch_size": 1, "max_steps": 15, "logging_steps": 4, "eval_steps": 3},
    "experts": {"family": "qwen3_moe", "average_tokens_across_devices": False, "gradient_accumulation_steps": 2},
    "experts, three rows merged": {
        "family": "qwen3_moe",
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 3,
        "max_steps": 5,
    },
    "adapters, checkpoints with reentry": {
        "max_steps": 6,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        "ddp_find_unused_parameters": False,  # else stock cannot run it either
        "trainer": {"peft_config": LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")},
    },
    HOOKED: {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 3,
        "trainer": {"callbacks": [HooksOneRank]},
    },
}


class LogsAlone(TrainerCallback):
    """One rank logs on its own, as a callback may that only the first rank runs."""

    trainer: Any = None

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.trainer.log({"alone": 1.0})

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        frame: Any = sys._getframe()
        while not isinstance(frame.f_locals.get("self"), SFTTrainer):
            frame = frame.f_back
        self.trainer = frame.f_locals["self"]


def main(folder: Path) -> None:
    out: dict[str, Any] = {}
    base = {"max_length": 56, "packing": True, "data": "prompt_completion", "per_device_train_batch_size": 4}
    for name, options in CASES.items():
        for cls in (FastSFTTrainer, SFTTrainer):
            trainer = train(cls, folder / cls.__name__, **base | {"per_device_eval_batch_size": 1} | options)
            assert trainer.accelerator.num_processes == 2, trainer.accelerator.num_processes
            assert (len(trainer.train_dataset), len(trainer.eval_dataset)) == (25, 3)
            if isinstance(trainer, FastSFTTrainer):
                assert trainer.fastpack_report["sync_free"].path == "loss, metrics, host work"
                merged = trainer.fastpack_report["merge_accumulation"].status == "on"
                one_by_one = name == HOOKED and trainer.is_world_process_zero()
                # `Trainer` copies a batch from "cpu" to "cpu:0": that is no edit.
                assert "edited" not in trainer.fastpack_report["sync_free"].reason, trainer.fastpack_report
                assert merged == ("gradient_accumulation_steps" in options and not one_by_one), trainer.fastpack_report
            out.setdefault(name, []).append(figures(trainer))
    alone = {"callbacks": [LogsAlone()]}
    trainer = train(FastSFTTrainer, folder, trainer=alone, gradient_accumulation_steps=2, **base)
    out["alone"] = figures(trainer)
    if trainer.is_world_process_zero():
        (folder / "logs.json").write_text(json.dumps(out))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    leave()
