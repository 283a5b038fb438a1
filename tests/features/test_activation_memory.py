"""The plan in a run: what the user sets is respected, no bit changes, and a step too large is run again with less."""

from __future__ import annotations

import contextlib
import re
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from model_material import vision_model
from offload_material import LAYERS
from out_of_memory import too_large
from torch import Tensor
from trainer_material import assert_line, build, callback, figures, make_dataset, train
from trl import SFTTrainer
from trl.models.utils import unwrap_model_for_generation

from fastpack_trl import FastSFTTrainer
from fastpack_trl.checkpointing import budget
from fastpack_trl.checkpointing import planned as memory
from fastpack_trl.checkpointing.budget import HEAD_BYTES, largest_row
from fastpack_trl.checkpointing.plan import Plan
from fastpack_trl.checkpointing.streams import Streams
from fastpack_trl.features.activation_memory import plan_memory
from fastpack_trl.model.checkpoint_seam import checkpointable_layers
from fastpack_trl.testing import tiny_model

OURS = ("activation_memory", "activation_memory_gib", "checkpoint_offload", "merge_accumulation")


def fast(folder: Path, **more: Any) -> Any:
    own = {name: more.pop(name) for name in OURS if name in more}
    options = {"gradient_accumulation_steps": 2, "max_steps": 3, "model": llama(), **more}
    return build(FastSFTTrainer, folder, fast=own, **options)


def llama(**more: Any) -> Any:
    return tiny_model("llama", num_hidden_layers=LAYERS, **more)


def test_an_unchanged_sft_config_is_planned_as_ours_with_its_defaults(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 4, "packing": True, "max_length": 48, "eval_strategy": "no"}
    plans = []
    for fast in (None, {"save_report": "on"}):  # an `SFTConfig`; ours
        trainer = build(FastSFTTrainer, tmp_path, model=llama(), fast=fast, **options)
        with ExitStack() as stack:
            planned: Any = plan_memory(trainer.fastpack_run, stack)
        plans.append((largest_row(trainer.fastpack_run, merges=True)[0], planned.plan.levels, planned.plan.predicted))
    assert plans[0][0] == 4 * 4 * 48  # the row that `merge_accumulation` may make of four micro-batches of four
    assert plans[0] == plans[1]
    data = make_dataset("tokens")
    options |= {"packing": False, "max_length": 90}
    trainer = build(FastSFTTrainer, tmp_path, model=llama(), data=data, **options)
    longest = max(map(len, data["input_ids"]))
    assert largest_row(trainer.fastpack_run, merges=True) == (4 * 4 * longest, longest)


def test_a_row_takes_what_the_plan_says_of_its_size_with_the_layers_as_they_are(tmp_path: Path) -> None:
    trainer = fast(tmp_path)
    run = trainer.fastpack_run
    layers, costs, tokens = checkpointable_layers(run.model), memory.count_layers(run), 512
    plan = Plan.keeping_all(costs, tokens, 64, 0, 0)
    sizes = []
    for checkpoints, expected in ((False, plan), (True, plan.last_kept(0))):
        for layer in layers:
            layer.gradient_checkpointing = checkpoints
        sizes.append(memory.row_bytes(run, costs, tokens, 64))
        assert sizes[-1] == expected.predicted + tokens * 32 * HEAD_BYTES
    assert sizes[1] < sizes[0] / 2


def test_more_stays_free_if_a_step_out_of_memory_cannot_rerun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = fast(tmp_path)
    run = trainer.fastpack_run
    monkeypatch.setattr(budget, "free_bytes", lambda device: 10**12)
    retried = budget.budget_bytes(run, None, pytest.fail)
    for change in ("kind", "count"):  # another trainer; several processes
        with monkeypatch.context() as patch:
            if change == "count":
                patch.setattr(run.ranks, "count", 2)
            else:
                patch.setattr(run, change, "pairs")
            assert budget.budget_bytes(run, None, pytest.fail) == pytest.approx(retried * 8 / 9, rel=1e-6)
    # What gradients and two moments will take, as long as they are not there.
    found, size = [retried], sum(p.nbytes for p in run.model.parameters())
    for act in (lambda: run.model(torch.ones(1, 3, dtype=int)).logits.sum().backward(), trainer.create_optimizer):
        act()
        found.append(budget.budget_bytes(run, None, pytest.fail))
    trainer.optimizer.step()
    found.append(budget.budget_bytes(run, None, pytest.fail))
    assert found == [int((10**12 - times * size) * budget.MARGIN) for times in (3, 2, 2, 0)]
    monkeypatch.setattr(type(run), "is_fsdp2", True)  # gradients of a step of several micro-batches are whole
    for run.args.gradient_accumulation_steps in (2, 1):
        found.append(budget.budget_bytes(run, None, pytest.fail))
    assert found[-2:] == [int((10**12 - times * size) * budget.MARGIN) for times in (1, 0)]


def trained(trainer: FastSFTTrainer) -> tuple[Any, list[Tensor]]:
    trainer.train()
    return figures(trainer), [p.detach().clone() for p in trainer.model.parameters()]


def same(ours: tuple[Any, list[Tensor]], stock: tuple[Any, list[Tensor]]) -> bool:
    return ours[0] == stock[0] and all(torch.equal(a, b) for a, b in zip(ours[1], stock[1], strict=True))


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Tensor]]:
    """The default run without a plan."""
    return trained(fast(tmp_path_factory.mktemp("stock"), activation_memory="off"))


@pytest.mark.parametrize(
    ("own", "path", "said"),
    [
        ({}, "stock", "activation_memory_gib=... plans for a budget"),
        ({"activation_memory_gib": 1.0}, "keep", r"predicted [\d.]+ GiB of 1.00 GiB$"),
        ({"activation_memory_gib": 1e-4}, "checkpoint", r"predicted [\d.]+ GiB over the .*nothing fits"),
        ({"activation_memory_gib": 1e9}, "keep", "is more than the"),
        ({"activation_memory": "keep"}, "keep", f"^keep 0-{LAYERS - 1}; predicted"),
        ({"activation_memory": "checkpoint"}, "checkpoint", f"^checkpoint 0-{LAYERS - 1}; predicted"),
    ],
    ids=str,
)
def test_a_plan_on_a_cpu_changes_no_bit(tmp_path: Path, stock: Any, own: dict[str, Any], path: str, said: str) -> None:
    trainer = fast(tmp_path, **own)
    assert same(trained(trainer), stock)
    line = trainer.fastpack_report["activation_memory"]
    assert (line.status, line.path) == ("on" if own else "off", path), line
    assert re.search(said, line.reason)
    assert all(layer.gradient_checkpointing for layer in checkpointable_layers(trainer.model))


@pytest.mark.usefixtures("offloads")
@pytest.mark.parametrize(("family", "level"), [("qwen3_vl", "keep"), ("internvl", "offload"), ("qwen2_audio", "keep")])
def test_beside_a_tower_the_layers_of_the_decoder_are_planned(tmp_path: Path, family: str, level: str) -> None:
    """The tower's layers stay as `gradient_checkpointing` sets them."""
    runs, seen = [], list[int]()
    for setting in ("off", level):
        trainer = fast(tmp_path, model=vision_model(family), activation_memory=setting, eval_strategy="no")
        flagged = [m for m in trainer.model.modules() if getattr(m, "gradient_checkpointing", None) is not None]
        look = callback("on_substep_end", lambda *_, of=flagged: seen.append(sum(m.gradient_checkpointing for m in of)))
        trainer.add_callback(look())
        runs.append(trained(trainer))
    assert same(*runs)
    assert_line(trainer, "activation_memory", "0-1", status="on", path="keep" if level == "keep" else "offload")
    decoder = checkpointable_layers(trainer.model)
    assert seen == [len(flagged)] * 3 + [len(flagged) - len(decoder) * (level == "keep")] * 3
    assert all(layer.gradient_checkpointing and not hasattr(layer, "_fastpack_checkpoint") for layer in decoder)


EXCLUDED: dict[str, dict[str, Any]] = {
    "gradient_checkpointing=False": {"gradient_checkpointing": False},
    "gradient_checkpointing_kwargs": {"gradient_checkpointing_kwargs": {"every_n_layers": 2}},
    "checkpoint_offload='double_buffer'": {"checkpoint_offload": "double_buffer"},
    "max_length=None": {"max_length": None},
}


@pytest.mark.parametrize("message", EXCLUDED)
def test_what_the_user_says_is_respected_by_auto(tmp_path: Path, message: str) -> None:
    trainer = fast(tmp_path, activation_memory_gib=1.0, max_steps=1, eval_strategy="no", **EXCLUDED[message])
    if "max_length" in message:  # rows of any length
        trainer.fastpack_run.facts = None
    trainer.train()
    assert message in trainer.fastpack_report["activation_memory"].reason


def test_generation_between_steps_leaves_the_plan(tmp_path: Path) -> None:
    """TRL's helper, as `LogCompletionsCallback` uses it, switches checkpointing on for every layer."""
    seen = []

    def generate(state: Any, model: Any) -> None:
        with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as unwrapped, torch.no_grad():
            unwrapped.eval().generate(input_ids=torch.tensor([[5, 6, 7]]), max_new_tokens=2)
        model.train()

    def look(state: Any, model: Any) -> None:
        seen.append([layer.gradient_checkpointing for layer in checkpointable_layers(model)])

    trainer = fast(tmp_path, activation_memory="keep", gradient_checkpointing=True)
    for event, act in (("on_step_end", generate), ("on_substep_end", look)):
        trainer.add_callback(callback(event, act)())
    trainer.train()
    assert seen == [[False] * LAYERS] * 3


@pytest.mark.parametrize("checkpointing", [False, True])
def test_model_without_checkpointing_trains_or_stops_as_stock(tmp_path: Path, checkpointing: bool) -> None:
    refused = pytest.raises(ValueError, match=r"does not support (activation|gradient) checkpointing")
    for cls, more in ((SFTTrainer, {}), (FastSFTTrainer, {"fast": {"activation_memory_gib": 0.001}})):
        model = tiny_model("qwen3")
        model.supports_gradient_checkpointing = False
        options = {"model": model, "gradient_checkpointing": checkpointing, "eval_strategy": "no", "max_steps": 1}
        with refused if checkpointing else contextlib.nullcontext():
            assert train(cls, tmp_path, **options, **more).state.global_step == 1


def with_dropout(folder: Path, level: str = "keep", **own: Any) -> FastSFTTrainer:
    model = llama(attention_dropout=0.1, attn_implementation="eager")
    return fast(folder, model=model, activation_memory=level, eval_strategy="no", merge_accumulation="off", **own)


@pytest.fixture(scope="module")
def stock_with_dropout(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[Tensor]]:
    return trained(with_dropout(tmp_path_factory.mktemp("stock")))


@pytest.mark.usefixtures("offloads")
@pytest.mark.parametrize(("place", "times"), [("forward", 1), ("backward", 1), ("backward", 2)])
def test_a_step_out_of_memory_is_run_again_with_less_and_changes_no_bit(
    tmp_path: Path, stock_with_dropout: Any, place: str, times: int, caplog: Any
) -> None:
    trainer = with_dropout(tmp_path)
    with too_large(trainer, place, times) as calls:
        ours = trained(trainer)
    assert len(calls) == times
    assert same(ours, stock_with_dropout)
    line = trainer.fastpack_report["activation_memory"]
    assert "it was run again with less" in line.reason
    assert line.path != "keep"
    assert sum("ran out of memory" in text for text in caplog.messages) == 1
    assert all("offload" not in layer.__dict__ for layer in checkpointable_layers(trainer.model))


@pytest.mark.usefixtures("offloads")
@pytest.mark.parametrize("copy", ["out", "back"])
def test_an_offload_that_runs_out_of_memory_is_run_again_and_changes_no_bit(
    tmp_path: Path, stock_with_dropout: Any, copy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = {"out": "copy", "back": "device_memory"}[copy]
    moved, calls = getattr(Streams, name), count()

    def full(*args: Any) -> Any:
        if next(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return moved(*args)

    monkeypatch.setattr(Streams, name, full)
    trainer = with_dropout(tmp_path, "offload", checkpoint_offload="single_buffer")
    assert same(trained(trainer), stock_with_dropout)
    assert next(calls) > 2


def test_a_step_that_fits_at_no_level_raises_the_devices_error(tmp_path: Path) -> None:
    trainer = fast(tmp_path, activation_memory="checkpoint", eval_strategy="no")
    with too_large(trainer, "forward", 100), pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
        trainer.train()
    assert trainer.fastpack_run.memory is None
    assert trainer.args.gradient_checkpointing
