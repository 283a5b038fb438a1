"""Trains stock and ours under DeepSpeed on two ranks, for `test_ranks.py`; `accelerate launch` starts it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import transformers.training_args
from compile_material import Counting
from peft import LoraConfig
from trainer_material import assert_same_log, train
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.compile.layers import compiled_layers
from fastpack_trl.config import Settings
from fastpack_trl.testing import tiny_model

FOLDER, STAGE, BF16 = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "bf16"
ACCUMULATED = {"gradient_accumulation_steps": 1 if STAGE == 1 else 2}  # TRL's configuration of ZeRO 1 fixes one
# A CPU has it: only the check of the arguments asks for a GPU.
transformers.training_args.is_torch_bf16_gpu_available = lambda: BF16


def trained(
    cls: Any, fast: dict[str, str], family: str = "qwen3", lora: dict[str, Any] | None = None, **options: Any
) -> Any:
    unset_hf_deepspeed_config()  # of the trainer before: under ZeRO 3 a model would be sharded when it is made
    model = tiny_model(family)
    # accelerate starts several processes of DeepSpeed on a CPU where the backend is named.
    base = {"packing": True, "per_device_train_batch_size": 1, "eval_strategy": "no", "max_steps": 3} | options
    base |= {"use_cpu": False, "ddp_backend": "gloo", "bf16": BF16}
    fast = {"verify_packing": "on", "packed_attention": "sdpa"} | fast
    torch.manual_seed(0)
    fields = fast if cls is FastSFTTrainer else None
    trainer = train(cls, FOLDER, model=model, fast=fields, trainer=lora or {}, **base)
    assert type(trainer.model_wrapped).__name__ == "DeepSpeedEngine"
    assert trainer.accelerator.num_processes == 2
    return trainer


def main() -> None:
    """What is on under ZeRO 1 and 2 is stock's under ZeRO 3; the log, gradient norms included, is stock's under all."""
    backend = Counting(differentiate=True)
    compiled_layers.__wrapped__.__kwdefaults__["_backend"] = backend  # type: ignore[attr-defined]
    if STAGE == 3:  # what it lacks is said, and stops nothing
        Settings.is_explicit = lambda *_: False  # type: ignore[method-assign]
    adapters = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
    for options, fast, feature, path in (
        ({"family": "qwen3_moe"}, {"moe": "on"}, "moe", "fastpack"),
        ({"lora": {"peft_config": adapters}, "gradient_checkpointing": True}, {}, "lora", "fast"),
        (ACCUMULATED, {"layer_compile": "on"}, "layer_compile", "compiled"),
    ):
        ours, stock = (trained(cls, fast, **options) for cls in (FastSFTTrainer, SFTTrainer))
        if BF16:  # updates of bf16 weights differ by whole steps of theirs
            losses = ([row["loss"] for row in one.state.log_history[:-1]] for one in (ours, stock))
            torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-3, atol=0)
        else:
            assert_same_log(ours, stock)
        report, whole = ours.fastpack_report, not ours.fastpack_run.is_sharded
        assert whole == (STAGE < 3), report.table()
        assert report["verify_packing"].path == "check", report.table()
        for name, expected in {feature: path, "sync_free": "loss, metrics"}.items():
            assert (report[name].path == expected) == whole, (STAGE, report.table())
            assert whole or "shard" in report[name].reason, report.table()
        assert "engine owns backward and step" in report["sync_free"].reason
        merges = options.get("gradient_accumulation_steps", 1) > 1
        assert ("engine owns" in report["merge_accumulation"].reason) == merges, report.table()
        assert "copies of weights and gradients" in report["activation_memory"].reason


if __name__ == "__main__":
    main()
