"""Where micro-steps are not captured: no memory, no gain, no time, other rows; each named."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from captured_material import assert_same_run, build, train
from old_device import forced_capability
from trainer_material import assert_line, callback

from fastpack_trl import FastSFTTrainer
from fastpack_trl.capture import decision
from fastpack_trl.checkpointing.streams import GIB
from fastpack_trl.errors import first_reason
from fastpack_trl.features import cuda_graph
from fastpack_trl.moe.layout import experts_modules
from fastpack_trl.run import Run
from fastpack_trl.testing import tiny_model


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB"), "no memory for a graph"),
        (RuntimeError("operation not permitted when stream is capturing"), "be recorded: operation not permitted"),
    ],
    ids=["memory", "refused"],
)
def test_what_cannot_be_recorded_runs_eager_named_once(
    tmp_path: Path, devices: Any, error: Exception, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    devices.options["fail"] = lambda number: error
    ours = train(tmp_path / "ours", devices, max_steps=14)
    assert "replay" not in devices.made[0].log
    assert_line(ours, "cuda_graph", said, status="off", path="eager")
    assert sum("cuda_graph: eager from here on" in text for text in caplog.messages) == 1
    eager = train(tmp_path / "eager", devices, fast={"cuda_graph": "off"}, max_steps=14)
    assert_same_run(ours, eager)


def test_a_model_that_lacks_room_for_a_graph_runs_eager(tmp_path: Path, devices: Any) -> None:
    devices.options["room"] = "1.0 GiB are free, a graph plus an eager step takes 2.0"
    assert train(tmp_path, devices).fastpack_report["cuda_graph"].reason == devices.options["room"]
    assert "record" not in devices.made[0].log


@pytest.mark.parametrize(
    ("left", "step", "said"),
    [
        (78.0, 25.6, ""),  # 8B, LoRA, 4,096 tokens on 141 GB
        (27.2, 64.4, "graphs need 64.4 GiB on top of an eager step; the plan leaves 27.2"),  # 14B, copies of weights
        (0.0, 25.6, "graphs need 25.6 GiB on top of an eager step; the plan leaves 0.0"),  # layers are recomputed
        (None, 0.0, ""),  # no plan: the device is asked before the first recording
    ],
)
def test_a_graph_takes_a_step_more(tmp_path: Path, devices: Any, left: float | None, step: float, said: str) -> None:
    trainer = build(FastSFTTrainer, tmp_path, devices)
    run = trainer.fastpack_run
    run.loss_is_ours, run.refuses_static = True, lambda bucket: ""
    run.step.activations_left, run.step.activation_bytes = None if left is None else int(left * GIB), int(step * GIB)
    assert first_reason(cuda_graph.refusals(run)) == said


@pytest.mark.parametrize(
    ("idle", "watched", "steps", "said"),
    [
        ([0.3], 3, 12, "the device was idle for 30% of 3 eager steps (30% to 30%); "),
        ([0.02, 0.05], 3, 12, "idle for 2% of 3 eager steps (2% to 5%): graphs pay off from 10% on"),
        ([0.7, 0.6], 2, 12, "the device was idle for 60% of 2 eager steps (60% to 70%); "),
        ([0.7, 0.5], 3, 12, "the device was idle for 50% of 3 eager steps (50% to 70%); "),
        ([0.3], 3, 4, "1 steps of 1000 ms are left: recording a row would not be paid back"),
        ([0.5, 0.6, 0.2], 12, 42, "the device was idle for 20% of 12 eager steps (20% to 60%); "),
        ([0.03, 0.03, 0.63], 12, 22, "idle for 3% of 12 eager steps (3% to 63%): graphs pay off from 10% on"),
    ],
    ids=["idle", "busy", "mostly-idle", "mostly-idle-once", "short", "idle-in-most", "busy-but-interrupted"],
)
def test_auto_captures_if_the_device_waits_for_the_host_and_steps_are_left(
    tmp_path: Path, devices: Any, idle: list[float], watched: int, steps: int, said: str
) -> None:
    """Of three steps whose mean is 23% only one was interrupted: more steps are watched, and most of them decide."""
    devices.options["idle"] = idle
    trainer = train(tmp_path, devices, fast={"cuda_graph": "auto"}, max_steps=steps)
    line, log = trainer.fastpack_report["cuda_graph"], devices.made[0].log
    assert said in line.reason, line
    assert log.count("watch") == watched
    assert watched in decision.CLEAR
    assert (line.status, "replay" in log) == (("on", True) if line.path == "captured" else ("off", False))
    assert (line.path == "captured") == said.endswith("; ")


def test_a_slow_step_does_not_make_graphs_pay(tmp_path: Path, devices: Any) -> None:
    """The second step loads the kernels of merged rows: what later steps save is not weighed by its seconds."""
    devices.options |= {"idle": [0.7], "seconds": [9.0, 0.1]}
    line = train(tmp_path, devices, fast={"cuda_graph": "auto"}, max_steps=5).fastpack_report["cuda_graph"]
    assert "3 steps of 100 ms are left: recording a row would not be paid back" in line.reason, line


def test_two_steps_are_over_before_anything_is_recorded(tmp_path: Path, devices: Any) -> None:
    train(tmp_path, devices, max_steps=2)
    assert [entry for entry in devices.made[0].log if entry != "forget"] == ["apart", "together"]


@pytest.mark.parametrize(
    ("memory", "options", "said"),
    [
        ("off", {}, "lora_dropout 0.1 is drawn in the forward and again in a recompute"),
        ("keep", {}, ""),
        ("keep", {"gradient_checkpointing_kwargs": {"use_reentrant": True}}, ""),
        ("off", {"gradient_checkpointing_kwargs": {"use_reentrant": True}}, "use_reentrant=True runs backward in"),
    ],
    ids=["checkpointed", "kept", "kept-reentrant", "reentrant"],
)
def test_what_layers_do_decides(tmp_path: Path, devices: Any, memory: str, options: dict[str, Any], said: str) -> None:
    """A recompute would draw dropout anew; layers that are kept run no backward pass of their own."""
    trainer = train(tmp_path, devices, lora={"lora_dropout": 0.1}, fast={"activation_memory": memory}, **options)
    assert_line(trainer, "cuda_graph", said, path="eager" if said else "captured")


def test_a_loss_of_the_user_runs_eagerly(tmp_path: Path, devices: Any) -> None:
    """It may keep hidden states, which the next replay overwrites, or differentiate twice."""

    class Penalized(FastSFTTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            return loss + 0 * sum(p.square().sum() for p in model.parameters())

    trainer = build(Penalized, tmp_path, devices, fast={"cuda_graph": "auto"}, max_steps=2)
    trainer.train()
    line = trainer.fastpack_report["cuda_graph"]
    assert (line.status, line.path) == ("off", "eager")
    assert line.reason == "compute_loss of Penalized may look into the micro-step"


@pytest.mark.parametrize(
    ("reason", "fast", "options"),
    [
        ("switched off", {"cuda_graph": "off"}, {}),
        ("per_document prepares its layers", {"packed_attention": "per_document"}, {}),
        ("sync_free", {"sync_free": "off"}, {}),
        ("torch_empty_cache_steps=2", {}, {"torch_empty_cache_steps": 2}),
        ("layerdrop: each replay would drop", {}, {"model": tiny_model("qwen3", layerdrop=0.5)}),
        ("NEFTune", {}, {"neftune_noise_alpha": 5.0}),
        ("layer inputs go to host memory", {"activation_memory": "offload"}, {}),
        ("layer inputs go to host", {}, {"gradient_checkpointing_kwargs": {"offload": True}}),
    ],
)
def test_off_with_the_reason(
    tmp_path: Path, devices: Any, reason: str, fast: dict[str, Any], options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from fastpack_trl.features import activation_memory

    if "activation_memory" in fast:
        monkeypatch.setattr(activation_memory, "offload_unavailable", lambda device: "")
    trainer = build(FastSFTTrainer, tmp_path, devices, fast={"cuda_graph": "auto"} | fast, max_steps=1, **options)
    with contextlib.suppress(*([Exception] if "off" in reason or "host" in reason else [])):
        trainer.train()  # some of it needs a device
    assert_line(trainer, "cuda_graph", reason, status="off", path="eager")
    assert not devices.made


@pytest.mark.parametrize(
    ("dtype", "capability", "said"),
    [
        (torch.bfloat16, (9, 0), ""),
        (torch.bfloat16, (10, 3), ""),
        (torch.bfloat16, (12, 0), "bfloat16 read their sizes on the host at compute capability 12.0"),
        (torch.float32, (9, 0), "float32 read their sizes on the host at compute capability 9.0"),
        (torch.float16, (8, 0), "float16 read their sizes on the host at compute capability 8.0"),
    ],
)
def test_experts_are_captured_where_their_products_read_no_sizes(
    tmp_path: Path, devices: Any, dtype: torch.dtype, capability: tuple[int, int], said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    found: list[str] = []

    def ask(*_: Any) -> None:
        with forced_capability(capability), monkeypatch.context() as patch:
            patch.setattr(Run, "device", torch.device("cuda", 0))
            found.append(first_reason(cuda_graph.refusals(trainer.fastpack_run)))

    model = tiny_model("qwen3_moe")
    for module in experts_modules(model).values():
        module.to(dtype)
    asks = callback("on_step_end", ask)()
    trainer = build(FastSFTTrainer, tmp_path, devices, model=model, max_steps=1, callbacks=[asks])
    trainer.train()
    assert found == [said and f"grouped matmuls in {said}"]
