"""Captured micro-steps on a CUDA device: the same losses and gradients as without, no wait, tens of launches."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_material import At, assert_as_close_as_eager_runs, distance, keeping
from datasets import Dataset
from lora_material import quantized
from peft import LoraConfig
from shared_material import prefixed
from trainer_material import assert_line, build, callback, make_dataset
from transformers import TrainerCallback

from fastpack_trl import FastSFTTrainer
from fastpack_trl.capture import graphs
from fastpack_trl.capture.device import CudaGraphs
from fastpack_trl.testing import count_host_syncs, tiny_model

pytestmark = pytest.mark.cuda

STEPS = 30
OWN_FORWARDS = {"fused_layers": "off"}
"""For a model whose forward does more than its formula."""
FAMILIES = ("llama", "qwen3", "gemma3_text", "qwen3_moe", "gpt_oss")
KINDS = [(family, kind) for family in FAMILIES for kind in ("full", "lora")] + [("llama", "nf4")]


def made(folder: Path, *, fast: dict[str, Any] | None = None, trainer: Any = None, **more: Any) -> Any:
    """A trainer in bf16 on the device, with the graph asked for by name."""
    options = {
        "data": make_dataset("text", 300), "packing": True, "eval_strategy": "no", "use_cpu": False, "bf16": True,
        "max_steps": STEPS, **more,
    }  # fmt: skip
    given = {"eval_dataset": make_dataset("text", 8, seed=7)} | (trainer or {})
    return build(FastSFTTrainer, folder, fast={"cuda_graph": "on"} | (fast or {}), trainer=given, **options)


def waiting_norm(then: Callable[[Any], None] = lambda hidden: None) -> Any:
    """A model whose last norm asks the device in each pass, then calls `then` with its input."""
    model = tiny_model("qwen3")
    norm = model.get_decoder().norm

    class Waits(type(norm)):  # type: ignore[misc]
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            hidden.sum().item()
            if self.training:
                then(hidden)
            return super().forward(hidden)

    norm.__class__ = Waits
    return model


def run(
    folder: Path, family: str, kind: str, *, fast: dict[str, Any] | None = None, callbacks: Any = (),
    lora: dict[str, Any] | None = None, data: Any = None, **more: Any,
) -> Any:  # fmt: skip
    """Train in bf16 on the device; return the losses of each step, the last gradients, and the line of the report."""
    torch.manual_seed(0)
    model = quantized("nf4", nested=True).cuda() if kind == "nf4" else tiny_model(family)
    if family in ("qwen3_moe", "gpt_oss"):
        model = model.to(torch.bfloat16)  # as their checkpoints; torch's grouped product of fp32 waits for its sizes
    gradients: dict[str, torch.Tensor] = {}
    adapters = LoraConfig(r=4, target_modules="all-linear", **(lora or {})) if kind == "lora" else None
    given = {"peft_config": adapters, "callbacks": [keeping(gradients), *callbacks]}
    trainer = made(folder, model=model, data=data or make_dataset("text", 300), fast=fast, trainer=given, **more)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return losses, gradients, trainer.fastpack_report["cuda_graph"]


@pytest.mark.parametrize("shared", [False, True], ids=["", "shared"])
@pytest.mark.parametrize(("family", "kind"), KINDS, ids=["-".join(pair) for pair in KINDS])
def test_captured_steps_differ_from_eager_ones_as_eager_runs_do(
    tmp_path: Path, family: str, kind: str, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Small, else eager runs alone drift apart over 30 steps: additions in another order, tokens routed elsewhere. With
    # both factors of LoRA drawn, an update that a replay does not see is still above the bounds.
    options: dict[str, Any] = {"learning_rate": 1e-4, "lora": {"init_lora_weights": False}}
    if shared:
        options |= {"data": prefixed(count=400), "max_length": 256, "gradient_accumulation_steps": 2}
        options["fast"] = {"share_prefixes": "on"}
        if family in ("qwen3_moe", "gpt_oss"):
            options["learning_rate"] = 1e-6
    captured = run(tmp_path / "a", family, kind, **options)
    with monkeypatch.context() as patch:  # the same static shapes, and nothing is recorded
        patch.setattr(graphs, "WARM_ROWS", 10**9)
        eager = [run(tmp_path / name, family, kind, **options) for name in "bcd"]
    assert_as_close_as_eager_runs(captured, eager)


def test_between_two_logs_a_captured_run_waits_for_nothing_and_launches_tens(tmp_path: Path) -> None:
    launches: list[int] = []
    waits: list[Any] = []

    class Late(TrainerCallback):
        def __init__(self) -> None:
            self.counter: Any = None
            self.profile: Any = None

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 20:
                self.counter = count_host_syncs()
                waits.append(self.counter.__enter__())
                self.profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
                self.profile.__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 24:
                self.profile.__exit__(None, None, None)
                self.counter.__exit__(None, None, None)
                names = [event.name for event in self.profile.events()]
                launches.append(sum(name.startswith(("cudaLaunch", "cuLaunch", "cudaGraphLaunch")) for name in names))

    trainer = made(tmp_path, max_steps=26, logging_steps=50, trainer={"callbacks": [Late()]})
    trainer.train()
    assert trainer.fastpack_report["cuda_graph"].path == "captured"
    assert waits[0].total == 0, waits[0]
    assert launches[0] / 4 < 100, launches


@pytest.mark.parametrize("busy", [True, False], ids=["busy", "idle"])
def test_a_watch_tells_a_busy_device_from_an_idle_one(busy: bool) -> None:
    matrix = torch.ones(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    for _ in range(400 if busy else 0):  # half a second and more
        matrix @ matrix
    watch = CudaGraphs(matrix.device).watch_idle()
    time.sleep(0.1)
    share, seconds = watch.stop()
    torch.cuda.synchronize()
    assert share < 0.1 if busy else share > 0.9
    assert seconds == pytest.approx(0.1, rel=0.5)


def test_a_failed_recording_leaves_the_allocator_usable(tmp_path: Path) -> None:
    """The cache is emptied after it, and a step that runs out of memory runs again."""
    lacked: list[int] = []

    def lack(hidden: torch.Tensor) -> None:
        if trainer.state.global_step == 15 and not lacked:
            lacked.append(1)
            torch.empty(1 << 50, dtype=torch.uint8, device=hidden.device)

    given = {"callbacks": [callback("on_step_end", lambda *_: torch.cuda.empty_cache())()]}
    trainer = made(tmp_path, model=waiting_norm(lack), fast=OWN_FORWARDS, max_steps=18, trainer=given)
    trainer.train()
    assert_line(trainer, "cuda_graph", "cannot be recorded", status="off", path="eager")
    assert lacked
    assert trainer.state.global_step == 18


@pytest.mark.parametrize(
    "act", ["freeze", "swap data", "evaluation mode", "generate", "raise the rate", "merge", "disable"]
)
def test_what_a_callback_does_in_the_middle_counts_from_then_on(tmp_path: Path, act: Any) -> None:
    kind = "lora" if act in ("merge", "disable") else "full"
    ours, eager = captured_and_eager(tmp_path, kind, callbacks=[At(15, act)])
    assert ours[1].keys() == eager[1].keys()


def captured_and_eager(folder: Path, kind: str, *, fast: dict[str, Any] | None = None, **options: Any) -> Any:
    """Two runs of equal losses."""
    ours, eager = (
        run(folder / setting, "qwen3", kind, fast=(fast or {}) | {"cuda_graph": setting}, **options)
        for setting in ("on", "off")
    )
    assert ours[2].path == "captured", ours[2]
    assert distance(ours, eager)[0] < 2e-2
    return ours, eager


@pytest.mark.parametrize(
    ("options", "fast"),
    [
        ({"eval_strategy": "steps", "eval_steps": 4}, {}),
        ({"gradient_accumulation_steps": 3}, {"merge_accumulation": "off"}),
        ({"gradient_accumulation_steps": 4}, {}),
        ({"packing_strategy": "bfd", "max_length": 96}, {}),
        ({}, {"activation_memory": "checkpoint"}),
    ],
    ids=["evaluation", "replays-of-a-group", "merged", "short-rows", "recomputed"],
)
def test_replays_beside_other_work(tmp_path: Path, options: dict[str, Any], fast: dict[str, Any]) -> None:
    captured_and_eager(tmp_path, "lora", fast=fast, **options)


def test_dropout_draws_anew_in_each_replay(tmp_path: Path) -> None:
    """Every row is the same and nothing is learned: losses differ by what dropout draws."""
    same = Dataset.from_dict({"text": [make_dataset("text", 1)[0]["text"]] * 300})
    losses, _, line = run(
        tmp_path, "qwen3", "lora", lora={"lora_dropout": 0.5, "init_lora_weights": False}, learning_rate=0.0,
        data=same,
    )  # fmt: skip
    assert line.path == "captured", line
    assert len(set(losses[10:])) > 15, losses


def test_a_step_after_a_failed_recording_may_draw_random_numbers(tmp_path: Path) -> None:
    adapters = LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1)
    trainer = made(
        tmp_path, model=waiting_norm(), trainer={"peft_config": adapters}, gradient_checkpointing=False,
        fast=OWN_FORWARDS,
    )  # fmt: skip
    trainer.train()
    line, losses = trainer.fastpack_report["cuda_graph"], [row for row in trainer.state.log_history if "loss" in row]
    assert (line.status, "cannot be recorded" in line.reason) == ("off", True), line
    assert len(losses) == STEPS


@pytest.mark.parametrize("optim", ["adamw_8bit", "paged_adamw_8bit", "paged_adamw_32bit"])
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_steps_of_bitsandbytes_are_in_order_with_captured_ones(tmp_path: Path, optim: str, kind: str) -> None:
    pytest.importorskip("bitsandbytes")
    captured_and_eager(tmp_path, kind, optim=optim)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
