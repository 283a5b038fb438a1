"""The activation plan of a run on images: it counts the tower, and its row is that of `image_row_tokens`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import concatenate_datasets
from out_of_memory import too_large
from side_by_side import assert_equal
from torch.autograd.graph import saved_tensors_hooks
from trainer_material import assert_line, figures
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer
from vision_material import composite, image_data
from vision_runs import differences, run

from fastpack_trl import FastSFTConfig, FastSFTTrainer
from fastpack_trl.checkpointing.plan import Level
from fastpack_trl.checkpointing.tower import kept_by_tower, tower_cost, tower_layers
from fastpack_trl.model.checkpoint_seam import checkpointable_layers
from fastpack_trl.model.facts import backbones
from fastpack_trl.vision.rows import OF_IMAGES, PIXELS


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "idefics3", "mistral3", "llava", "internvl"])
def test_bytes_of_a_tower_are_those_that_autograd_keeps(family: str, tmp_path: Path) -> None:
    model = composite(family)
    trainer = run(FastSFTTrainer, FastSFTConfig, tmp_path, family, model, image_data(family=family), train=False)
    batch = trainer.data_collator([dict(example) for example in image_data(family=family)])
    images = {name: batch[name] for name in OF_IMAGES & batch.keys()}
    weights = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *images.values())}
    saved: dict[int, Any] = {}

    def pack(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        features = backbones(model)[0].get_image_features(**images, return_dict=True)
    whole = sum(storage.nbytes() for storage in saved.values())
    assert features is not None
    kept, checkpointed = kept_by_tower(model, images)
    assert kept == pytest.approx(whole, rel=0.02)
    assert checkpointed < 0.8 * kept
    cost = tower_cost(trainer.fastpack_run)
    assert cost is not None
    for predicted, counted in zip(cost.at(batch[PIXELS].numel()), (kept, checkpointed), strict=True):
        assert 0.95 * counted <= predicted <= 2.5 * counted, "more where images differ in size, which pads pixels"
    model.requires_grad_(False)
    assert kept_by_tower(model, images) == (0, 0)


@pytest.mark.parametrize("place", ["last", "every fourth", "a thirtieth", "last of a stream"])
def test_images_in_a_part_of_the_data_are_found(place: str, tmp_path: Path) -> None:
    """Of a stream nothing but the first examples can be seen without reading it."""
    parts = [image_data(count, family="llava", images=images) for count, images in ((180, 0), (60, 1))]
    data: Any = concatenate_datasets(parts)
    if place == "every fourth":
        data = data.select([index for turn in range(60) for index in (*range(3 * turn, 3 * turn + 3), 180 + turn)])
    if place == "a thirtieth":
        data = data.select([*[0] * 160, *range(180, 213), *[0] * 807])
    streams = place == "last of a stream"
    data = data.to_iterable_dataset() if streams else data
    model = composite("llava")
    trainer = run(FastSFTTrainer, FastSFTConfig, tmp_path, "llava", model, data, train=False, max_steps=1)
    assert (tower_cost(trainer.fastpack_run) is None) == streams


def test_a_plan_counts_the_tower_and_the_row_of_samples(tmp_path: Path) -> None:
    model, data = composite("qwen3_vl", torch.float64), image_data(family="qwen3_vl")
    step = {"max_steps": 1, "per_device_train_batch_size": 8}
    stock = run(SFTTrainer, SFTConfig, tmp_path, "qwen3_vl", model, data, **step)
    planned = {"activation_memory": "checkpoint", "activation_memory_gib": 1.0, "image_row_tokens": 70}
    ours = run(FastSFTTrainer, FastSFTConfig, tmp_path, "qwen3_vl", model, data, **step, **planned)
    assert_line(ours, "activation_memory", "GiB for the tower of images", status="on", path="checkpoint")
    assert_equal(figures(ours), figures(stock), rtol=1e-6, atol=1e-6)
    assert differences(ours, stock) < 3e-6


@pytest.mark.parametrize("rows", ["auto", "off"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3"])
def test_each_step_has_a_plan_for_its_images(family: str, rows: str, tmp_path: Path) -> None:
    """A budget between the needs of the steps: some keep everything, the tower too, and others recompute."""
    data, levels = image_data(family=family), list[tuple[int, bool]]()
    step = {"max_steps": 4, "per_device_train_batch_size": 2}
    stock = run(SFTTrainer, SFTConfig, tmp_path, family, composite(family, torch.float64), data, **step)

    class Levels(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            towers = {each.gradient_checkpointing for each in tower_layers(kwargs["model"])}
            plan = ours.fastpack_run.memory.plan
            kept = [not each.gradient_checkpointing for each in checkpointable_layers(kwargs["model"])]
            assert [level is Level.KEEP for level in plan.levels] == kept
            assert len(towers) == 1
            levels.append((plan.count, towers == {False}))

    def trained(gib: float) -> Any:
        nonlocal ours
        model, fields = composite(family, torch.float64), {"activation_memory_gib": gib, "vision_rows": rows}
        ours = run(FastSFTTrainer, FastSFTConfig, tmp_path, family, model, data, train=False, **step, **fields)
        ours.add_callback(Levels())
        ours.train()
        return ours

    ours: Any = None
    for gib in (1.0, *2.0 ** -np.arange(7.0, 14.0, 0.5)):
        trained(gib)
        assert_line(ours, "activation_memory", "planned again for each step", status="on")
        assert_equal(figures(ours), figures(stock), rtol=1e-4, atol=1e-5)
        assert differences(ours, stock) < 1e-4  # TRL sums the head in fp32
        per_run = [set(levels[at : at + 4]) for at in range(0, len(levels), 4)]
        if {(2, True), (2, False), (0, False)} <= set(levels) and max(map(len, per_run)) > 1:
            return
    pytest.fail(f"layers kept, and whether the tower is, in the steps of each run: {per_run}")


@pytest.mark.parametrize("level", ["keep", "checkpoint"])
def test_levels_that_are_asked_for_need_no_row_length(level: str, tmp_path: Path) -> None:
    seen = list[bool]()

    class Layers(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            layers = (*tower_layers(kwargs["model"]), *checkpointable_layers(kwargs["model"]))
            seen.extend(each.gradient_checkpointing for each in layers)

    options = {"max_steps": 1, "activation_memory": level, "callbacks": [Layers()]}
    run(FastSFTTrainer, FastSFTConfig, tmp_path, "llava", composite("llava"), image_data(family="llava"), **options)
    assert set(seen) == {level == "checkpoint"}


def test_steps_after_an_out_of_memory_are_planned_with_less(tmp_path: Path) -> None:
    data, budgets = image_data(family="llava"), list[int]()

    class Budgets(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            budgets.append(ours.fastpack_run.memory.plan.budget)

    options = {"max_steps": 5, "activation_memory_gib": 1.0, "callbacks": [Budgets()], "train": False}
    ours = run(FastSFTTrainer, FastSFTConfig, tmp_path, "llava", composite("llava"), data, **options)
    with too_large(ours, "forward", 1) as calls:
        ours.train()
    assert len(calls) == 1
    assert "it was run again with less" in ours.fastpack_report["activation_memory"].reason
    assert budgets[-1] < 0.01 * budgets[0], "relative to what the step was predicted to need, not to what is free"


@pytest.mark.parametrize("level", ["auto", "keep"])
def test_a_size_that_runs_out_of_memory_does_so_once(level: str, tmp_path: Path) -> None:
    """A device that has no room for all layers at once, however much was free before the run."""
    data = image_data(family="llava").select([3] * 8)
    options = {"max_steps": 6, "activation_memory_gib": 1.0, "activation_memory": level, "train": False}
    ours = run(FastSFTTrainer, FastSFTConfig, tmp_path, "llava", composite("llava"), data, **options)
    last, full = checkpointable_layers(ours.model)[-1], list[int]()

    def forward(*args: Any, **kwargs: Any) -> Any:
        memory = ours.fastpack_run.memory
        if memory is not None and last.training and torch.is_grad_enabled() and memory.plan.keeps_all:
            full.append(ours.state.global_step)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return type(last).forward(last, *args, **kwargs)

    last.forward = forward
    ours.train()
    assert full == [0]


def test_counting_draws_no_numbers_of_a_data_sets_transform(tmp_path: Path) -> None:
    drawn = list[list[float]]()
    for more in ({"activation_memory": "off"}, {"activation_memory_gib": 1.0}):
        numbers = list[float]()

        def transform(rows: dict[str, Any], numbers: list[float] = numbers) -> dict[str, Any]:
            numbers.append(float(np.random.random()))  # noqa: NPY002 - as transforms do
            return rows

        data = image_data(family="llava")
        options = {"max_steps": 2, "train": False, **more}
        trainer = run(FastSFTTrainer, FastSFTConfig, tmp_path, "llava", composite("llava"), data, **options)
        np.random.seed(0)  # noqa: NPY002
        trainer.train_dataset = trainer.train_dataset.with_transform(transform)
        trainer.train()
        drawn.append(numbers)
    assert len(drawn[1]) > len(drawn[0])
    assert drawn[1][-8:] == drawn[0][-8:]


def test_a_towers_layer_with_a_users_hook_inside_is_recomputed_as_under_trl(tmp_path: Path) -> None:
    calls = {}
    for cls, config, more in (
        (SFTTrainer, SFTConfig, {}),
        (FastSFTTrainer, FastSFTConfig, {"activation_memory_gib": 1.0}),
    ):
        options = {"max_steps": 1, "train": False, **more}
        trainer = run(cls, config, tmp_path, "llava", composite("llava"), image_data(family="llava"), **options)
        seen = calls[cls] = list[bool]()
        inner = next(tower_layers(trainer.model)[0].children())
        inner.register_forward_pre_hook(lambda module, *_, seen=seen: seen.append(module.training))
        trainer.train()
    assert [*calls.values()] == [[True, True]] * 2, "forward and recompute"
    assert_line(trainer, "activation_memory", status="on", path="keep")
