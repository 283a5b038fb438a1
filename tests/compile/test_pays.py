"""Layers are compiled where the steps that are left can pay for it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_material import Counting, compile_with, compiled, make, one_step, row
from trainer_material import build, train
from transformers import TrainerCallback

from fastpack_trl import FastSFTTrainer
from fastpack_trl.compile import kind as kinds
from fastpack_trl.compile.layer_compile import start_workers
from fastpack_trl.compile.layers import CompiledLayers, compiled_layers
from fastpack_trl.measure.payback import StepsLeft
from fastpack_trl.run import Run


def after_two_steps(family: str, left: StepsLeft | None, backend: Counting) -> CompiledLayers:
    model = make(family)
    with compiled(model, backend, left=None if left is None else lambda: left) as layers:
        for seed in range(2):
            one_step(model, *row(seed))
    return layers


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_short_run_is_not_compiled_and_told_from_when_on_it_would_pay(family: str) -> None:
    backend = Counting()
    layers = after_two_steps(family, StepsLeft(50, 1), backend)
    assert (backend.graphs, layers.path, layers.unpaid) == (0, "eager", True)
    found = re.findall(
        r"x (\d+) not compiled: 50 steps left, 8 s would pay from ([\d,]+) on; eager ([\d.]+) ms", layers.reason
    )
    assert len(found) == len(layers.kinds), layers.reason
    for members, steps, milliseconds in found:
        saving = kinds.SAVED * int(members) * float(milliseconds) / 1000
        assert int(steps.replace(",", "")) == pytest.approx(kinds.COMPILE_SECONDS / saving, rel=0.02)


@pytest.mark.parametrize("left", [StepsLeft(10**7, 1), StepsLeft(1000, 10**4), None])
def test_a_long_run_is_compiled(left: StepsLeft | None) -> None:
    """Many steps, or many rows in each; without a limit whatever is left."""
    backend = Counting()
    layers = after_two_steps("llama", left, backend)
    assert (backend.graphs, layers.path, layers.unpaid) == (1, "compiled", False), layers.reason
    assert sum(kind.seconds for kind in layers.kinds) > 0


class Left(TrainerCallback):
    """Notes what is left at each step, asked as the layers do, in the step's first forward pass."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.found: list[StepsLeft] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found.append(self.trainer.fastpack_run.steps_left())


def left_of(folder: Path, resume: str | None = None, **more: Any) -> list[StepsLeft]:
    watch = Left()
    fast = {name: more.pop(name) for name in ("merge_accumulation",) if name in more}
    watch.trainer = build(
        FastSFTTrainer, folder, family="llama", fast=fast, trainer={"callbacks": [watch]}, eval_strategy="no",
        packing=True, **more,
    )  # fmt: skip
    watch.trainer.train(resume_from_checkpoint=resume)
    return watch.found


def test_steps_left_are_those_of_this_run_and_rows_those_that_run(tmp_path: Path) -> None:
    saved = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4, "per_device_train_batch_size": 1}
    assert left_of(tmp_path, **saved) == [StepsLeft(steps, 1) for steps in (3, 2, 1, 0)]
    assert left_of(tmp_path, str(tmp_path / "checkpoint-2"), **saved) == [StepsLeft(steps, 1) for steps in (1, 0)]
    four = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    alone = left_of(tmp_path, max_steps=-1, num_train_epochs=1, merge_accumulation="off", **four)
    assert [found.steps for found in alone] == list(range(len(alone)))[::-1]
    assert {found.rows for found in alone[:-1]} == {4}  # the epoch's last step has two
    assert {found.rows for found in left_of(tmp_path, merge_accumulation="on", max_steps=1, **four)} == {1}


def test_auto_weighs_and_on_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device where `auto` compiles at all."""
    given: list[Any] = []
    options: dict[str, Any] = {"packing": True, "gradient_checkpointing": False, "eval_strategy": "no", "max_steps": 3}

    def counted(*args: Any, **kwargs: Any) -> Any:
        given.append(kwargs["left"] is not None)
        return compiled_layers(*args, **kwargs, _backend=Counting())

    monkeypatch.setattr("fastpack_trl.compile.layer_compile.why_not", lambda run: "")
    monkeypatch.setattr("fastpack_trl.compile.layer_compile.compiled_layers", counted)
    auto = train(FastSFTTrainer, tmp_path / "auto", fast={"layer_compile": "auto"}, **options)
    line = auto.fastpack_report["layer_compile"]
    assert (line.status, line.path) == ("off", "eager")
    assert "not compiled: 2 steps left" in line.reason
    on = train(FastSFTTrainer, tmp_path / "on", fast={"layer_compile": "on"}, **options)
    assert on.fastpack_report["layer_compile"].status == "on"
    assert given == [True, False]


def test_auto_decides_in_the_second_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one runs as the layers are; the report says what is to come, also of a run that ends before."""
    backend, graphs = Counting(differentiate=True), []
    options: dict[str, Any] = {"packing": True, "gradient_checkpointing": False, "eval_strategy": "no"}
    monkeypatch.setattr("fastpack_trl.compile.layer_compile.why_not", lambda run: "")
    monkeypatch.setattr(kinds, "COMPILE_SECONDS", 0.0)
    compile_with(backend, monkeypatch)

    class Graphs(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            graphs.append(backend.graphs)

    fast = {"layer_compile": "auto"}
    long = train(
        FastSFTTrainer, tmp_path / "long", fast=fast, max_steps=3, trainer={"callbacks": [Graphs()]}, **options
    )
    assert graphs == [0, 1, 1], long.fastpack_report.table()
    assert "compiled in" in long.fastpack_report["layer_compile"].reason
    alone = train(FastSFTTrainer, tmp_path / "alone", fast=fast, max_steps=1, **options)
    assert backend.graphs == 1
    line = alone.fastpack_report["layer_compile"]
    assert (line.path, line.reason) == (
        "pending", "Qwen3DecoderLayer is compiled at its first packed row, after the first step",
    )  # fmt: skip


def test_workers_start_where_layers_may_be_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA, which is only said here: nothing else of this run asks for the device."""
    started: list[bool] = []
    monkeypatch.setattr("torch._inductor.async_compile.maybe_warm_pool", lambda: started.append(True))

    trainers: list[Any] = [
        build(FastSFTTrainer, tmp_path, family="llama", packing=True, eval_strategy="no", fast=fast)
        for fast in ({}, {"layer_compile": "off"})
    ]
    run, off = (trainer.fastpack_run for trainer in trainers)
    start_workers(run)
    assert not started
    monkeypatch.setattr(Run, "device", torch.device("cuda"))
    start_workers(off)
    assert not started
    start_workers(run)
    assert started == [True]

    def fails() -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("torch._inductor.async_compile.maybe_warm_pool", fails)
    start_workers(run)


@pytest.mark.cuda
def test_cuda_a_short_run_is_not_compiled_and_a_long_one_is(tmp_path: Path, inductor: None) -> None:
    options: dict[str, Any] = {"packing": True, "eval_strategy": "no", "use_cpu": False, "bf16": True}
    short = train(FastSFTTrainer, tmp_path / "short", fast={"layer_compile": "auto"}, max_steps=3, **options)
    line = short.fastpack_report["layer_compile"]
    assert (line.status, line.path) == ("off", "eager"), line
    assert re.search("2 steps left, 8 s would pay from", line.reason)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kinds, "COMPILE_SECONDS", 0.0)
        long = train(FastSFTTrainer, tmp_path / "long", fast={"layer_compile": "auto"}, max_steps=2, **options)
    reason = long.fastpack_report["layer_compile"].reason
    assert "compiled in" in reason
