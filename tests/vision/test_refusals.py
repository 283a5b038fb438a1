"""Images that do not become rows: TRL's padded batches by name, and errors that name the row of the data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, Image, Sequence
from PIL import Image as Pictures
from side_by_side import assert_equal
from trainer_material import assert_line, figures
from trl import SFTConfig, SFTTrainer
from vision_material import composite, image_data, processor
from vision_runs import differences, run

from fastpack_trl import FastSFTConfig, FastSFTTrainer
from fastpack_trl.model.upstream import DataCollatorForVisionLanguageModeling
from fastpack_trl.packing.packed_inputs import PaddedInputs
from fastpack_trl.vision import rows
from fastpack_trl.vision.rows import ImageRows


class Own(DataCollatorForVisionLanguageModeling):  # type: ignore[misc]
    pass


PADDED: dict[str, dict[str, Any]] = {
    "vision_rows='off'": {"vision_rows": "off"},
    "packed_attention is off": {"packed_attention": "off"},
    "sdpa gains nothing from one long row": {"packed_attention": "sdpa"},
    "custom data collator Own": {"data_collator": Own(processor("llava"), completion_only_loss=True)},
    "include_num_input_tokens_seen counts": {"include_num_input_tokens_seen": "all"},
    "pad_to_multiple_of=8 asks for padded shapes": {"pad_to_multiple_of": 8, "kind": "messages"},
    "NEFTune's noise": {"neftune_noise_alpha": 1.0},
}


@pytest.mark.parametrize("reason", PADDED)
def test_settings_that_keep_batches_padded_are_named(reason: str, tmp_path: Path) -> None:
    fields = PADDED[reason] | {"max_steps": 1}
    data = image_data(4, family="llava", kind=fields.pop("kind", ""))
    ours = run(FastSFTTrainer, FastSFTConfig, tmp_path, "llava", composite("llava"), data, **fields)
    assert_line(ours, "vision_rows", reason if reason != "vision_rows='off'" else "switched off", status="off")
    assert_line(ours, "batches", reason, status="stock")


def test_a_family_that_was_not_compared_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "FAMILIES", frozenset({"gemma3"}))
    go = lambda **fields: run(  # noqa: E731
        FastSFTTrainer, FastSFTConfig, tmp_path, "llava", composite("llava"), image_data(4), max_steps=1, **fields
    )
    with pytest.raises(ValueError, match=r"vision_rows='on': images of llava: its rows were not compared .*'auto'"):
        go(vision_rows="on")
    with pytest.raises(ValueError, match=r"image_row_tokens=70: images of llava: its rows were not compared"):
        go(image_row_tokens=70)


def test_batches_with_keys_that_nobody_knows_stay_padded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with an image here; the others are rows, and the log is TRL's."""
    monkeypatch.setattr(rows, "OF_IMAGES", rows.OF_IMAGES - {"image_grid_thw"})
    model, data = composite("qwen2_5_vl", torch.float64), image_data()
    fields = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "max_steps": 3, "learning_rate": 0.1}
    fields |= {"eval_dataset": data, "eval_strategy": "steps", "eval_steps": 1}
    stock = run(SFTTrainer, SFTConfig, tmp_path, "qwen2_5_vl", model, data, **fields)
    ours = run(FastSFTTrainer, FastSFTConfig, tmp_path, "qwen2_5_vl", model, data, **fields)
    assert_equal(figures(ours), figures(stock), rtol=1e-6, atol=1e-6)
    assert differences(ours, stock) < 3e-6
    assert_line(ours, "sync_free", "TRL's model outputs for a batch without packed_batch")


@pytest.mark.parametrize("kind", ["left", "video"])
def test_padding_on_the_left_and_videos_stay_as_they_are(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    ids, mask = torch.arange(6).view(2, 3), torch.ones(2, 3, dtype=torch.int64)
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}
    if kind == "left":
        mask[0, 0] = 0
    else:
        batch["pixel_values_videos"] = torch.ones(1, 3)
    collate = ImageRows(lambda examples: batch, composite("llava"))
    for _ in range(2):
        found = collate([{}])
        assert type(found) is PaddedInputs
        assert found == batch
    message = "padding on the left" if kind == "left" else "unknown keys of the processor: pixel_values_videos"
    assert [record.message for record in caplog.records] == [f"vision_rows: a batch stays padded ({message})"]


def picture(mode: str = "RGB", size: tuple[int, int] = (16, 24)) -> Pictures.Image:
    return Pictures.fromarray(np.random.default_rng(0).integers(0, 255, (*size, 3), dtype=np.uint8)).convert(mode)


def with_images(*each: list[Any]) -> Dataset:
    examples = [
        {"images": list(shown), "prompt": "w1 w2" + " <boi> <image> <eoi> " * len(shown), "completion": f"w{k}"}
        for k, shown in enumerate(each, 3)
    ]
    return Dataset.from_list(examples).cast_column("images", Sequence(Image()))


def test_grey_and_cmyk_images_and_forty_of_them_are_as_in_trl(tmp_path: Path) -> None:
    data = with_images([picture("L")], [picture("CMYK"), picture("P")], [picture()] * 40, [picture("RGBA")])
    model = composite("qwen2_5_vl", torch.float64)
    stock = run(SFTTrainer, SFTConfig, tmp_path, "qwen2_5_vl", model, data, max_steps=1)
    ours = run(FastSFTTrainer, FastSFTConfig, tmp_path, "qwen2_5_vl", model, data, max_steps=1)
    assert_equal(figures(ours), figures(stock), rtol=1e-6, atol=1e-6)
    assert differences(ours, stock) < 3e-6


def unreadable() -> Dataset:
    data = with_images([picture()], [picture()], [picture()])
    broken = [dict(each) for each in data]
    broken[1]["images"] = [{"bytes": b"no image", "path": None}]
    return Dataset.from_list(broken, features=data.features)


BAD = {
    "cannot identify image file": unreadable,
    "absolute aspect ratio must be smaller than 200": lambda: with_images([picture()], [picture(size=(10, 10_000))]),
    "without an image": lambda: with_images([picture()], [picture()]).map(
        lambda each, k: {"prompt": each["prompt"] + " <image>" * k}, with_indices=True
    ),
}


@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_a_limit_that_cuts_placeholders_is_named(family: str, tmp_path: Path) -> None:
    data = image_data(4, family=family, images=2)
    with pytest.raises(ValueError, match=r"max_length` \(12\) is too short"):
        run(FastSFTTrainer, FastSFTConfig, tmp_path, family, composite(family), data, max_steps=1, max_length=12)


@pytest.mark.parametrize("fields", [{}, {"dataloader_num_workers": 1}, {"image_row_tokens": 4096}], ids=str)
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_image_is_named_by_its_row(kind: str, fields: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - of the processor
        model, steps = composite("qwen2_5_vl"), {"max_steps": 1}
        run(FastSFTTrainer, FastSFTConfig, tmp_path, "qwen2_5_vl", model, BAD[kind](), **steps | fields)
    text = str(raised.value) + str(getattr(raised.value, "__notes__", ""))
    assert "in row 1 of the data set" in text, text
