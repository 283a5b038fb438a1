"""Captured micro-steps: which rows are recorded and replayed, what they add, what drops them; replays by the host."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from replayed_graphs import AgainDevice
from trainer_material import assert_same_log, figures, make_dataset, make_tokenizer, settings
from transformers import TrainerCallback
from trl import SFTTrainer

from fastpack_trl import FastSFTConfig, FastSFTTrainer, ThroughputCallback
from fastpack_trl.attention.varlen import Varlen
from fastpack_trl.packing.buckets import RowSize
from fastpack_trl.step import capture, cuda_graph
from fastpack_trl.step.capture import StepGraphs
from fastpack_trl.step.row_buckets import RowBuckets
from fastpack_trl.testing import tiny_model

STEPS = 8
CAPTURED: dict[str, Any] = {"packed_attention": "varlen", "cuda_graph": "on"}


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Let runs on the CPU be captured, with attention's twin; return their devices, and let a test set up the next."""
    made: list[AgainDevice] = []
    pending: dict[str, Any] = {}

    def make(_device: torch.device) -> AgainDevice:
        made.append(AgainDevice(**pending))
        return made[-1]

    monkeypatch.setattr(Varlen, "refuses", lambda self, features: "")
    monkeypatch.setattr(cuda_graph, "unavailable", lambda device: "")
    monkeypatch.setattr(cuda_graph, "CudaGraphs", make)
    return SimpleNamespace(made=made, options=pending)


def build(
    cls: type[SFTTrainer], folder: Path, devices: Any, *, family: str = "qwen3", lora: bool = False, data: Any = "text",
    fast: dict[str, Any] | None = None, callbacks: Any = (), model: Any = None, **more: Any,
) -> Any:  # fmt: skip
    options = {"packing": True, "max_steps": STEPS, "eval_strategy": "no", **more}
    args = settings(folder, **options)
    model = tiny_model(family) if model is None else model
    trainer = cls(
        model,
        args=FastSFTConfig(**args, **(CAPTURED | (fast or {}))),
        train_dataset=make_dataset(data) if isinstance(data, str) else data,
        eval_dataset=make_dataset("text", 8, seed=7),
        processing_class=make_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules="all-linear") if lora else None,
        callbacks=list(callbacks),
    )
    if issubclass(cls, FastSFTTrainer):
        devices.options["model"] = trainer.model
    return trainer


def both(folder: Path, devices: Any, **options: Any) -> tuple[Any, Any]:
    """The same run captured, and not."""
    ours = build(FastSFTTrainer, folder / "ours", devices, **options)
    ours.train()
    fast = {**(options.pop("fast", None) or {}), "cuda_graph": "off"}
    eager = build(FastSFTTrainer, folder / "eager", devices, fast=fast, **options)
    eager.train()
    return ours, eager


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters() if p.requires_grad}


def assert_same_run(ours: Any, eager: Any, rtol: float = 2e-5, atol: float = 2e-5) -> None:
    assert_same_log(ours, eager, rtol=rtol, atol=atol)
    expected = weights(eager)
    for name, weight in weights(ours).items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-3, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_moe", "gpt_oss"])
def test_a_captured_run_trains_as_an_eager_one(tmp_path: Path, devices: Any, family: str, lora: bool) -> None:
    ours, eager = both(tmp_path, devices, family=family, lora=lora)
    (device,) = devices.made
    assert device.log.count("record") >= 1
    assert device.log.count("replay") >= STEPS - capture.EAGER_STEPS - 2 * capture.WARM_ROWS - 1, device.log
    assert (device.log[0], device.log[-2:]) == ("apart", ["together", "reset"]) or device.log[-1] == "reset"
    assert_same_run(ours, eager)
    line = ours.fastpack_report["cuda_graph"]
    assert (line.status, line.path) == ("on", "captured")
    assert "3.00 GiB" in line.reason
    assert "of rows fit" in line.reason


@pytest.mark.parametrize("merged", ["off", "on"])
def test_accumulation_is_several_replays_or_one_of_a_merged_row(tmp_path: Path, devices: Any, merged: str) -> None:
    options = {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 2, "max_steps": 12}
    ours, eager = both(tmp_path, devices, fast={"merge_accumulation": merged}, **options)
    replays = devices.made[0].log.count("replay")
    assert replays >= (5 if merged == "on" else 3 * 5)
    assert_same_run(ours, eager)


def test_data_of_which_few_tokens_count_has_loss_buckets(tmp_path: Path, devices: Any) -> None:
    ours, eager = both(tmp_path, devices, data="prompt_completion", max_steps=12)
    assert devices.made[0].log.count("replay") >= 3
    assert_same_run(ours, eager)


def test_evaluation_and_figures_of_throughput_between_replays_are_those_of_eager_steps(
    tmp_path: Path, devices: Any
) -> None:
    class Rates(ThroughputCallback):
        def _figures(self, totals: Any) -> dict[str, float]:
            tokens = totals.tokens
            return {"capacity": tokens.capacity, "nonpad": tokens.nonpad, "counted": tokens.loss}

    logs = []
    for number, setting in enumerate(("on", "off")):
        trainer = build(
            FastSFTTrainer, tmp_path / str(number), devices, fast={"cuda_graph": setting}, callbacks=[Rates()],
            eval_strategy="steps", eval_steps=2,
        )  # fmt: skip
        trainer.train()
        logs.append(trainer)
    assert devices.made[0].log.count("replay") >= 2
    assert_same_run(*logs)
    ours, eager = ([row.get("nonpad") for row in figures(trainer)] for trainer in logs)
    assert ours == eager
    assert any(count for count in ours)


class At(TrainerCallback):
    """Does something once, at the beginning of a step."""

    def __init__(self, step: int, act: Callable[..., None]) -> None:
        self.step, self.act = step, act

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.act(**kwargs)


def freeze(model: Any, **_: Any) -> None:
    for parameter in model.get_decoder().layers[0].parameters():
        parameter.requires_grad_(False)


def swap_data(model: Any, **_: Any) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def evaluate_mode(model: Any, **_: Any) -> None:
    model.eval()


def generate(model: Any, **_: Any) -> None:
    model.eval()
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)


def merge(model: Any, **_: Any) -> None:
    model.merge_adapter()
    model.unmerge_adapter()


def disable(model: Any, **_: Any) -> None:
    model.base_model.disable_adapter_layers()
    model.base_model.enable_adapter_layers()


def raise_the_rate(optimizer: Any, **_: Any) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 5e-3


@pytest.mark.parametrize("act", [freeze, swap_data, evaluate_mode, generate, raise_the_rate])
def test_what_a_callback_does_in_the_middle_counts_from_then_on(tmp_path: Path, devices: Any, act: Any) -> None:
    runs = []
    for setting in ("on", "off"):
        trainer = build(
            FastSFTTrainer, tmp_path / setting, devices, fast={"cuda_graph": setting}, callbacks=[At(7, act)],
            max_steps=14, max_grad_norm=0.0, weight_decay=0.1,
        )  # fmt: skip
        trainer.train()
        runs.append(trainer)
    log = devices.made[0].log
    assert "replay" in log
    dropped = log.index("reset") < log.index("together")
    assert dropped == (act in (freeze, swap_data)), log
    assert_same_run(*runs)


@pytest.mark.parametrize("act", [merge, disable])
def test_adapters_may_be_merged_and_switched_off_in_the_middle(tmp_path: Path, devices: Any, act: Any) -> None:
    runs = []
    for setting in ("on", "off"):
        trainer = build(
            FastSFTTrainer, tmp_path / setting, devices, fast={"cuda_graph": setting}, callbacks=[At(7, act)],
            max_steps=12, lora=True,
        )  # fmt: skip
        trainer.train()
        runs.append(trainer)
    assert devices.made[0].log.count("replay") >= 4
    assert_same_run(*runs)


def test_a_model_that_changes_again_and_again_runs_eager(tmp_path: Path, devices: Any) -> None:
    class Swapping(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            if state.global_step > 5 and state.global_step % 4 == 0:
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()

    trainer = build(FastSFTTrainer, tmp_path, devices, callbacks=[Swapping()], max_steps=60)
    trainer.train()
    line = trainer.fastpack_report["cuda_graph"]
    assert (line.status, line.path) == ("off", "eager")
    assert "again and again" in line.reason
    assert devices.made[0].log.count("record") > capture.MOST_CHANGES


def test_hooks_that_came_end_it_and_see_every_row(tmp_path: Path, devices: Any) -> None:
    seen: list[int] = []

    def hooked(model: Any, **_: Any) -> None:
        model.get_decoder().layers[0].register_forward_hook(lambda *_: seen.append(1))

    trainer = build(FastSFTTrainer, tmp_path, devices, callbacks=[At(6, hooked)], max_steps=9)
    trainer.train()
    assert len(seen) == 3
    reason = trainer.fastpack_report["cuda_graph"].reason
    assert "forward hook" in reason
    assert "does not run in a replay" in reason


def test_gradients_are_as_in_stock_between_steps(tmp_path: Path, devices: Any) -> None:
    """None after `zero_grad`; a parameter that no loss reaches never gets one, which AdamW would take for zeros."""
    seen: list[tuple[bool, bool]] = []

    class Looks(TrainerCallback):
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            seen.append((model.unused.grad is None, all(p.grad is not None for p in model.model.parameters())))

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            assert all(p.grad is None for p in model.parameters())

    model = tiny_model("qwen3")
    model.unused = torch.nn.Parameter(torch.ones(3))
    trainer = build(FastSFTTrainer, tmp_path, devices, callbacks=[Looks()], model=model, weight_decay=0.1)
    trainer.train()
    assert devices.made[0].log.count("replay") >= 2
    assert seen == [(True, True)] * STEPS
    assert torch.equal(model.unused, torch.ones(3))


def test_a_nan_in_a_replay_is_filtered_from_the_log_as_in_an_eager_step(tmp_path: Path, devices: Any) -> None:
    def poison(results: tuple[torch.Tensor, ...]) -> None:
        if devices.made[0].log.count("replay") == 2:
            for result in results:
                result.fill_(math.nan)

    devices.options["after_replay"] = poison
    trainer = build(FastSFTTrainer, tmp_path, devices)
    trainer.train()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses) == STEPS
    assert not any(map(math.isnan, losses))
    entropies = [row["entropy"] for row in trainer.state.log_history if "entropy" in row]
    assert sum(map(math.isnan, entropies)) == 1


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB"), "no memory for the graph"),
        (
            RuntimeError("operation not permitted when stream is capturing"),
            "cannot be recorded: operation not permitted",
        ),
    ],
    ids=["memory", "refused"],
)
def test_what_cannot_be_recorded_runs_eager_named_once(
    tmp_path: Path, devices: Any, error: Exception, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    devices.options["fail"] = lambda number: error
    ours = build(FastSFTTrainer, tmp_path / "ours", devices)
    ours.train()
    assert "replay" not in devices.made[0].log
    line = ours.fastpack_report["cuda_graph"]
    assert (line.status, line.path, said in line.reason) == ("off", "eager", True), line
    assert sum("cuda_graph: eager from here on" in text for text in caplog.messages) == 1
    eager = build(FastSFTTrainer, tmp_path / "eager", devices, fast={"cuda_graph": "off"})
    eager.train()
    assert_same_run(ours, eager)


class Clock(TrainerCallback):
    """Time of the device passes with each step: so much where it ran eager, so much where it was replayed."""

    def __init__(self, devices: Any, eager: float, captured: float) -> None:
        self.devices, self.eager, self.captured = devices, eager, captured

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        device = self.devices.made[-1]
        device.now += self.captured if "replay" in device.log else self.eager


def test_auto_keeps_graphs_that_make_steps_shorter(tmp_path: Path, devices: Any) -> None:
    devices.options["late"] = 2
    trainer = build(
        FastSFTTrainer, tmp_path, devices, fast={"cuda_graph": "auto"}, max_steps=40,
        callbacks=[Clock(devices, 0.5, 0.2)],
    )  # fmt: skip
    trainer.train()
    reason = trainer.fastpack_report["cuda_graph"].reason
    assert "steps of 500.0 ms eager, 200.0 ms captured" in reason
    assert devices.made[0].log.count("replay") > 20


@pytest.mark.parametrize(
    ("times", "steps", "said"),
    [
        ((0.5, 0.49), 40, "graphs save less than 5% of a step: steps of 500.0 ms eager, 490.0 ms captured"),
        ((0.01, 0.001), 20, "steps of 10 ms are left: recording would not be paid back"),
    ],
    ids=["busy", "short"],
)
def test_auto_gives_up_what_gains_nothing(
    tmp_path: Path, devices: Any, times: tuple[float, float], steps: int, said: str
) -> None:
    trainer = build(
        FastSFTTrainer, tmp_path, devices, fast={"cuda_graph": "auto"}, max_steps=steps,
        callbacks=[Clock(devices, *times)],
    )  # fmt: skip
    trainer.train()
    line = trainer.fastpack_report["cuda_graph"]
    assert (line.status, said in line.reason) == ("off", True), line


def test_an_exception_between_replays_leaves_the_model_as_it_was(tmp_path: Path, devices: Any) -> None:
    def stop(**_: Any) -> None:
        raise KeyboardInterrupt

    trainer = build(FastSFTTrainer, tmp_path, devices, callbacks=[At(7, stop)])
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    log = devices.made[0].log
    assert log.count("reset") == log.count("record") == 1
    assert trainer.fastpack_run.part(StepGraphs) is None
    assert not trainer.fastpack_run.spares
    trainer.remove_callback(At)
    trainer.train()
    assert len(devices.made) == 2


def test_two_trainers_have_their_own_graphs(tmp_path: Path, devices: Any) -> None:
    first = build(FastSFTTrainer, tmp_path / "a", devices)

    def another(**_: Any) -> None:
        build(FastSFTTrainer, tmp_path / "b", devices).train()
        devices.options["model"] = first.model

    first.add_callback(At(6, another))
    first.train()
    assert [device.log.count("record") for device in devices.made] == [1, 1]
    assert devices.made[0].log.count("replay") >= 2


def test_three_steps_are_over_before_anything_is_recorded(tmp_path: Path, devices: Any) -> None:
    trainer = build(FastSFTTrainer, tmp_path, devices, max_steps=3)
    trainer.train()
    assert devices.made[0].log == ["apart", "together"]


def test_edited_rows_run_as_they_are(tmp_path: Path, devices: Any) -> None:
    class Edits(FastSFTTrainer):
        def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
            batches, count = super().get_batch_samples(*args, **kwargs)
            if self.state.global_step % 2:
                for batch in batches:
                    batch["labels"][:, 3] = -100
            return batches, count

    runs = []
    for setting in ("on", "off"):
        trainer = build(Edits, tmp_path / setting, devices, fast={"cuda_graph": setting}, max_steps=14)
        trainer.train()
        runs.append(trainer)
    assert_same_run(*runs)


def test_rows_of_other_sizes_get_other_buckets(tmp_path: Path, devices: Any) -> None:
    trainer = build(FastSFTTrainer, tmp_path, devices)
    buckets = RowBuckets(trainer.fastpack_run)
    usual = RowSize(tokens=160, segments=9, max_seqlen=30, loss_tokens=150, parts=1)
    first = buckets.find(usual)
    assert first is not None
    assert first.holds(usual)
    other = usual._replace(tokens=500, loss_tokens=480, segments=30)
    for _ in range(64):
        assert buckets.find(other) is None
        assert not buckets.are_outgrown() or buckets.choice is None
        if buckets.choice is None:
            break
    assert buckets.choice is None
    found = buckets.find(other)
    assert found is not None
    assert found.holds(other)


@pytest.mark.parametrize(
    ("reason", "fast", "options"),
    [
        ("switched off", {"cuda_graph": "off"}, {}),
        ("per_document makes what its layers read", {"packed_attention": "per_document"}, {}),
        ("sync_free", {"sync_free": "off"}, {}),
        ("torch_empty_cache_steps=2", {}, {"torch_empty_cache_steps": 2}),
        ("NEFTune", {}, {"neftune_noise_alpha": 5.0}),
        ("layer inputs go to host memory", {"activation_memory": "offload"}, {}),
    ],
)
def test_off_with_the_reason(
    tmp_path: Path, devices: Any, reason: str, fast: dict[str, Any], options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from fastpack_trl.checkpointing import memory

    if "activation_memory" in fast:
        monkeypatch.setattr(memory, "offload_unavailable", lambda device: "")
    trainer = build(FastSFTTrainer, tmp_path, devices, fast=fast, max_steps=1, **options)
    try:
        trainer.train()
    except Exception:
        if "activation_memory" not in fast:  # there is no device to offload from
            raise
    line = trainer.fastpack_report["cuda_graph"]
    assert (line.status, line.path) == ("off", "eager")
    assert reason in line.reason
    assert not devices.made
