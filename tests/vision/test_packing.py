"""Rows across a data set of images: TRL's results on the same samples, exact lengths, two limits, one cached pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from datasets.fingerprint import Hasher
from side_by_side import assert_equal
from trainer_material import assert_line, figures, sentences
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer
from vision_material import composite, image_data, processor
from vision_runs import differences, run

from fastpack_trl import FastSFTConfig, FastSFTTrainer
from fastpack_trl.model.upstream import DataCollatorForVisionLanguageModeling
from fastpack_trl.vision.packing import Samples, counting, fit, pack_samples
from fastpack_trl.vision.rows import FAMILIES, smallest_with_image

PACKED = {"image_row_tokens": 70, "per_device_train_batch_size": 8}


@pytest.mark.usefixtures("exact_scan")
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_packed_rows_learn_as_the_padded_batch_of_their_samples(family: str, tmp_path: Path) -> None:
    model, data = composite(family, torch.float64), image_data(family=family)
    ours = run(FastSFTTrainer, FastSFTConfig, tmp_path, family, model, data, max_steps=1, **PACKED)
    assert_line(ours, "vision_rows", path="rows of up to 70 tokens")
    packed = pack_samples(data, ours.data_collator, 70)
    kept = data.select(sorted(sample for row in packed.rows for sample in row))
    assert len(kept) + len(packed.left_out) == 8
    if packed.left_out:
        assert f"rows {packed.left_out[0]}" in ours.fastpack_report.facts["image rows"]
    for row, samples in zip(packed.rows, Samples(data, packed.rows), strict=True):
        assert len(row) == len(samples)
        assert ours.data_collator([dict(each) for each in samples])["attention_mask"].sum() <= 70
    stock = run(SFTTrainer, SFTConfig, tmp_path, family, model, kept, max_steps=1, per_device_train_batch_size=8)
    assert_equal(figures(ours), figures(stock), rtol=1e-6, atol=1e-6)
    assert differences(ours, stock) < 3e-6


def test_rows_keep_both_limits_and_fit_as_well_as_sorted_samples_can() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        tokens, pixels = random.integers(1, 40, 60), random.integers(0, 10, 60)
        rows = fit(tokens, pixels, 30, 25)
        assert sorted(sample for row in rows for sample in row) == np.flatnonzero(tokens <= 30).tolist()
        assert all(tokens[row].sum() <= 30 and pixels[row].sum() <= 25 for row in rows)
        free = fit(tokens, 0 * pixels, 30, 0)
        assert len(free) <= 1.25 * tokens[tokens <= 30].sum() / 30 + 1 <= 1.25 * len(rows) + 1


def test_samples_of_a_transform_are_counted_as_it_makes_them(tmp_path: Path) -> None:
    def longer(batch: dict[str, Any]) -> dict[str, Any]:
        return batch | {"prompt": [f"{prompt} w1 w2 w3" for prompt in batch["prompt"]]}

    model, data = composite("llava", torch.float64), image_data(family="llava")
    made = Dataset.from_list([longer({k: [v] for k, v in each.items()}) for each in data])
    made = made.map(lambda each: {name: value[0] for name, value in each.items()}, features=data.features)
    results = [
        run(FastSFTTrainer, FastSFTConfig, tmp_path, "llava", model, each, max_steps=1, **PACKED)
        for each in (data.with_transform(longer), made)
    ]
    assert_line(results[0], "vision_rows", path="rows of up to 70 tokens")
    assert_equal(figures(results[0]), figures(results[1]), rtol=0, atol=0)


def test_the_image_of_a_rank_without_one_is_a_small_one_of_the_kept_samples() -> None:
    data = image_data(family="llava")
    stock = DataCollatorForVisionLanguageModeling(processor("llava"), max_length=8, completion_only_loss=True)
    counts = [counting(stock)(dict(each), k)["tokens"] for k, each in enumerate(data)]
    shown = [k for k, each in enumerate(data) if each["images"]]
    found = smallest_with_image(data, stock)
    assert found is not None
    assert found["prompt"] == data[min(shown, key=counts.__getitem__)]["prompt"]
    assert smallest_with_image(image_data(3, images=0), stock) is None


class Stop(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 2


def test_a_run_resumes_at_its_row_as_trls_does(tmp_path: Path) -> None:
    model, data = composite("qwen3_vl"), image_data(16, family="qwen3_vl")
    fields = {"per_device_train_batch_size": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    fields |= {"image_row_tokens": 70, "learning_rate": 0.1}

    def go(folder: str, **more: Any) -> Any:
        return run(FastSFTTrainer, FastSFTConfig, tmp_path / folder, "qwen3_vl", model, data, **fields, **more)

    whole = go("whole")
    go("part", callbacks=[Stop()])
    rest = go("part", resume=True)
    losses = [[row.get("loss") for row in figures(each)] for each in (rest, whole)]
    assert losses[0] == losses[1]
    for mine, theirs in zip(rest.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "packed"), [("qwen2_5_vl", {}), ("gemma3", {"image_row_tokens": 70})])
def test_spawned_workers_make_the_same_rows(family: str, packed: dict[str, Any], tmp_path: Path) -> None:
    """They get the collator by pickle: positions of the model's class, blocks, and the processor."""
    model, data = composite(family), image_data(family=family)
    spawned = {"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "spawn"}

    def go(**more: Any) -> Any:
        return run(FastSFTTrainer, FastSFTConfig, tmp_path, family, model, data, **packed, **more)

    ours, alone = go(**spawned), go()
    assert figures(ours) == figures(alone)
    for mine, theirs in zip(ours.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_counts_are_found_in_the_cache_of_another_run(tmp_path: Path) -> None:
    """`Dataset.map` finds them by the hash of the function: of processor and template, not of a limit."""
    data, model = image_data(family="llava"), composite("llava")
    hashes = set()
    for limit, most in ((70, None), (90, None), (90, 80)):
        fields = {"max_steps": 1, "image_row_tokens": limit, "max_length": most}
        ours = run(FastSFTTrainer, FastSFTConfig, tmp_path, "llava", model, data, **fields)
        hashes.add(Hasher.hash(counting(ours.data_collator)))
        assert ours.fastpack_run.settings.image_row_tokens == limit
    assert len(hashes) == 1
    ours.data_collator.processor.image_processor.size["height"] = 32
    assert Hasher.hash(counting(ours.data_collator)) not in hashes


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_row_tokens": 0}, "image_row_tokens=0 must be a number of tokens >= 1"),
        ({"image_row_tokens": 9, "vision_rows": "off"}, "image_row_tokens=9 needs vision_rows='auto' or 'on'"),
        ({"image_row_tokens": 512, "max_length": 5}, r"max_length=5: the shortest sample has \d+ tokens"),
        ({"image_row_tokens": 3}, r"image_row_tokens=3: the shortest sample has \d+ tokens"),
        ({"image_row_tokens": 70, "train_sampling_strategy": "group_by_length"}, "'group_by_length' reads single"),
        ({"image_row_tokens": 70, "packed_attention": "off"}, "image_row_tokens=70: packed_attention is off; leave"),
    ],
)
def test_what_cannot_be_packed_stops_with_the_value_and_the_fix(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        run(FastSFTTrainer, FastSFTConfig, tmp_path, "llava", composite("llava"), image_data(), **fields)


@pytest.mark.parametrize(
    "fields", [{"image_row_tokens": 512}, {"vision_rows": "on"}, {"merge_accumulation": "on"}], ids=str
)
def test_the_banner_names_what_a_user_asked_for_without_effect(fields: dict[str, Any], tmp_path: Path) -> None:
    (name, value), *_ = fields.items()
    data = Dataset.from_dict({"text": sentences(8, 3)})
    ours = run(FastSFTTrainer, FastSFTConfig, tmp_path, "llava", composite("llava"), data, max_steps=1, **fields)
    shown = " ".join(ours.fastpack_report.banner().split())
    assert f" off {'vision_rows' if name == 'image_row_tokens' else name} " in shown
    assert name != "image_row_tokens" or f"image_row_tokens={value} has no effect" in shown
