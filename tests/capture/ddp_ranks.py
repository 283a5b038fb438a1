"""Captured micro-steps on two ranks under DDP, for `test_ddp.py`: whole runs of `train`, replays by the host."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from captured_material import At, assert_same_run, build, weights
from ranks import leave
from replayed_graphs import TapeDevice
from torch.nn.parallel import DistributedDataParallel
from trainer_material import make_dataset

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention.varlen import Varlen
from fastpack_trl.capture import ddp, feature
from fastpack_trl.capture.decision import EAGER_STEPS

FOLDER = Path(sys.argv[1])
LORA = {"init_lora_weights": False}
STEPS = 8


@contextmanager
def devices(**options: Any) -> Iterator[SimpleNamespace]:
    """Let runs on the CPU be captured; the fixture of the other tests, for a process without pytest."""
    made: list[TapeDevice] = []
    pending = dict(options)

    def make(_device: torch.device) -> TapeDevice:
        made.append(TapeDevice(**pending))
        return made[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Varlen, "refuses", lambda self, features: "")
        patch.setattr(feature, "unavailable", lambda device: "")
        patch.setattr(feature, "CudaGraphs", make)
        yield SimpleNamespace(made=made, options=pending)


def run(setting: str, *, device: Any = None, lora: Any = LORA, prepare: Callable[[Any], None] | None = None,
        callbacks: Callable[[], Any] = tuple, fast: Any = None, **more: Any) -> Any:  # fmt: skip
    """Train with graphs ``on`` or ``off``; the trainer, with the log of its device."""
    options = {"data": make_dataset("text", 90), "per_device_train_batch_size": 1, "max_steps": STEPS, **more}
    with devices(**(device or {})) as fakes:
        torch.manual_seed(0)  # of the adapters
        given = {"cuda_graph": setting, **(fast or {})}
        trainer = build(
            FastSFTTrainer, FOLDER / setting, fakes, lora=lora, fast=given, callbacks=callbacks(), **options
        )
        if prepare is not None:
            prepare(trainer)
        trainer.train()
    trainer.device_log = fakes.made[0].log if fakes.made else []
    return trainer


def assert_alike(trainer: Any) -> None:
    """The ranks have the same weights, to the bit."""
    for name, weight in weights(trainer).items():
        first = weight.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, weight), name


def both(**options: Any) -> tuple[Any, Any]:
    """Both runs, equal, of ranks with equal weights."""
    ours, eager = (run(setting, **options) for setting in ("on", "off"))
    assert_same_run(ours, eager)
    assert_alike(ours)
    return ours, eager


def line(trainer: Any) -> Any:
    return trainer.fastpack_report["cuda_graph"]


def captured() -> None:
    evaluated = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 5}
    accumulated = {"gradient_accumulation_steps": 3, "max_steps": 7}
    for options in (
        {},
        accumulated | {"fast": {"merge_accumulation": "off"}} | evaluated,
        accumulated | {"fast": {"merge_accumulation": "on"}},
        {"family": "qwen3_moe", "fast": {"merge_accumulation": "off"}, "gradient_accumulation_steps": 2},
        {"ddp_find_unused_parameters": False, "max_steps": -1, "num_train_epochs": 1, **accumulated},
        {"lora": False, "model_init_kwargs": None},  # gradients of all weights, which are few here
    ):
        ours, _ = both(**options)
        replays = ours.device_log.count("replay")
        print(options, replays, ours.state.global_step, line(ours), flush=True)
        assert replays >= ours.state.global_step - EAGER_STEPS - 3, ours.device_log
        assert line(ours).path == "captured", line(ours)


CASES: dict[str, Callable[[], None]] = {"captured": captured}

if __name__ == "__main__":
    CASES[sys.argv[2]]()
    leave()
