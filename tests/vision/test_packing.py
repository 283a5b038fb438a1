"""Rows across a data set of images: TRL's results on the same samples, exact lengths, two limits, one cached pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets.fingerprint import Hasher
from side_by_side import assert_equal
from trainer_material import assert_line, figures
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer
from vision_material import composite, image_data
from vision_runs import differences, run

from fastpack_trl import FastSFTConfig, FastSFTTrainer
from fastpack_trl.vision.packing import Samples, counting, fit, pack_samples
from fastpack_trl.vision.rows import FAMILIES

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
    spawned = {"dataloader_num_workers": 2, "dataloader_multiprocessing_context": "spawn"}

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
        ({"image_row_tokens": 3}, r"every sample has more than 3 tokens \(the shortest \d+\)"),
        ({"image_row_tokens": 70, "train_sampling_strategy": "group_by_length"}, "'group_by_length' reads single"),
        ({"image_row_tokens": 70, "packed_attention": "off"}, "image_row_tokens=70: packed_attention is off; leave"),
    ],
)
def test_what_cannot_be_packed_stops_with_the_value_and_the_fix(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        run(FastSFTTrainer, FastSFTConfig, tmp_path, "llava", composite("llava"), image_data(), **fields)
