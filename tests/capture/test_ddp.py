"""Captured micro-steps of two processes under DDP: whole runs of `train` that log and learn what DDP's own do."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trainer_material
from accelerate import PartialState
from accelerate.utils import DDPCommunicationHookType
from captured_material import At, assert_same_run, build, capturing, distance, keeping, weights
from peft import LoraConfig
from ranks import BASE, command_of, free_port, run_ranks, two_ranks
from torch.nn.parallel import DistributedDataParallel
from trainer_material import make_dataset

from fastpack_trl import FastSFTTrainer
from fastpack_trl.capture import ddp, graphs
from fastpack_trl.capture.decision import EAGER_STEPS

GPUS = os.environ.get("FASTPACK_TEST_GPUS", "")
"""Where there are several; a test process sees one of them (conftest.py)."""
LORA = {"init_lora_weights": False}
ALONE = {"merge_accumulation": "off"}


@pytest.mark.slow
@two_ranks
def test_two_ranks_train_captured_as_under_ddp_itself_and_none_waits_for_ever() -> None:
    PartialState()  # starts the group
    for case in (captured, one_fails, one_lacks_memory, one_changes, buffers, refused, uneven):
        case()


@pytest.mark.cuda
@pytest.mark.skipif(not GPUS, reason="needs two CUDA devices")
def test_two_devices_train_captured_as_eager(tmp_path: Path) -> None:
    launch = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port())
    words = [sys.executable, *launch, *command_of(on_devices, tmp_path)]
    run_ranks(*words, timeout=400, CUDA_VISIBLE_DEVICES=GPUS, ACCELERATE_USE_CPU="false")


def run(setting: str, *, device: Any = None, lora: Any = LORA, prepare: Callable[[Any], None] | None = None,
        callbacks: Callable[[], Any] = tuple, fast: Any = None, **more: Any) -> Any:  # fmt: skip
    """Train with graphs ``on`` or ``off``; the trainer, with the log of its device."""
    options = BASE | {"data": make_dataset("text", 90), "lora": lora, "fast": {"cuda_graph": setting, **(fast or {})}}
    with capturing(**(device or {})) as fakes:
        torch.manual_seed(0)  # of the adapters
        trainer = build(FastSFTTrainer, Path(setting), fakes, callbacks=callbacks(), **options | more)
        if prepare is not None:
            prepare(trainer)
        trainer.train()
    trainer.device_log = fakes.made[-1].log if fakes.made else []
    return trainer


def assert_alike(trainer: Any) -> None:
    """The ranks have the same weights, to the bit."""
    for name, weight in weights(trainer).items():
        first = weight.clone()
        dist.broadcast(first, 0)
        assert torch.equal(first, weight), name


@cache
def eager_of(count: int) -> Any:
    return run("off", gradient_accumulation_steps=count, fast=ALONE)


def both(*, device: Any = None, eager: Any = None, **options: Any) -> tuple[Any, Any]:
    """Both runs, equal, of ranks with equal weights; `eager` is one that was made before."""
    ours, eager = run("on", device=device, **options), eager or run("off", **options)
    assert_same_run(ours, eager)
    assert_alike(ours)
    return ours, eager


def line(trainer: Any) -> Any:
    return trainer.fastpack_report["cuda_graph"]


def captured() -> None:
    evaluated = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 5}
    accumulated = {"gradient_accumulation_steps": 3, "max_steps": 7}
    for options in (
        {"eager": eager_of(1)},
        accumulated | {"fast": ALONE} | evaluated,
        accumulated | {"fast": {"merge_accumulation": "on"}},
        {"family": "qwen3_moe", "fast": ALONE, "gradient_accumulation_steps": 2},
        {"ddp_find_unused_parameters": False, "max_steps": -1, "num_train_epochs": 1, **accumulated},
        {"lora": False},  # gradients of all weights, which are few here
    ):
        ours, _ = both(**options)
        replays = ours.device_log.count("replay")
        assert replays >= ours.state.global_step - EAGER_STEPS - 3, ours.device_log
        assert line(ours).path == "captured", line(ours)


def one_fails() -> None:
    """A rank whose recording fails runs eager from there on, the other one replays: gradients are those of DDP."""
    fails = dist.get_rank() == 1
    device = {"fail": lambda number: RuntimeError("an operation is not permitted") if fails else None}
    for count in (1, 2):
        ours, _ = both(device=device, eager=eager_of(count), gradient_accumulation_steps=count, fast=ALONE)
        said = line(ours)
        assert (said.path == "eager") == fails, said
        assert not fails or "an operation is not permitted" in said.reason
        assert ("replay" in ours.device_log) != fails


def one_lacks_memory() -> None:
    """A micro-step of one rank runs out of memory, before or with the last of a step, and is run again there."""
    rank, options = dist.get_rank(), {"gradient_accumulation_steps": 2, "fast": ALONE}
    for failing in (2, 3):
        left = [failing if rank else -1]

        def after_replay(_: Any, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] == 0:
                raise torch.OutOfMemoryError("no memory is left")

        ours, _ = both(device={"after_replay": after_replay}, eager=eager_of(2), **options)
        said = line(ours)
        assert (said.path == "eager") == bool(rank), said
        assert not rank or "a step ran out of memory while graphs were held" in said.reason
    # A forward of one rank runs again, in which DDP's would hand out the buffers once more.
    left, forward = [EAGER_STEPS * 2], DistributedDataParallel._post_forward

    def after_forward(model: Any, output: Any) -> Any:
        if torch.is_grad_enabled() and rank:
            left[0] -= 1
            if left[0] == -1:
                raise torch.OutOfMemoryError("no memory is left")
        return forward(model, output)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DistributedDataParallel, "_post_forward", after_forward)
        ours = run("on", **options)
    assert not rank or left[0] < -1
    assert line(ours).path == "captured"
    assert_alike(ours)


def uneven() -> None:
    """Rows without a loss on one rank, a last step of fewer rows, weights that are moved in the middle of a run."""
    documents: Any = make_dataset("prompt_completion", 60)
    long = {"prompt": "a cat saw the dog " * 12}  # more than a row holds: nothing of the completion is left
    empty = documents.map(lambda row, place: row | (long if place % 2 else {}), with_indices=True)
    accumulated = {"gradient_accumulation_steps": 3, "fast": ALONE}
    for options in (
        {"data": empty},
        {"data": empty, "max_steps": -1, "num_train_epochs": 1, **accumulated},
        {"callbacks": lambda: [At(0, "freeze"), At(5, "unfreeze")], "lora": False, "ddp_find_unused_parameters": True},
        {"callbacks": lambda: [At(5, "swap data")], "max_steps": 10},
    ):
        ours, _ = both(**options)
        assert line(ours).path == "captured", (options, line(ours))
        assert ours.device_log.count("replay") > 1, (options, ours.device_log)
    assert "replay" in ours.device_log[ours.device_log.index("reset") :], "recorded anew where the weights are now"


def hook_of(rank: int) -> Callable[..., None]:
    def add(model: Any, **_: Any) -> None:
        if rank == dist.get_rank():
            model.get_decoder().layers[0].register_forward_hook(lambda *_: None)

    return add


def one_changes() -> None:
    """A hook that one rank gets: before the ranks agree all stay with DDP, later that rank alone runs eager."""
    ours, _ = both(callbacks=lambda: [At(1, hook_of(1))], max_steps=5)
    assert line(ours).path == "eager"
    reason = "hook" if dist.get_rank() else "rank 1: micro-steps run eager"
    assert reason in line(ours).reason, line(ours)
    assert "replay" not in ours.device_log
    ours, _ = both(callbacks=lambda: [At(5, hook_of(0))])
    assert "replay" in ours.device_log
    assert line(ours).path == ("captured" if dist.get_rank() else "eager")


def buffers() -> None:
    """Buffers are those of the first rank in each step, as under DDP; none where that is switched off."""

    def edit(model: Any, **_: Any) -> None:
        model.get_decoder().rotary_emb.inv_freq.mul_(1 + dist.get_rank())

    logs = []
    for options in ({}, {"ddp_broadcast_buffers": False}):
        ours, _ = both(callbacks=lambda: [At(5, edit)], **options)
        assert "replay" in ours.device_log
        logs.append([entry["loss"] for entry in ours.state.log_history if "loss" in entry])
    assert logs[0][:5] == pytest.approx(logs[1][:5])
    assert logs[0][5:] != pytest.approx(logs[1][5:])


def refused() -> None:
    """What does not fit is named, in every rank, and DDP reduces as ever."""

    def of_ddp(name: str, value: Any) -> Callable[[Any], None]:
        return lambda trainer: setattr(trainer.accelerator.ddp_handler, name, value)

    def unused(trainer: Any) -> None:
        trainer.model.base_model.model.unused = torch.nn.Parameter(torch.ones(3))

    for prepare, options, reason in (
        (of_ddp("comm_hook", DDPCommunicationHookType.FP16), {}, "DDP has a communication hook"),
        (of_ddp("gradient_as_bucket_view", True), {}, "gradient_as_bucket_view"),
        (None, {"ddp_static_graph": True, "ddp_find_unused_parameters": False}, "ddp_static_graph"),
        (unused, {}, "base_model.model.unused has no gradient"),
    ):
        ours, _ = both(prepare=prepare, max_steps=5, **options)
        assert reason in line(ours).reason, line(ours)
        assert line(ours).path == "eager"
        assert "replay" not in ours.device_log
    for prepare, reason in (
        (lambda trainer: hook_of(0)(trainer.model), "hook" if dist.get_rank() == 0 else "rank 0: "),
        (lambda trainer: None, "gradients of 0.0 GiB are reduced during the backward pass"),
    ):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match=reason):
            patch.setattr(ddp, "_MOST_BYTES", 0 if "GiB" in reason else 1 << 30)
            run("on", prepare=prepare)


def _on_device(folder: str, setting: str) -> tuple[Any, list[float], dict[str, torch.Tensor]]:
    """Train in bf16 on the device of this rank; the trainer, its losses and the gradients of its last step."""
    gradients: dict[str, torch.Tensor] = {}
    torch.manual_seed(0)
    options = BASE | {"use_cpu": False, "bf16": True, "max_steps": 30, "per_device_train_batch_size": 2}
    adapters = LoraConfig(r=4, target_modules="all-linear", **LORA)
    trainer = trainer_material.build(
        FastSFTTrainer, Path(folder), data=make_dataset("text", 400), fast={"cuda_graph": setting},
        gradient_accumulation_steps=2, trainer={"peft_config": adapters, "callbacks": [keeping(gradients)]}, **options,
    )  # fmt: skip
    trainer.train()
    return trainer, [row["loss"] for row in trainer.state.log_history if "loss" in row], gradients


def on_devices() -> None:
    """Captured steps under NCCL differ from eager ones of the same shapes as two of these do; DDP's own are near."""
    captured = _on_device("captured", "on")
    assert line(captured[0]).path == "captured", line(captured[0])
    assert_alike(captured[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs, "WARM_ROWS", 10**9)  # nothing is recorded
        first, second = (_on_device(name, "on") for name in ("first", "second"))
    by_ddp = _on_device("ddp", "off")
    assert captured[2].keys() == first[2].keys() == by_ddp[2].keys()
    pairs = ((captured, first), (first, second), (captured, by_ddp))
    found, budget, stock = (distance(one[1:], other[1:]) for one, other in pairs)
    assert found[0] <= 2 * budget[0] + 2e-3, (found, budget)
    assert found[1] <= 2 * budget[1] + 2e-2, (found, budget)
    assert stock[0] <= 2e-2, stock
