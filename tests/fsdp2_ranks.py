"""Trains stock and ours under FSDP 2 on two ranks, for `test_fsdp2.py`: whole runs of `train`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from compile_material import Counting, one_step, row, stop
from fsdp2 import fsdp2
from peft import LoraConfig
from ranks import leave
from trainer_material import assert_same_log, make_dataset, make_tokenizer, settings
from trl import SFTConfig, SFTTrainer

from fastpack_trl import FastSFTConfig, FastSFTTrainer
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.compile.kind import LayerKind
from fastpack_trl.compile.layers import compiled_layers
from fastpack_trl.measure.payback import StepsLeft
from fastpack_trl.model.ranks import Ranks
from fastpack_trl.testing import tiny_model

FOLDER = sys.argv[1] if len(sys.argv) > 1 else "/tmp"
GRAPHS = Counting(differentiate=True)


def make(cls: Any, *, family: str = "qwen3", lora: bool = False, fast: dict[str, Any], **more: Any) -> Any:
    base = {"packing": True, "per_device_train_batch_size": 1, "eval_strategy": "no", "max_steps": 3}
    base |= {"gradient_checkpointing": False}
    args = settings(Path(FOLDER), **base | more)
    torch.manual_seed(0)
    adapters = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
    return cls(
        tiny_model(family), args=FastSFTConfig(**args, **fast) if cls is FastSFTTrainer else SFTConfig(**args),
        train_dataset=make_dataset("text"), processing_class=make_tokenizer(), peft_config=adapters if lora else None,
    )  # fmt: skip


def both(*, plugin: dict[str, Any] | None = None, **options: Any) -> tuple[Any, Any]:
    trainers = []
    for cls in (FastSFTTrainer, SFTTrainer):
        with fsdp2(make(cls, **options), **plugin or {}) as trainer:
            trainer.train()
        trainers.append(trainer)
    ours, stock = trainers
    assert type(ours.model).__name__.startswith("FSDP"), type(ours.model)
    assert_same_log(ours, stock, rtol=1e-5, atol=1e-6)
    return ours, stock


def compiled() -> None:
    """Differentiated by AOT, whose graphs keep the gathered parameters; traced only, with LoRA and checkpoints."""
    compiled_layers.__wrapped__.__kwdefaults__["_backend"] = GRAPHS  # type: ignore[attr-defined]
    for options in ({}, {"gradient_checkpointing": True, "lora": True}):
        GRAPHS.graphs, GRAPHS.differentiate = 0, not options
        # One mask: a kernel per document would make graphs that take a minute here.
        ours, _ = both(fast={"layer_compile": "on", "packed_attention": "sdpa"}, **options)
        report = ours.fastpack_report
        assert (report["layer_compile"].status, report["layer_compile"].path) == ("on", "compiled"), report.table()
        assert GRAPHS.graphs, options
        for layer in ours.accelerator.unwrap_model(ours.model).get_decoder().layers:
            assert "forward" not in layer.__dict__
            assert type(layer).__name__.startswith("FSDP"), type(layer)


def agreed() -> None:
    """Of what is weighed, all take the same: also where one process cannot compile, or sees no row for a while."""
    rank, ranks = dist.get_rank(), Ranks(2)

    def kind(fails: bool, absent: tuple[int, ...]) -> LayerKind:
        model = tiny_model("qwen3", num_hidden_layers=1).train()
        backend = stop if fails and rank == 1 else Counting()
        with packed_attention(model, "sdpa"), compiled_layers(
            model, measure=True, left=lambda: StepsLeft(10**9, 1), early=lambda: False, together=True, verbose=False,
            _backend=backend,
        ) as layers:  # fmt: skip
            for step in range(4):
                layers.agree(ranks)
                if rank == 0 or step not in absent:
                    one_step(model, *row(step))
        return layers.kinds[0]

    failed = kind(True, ())
    assert failed.path == "eager"
    assert ("no compiler here" if rank else "another process could not compile it") in failed.reason
    late = kind(False, (0, 1, 2))
    assert late.weighing is not None
    assert late.weighing.agreed
    paths = ranks.most([late.path == "eager", late.path != "eager"])
    assert sorted(paths) == [0.0, 1.0], (rank, late.path, late.reason)


CASES = {"compiled": compiled, "agreed": agreed}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name in sys.argv[2:] or CASES:
        CASES[name]()
    leave()
