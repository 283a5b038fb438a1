"""Rows of images and text: TRL's loss, gradients and log of the padded batch, by family; controls that differ."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from datasets import Dataset
from peft import LoraConfig
from side_by_side import assert_equal
from torch import Tensor
from torch.overrides import TorchFunctionMode
from trainer_material import assert_line, figures, sentences
from trl import SFTConfig, SFTTrainer
from vision_material import COMPOSITES, composite, image_data, processor
from vision_runs import differences, run

from fastpack_trl import FastSFTConfig, FastSFTTrainer
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.attention.per_document import block_masks
from fastpack_trl.attention.row_backend import attend_blocks
from fastpack_trl.model.upstream import DataCollatorForVisionLanguageModeling
from fastpack_trl.packing.blocks import Blocks
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.vision.lengths import keep_on_host
from fastpack_trl.vision.rows import FAMILIES, GRIDS, ImageRows


@pytest.mark.usefixtures("exact_scan")
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_step_on_a_row_is_that_on_the_padded_batch(family: str, tmp_path: Path) -> None:
    model, data = composite(family, torch.float64), image_data(family=family)
    step = {"max_steps": 1, "per_device_train_batch_size": 8}
    stock = run(SFTTrainer, SFTConfig, tmp_path, family, model, data, **step)
    ours = run(FastSFTTrainer, FastSFTConfig, tmp_path, family, model, data, **step)
    assert_line(ours, "vision_rows", "packing is checked on text only", status="on", path="one row per batch")
    assert_line(ours, "sync_free", path="loss, metrics, host work")
    assert_equal(figures(ours), figures(stock), rtol=1e-6, atol=1e-6)
    assert differences(ours, stock) < 3e-6
    assert set(COMPOSITES) == FAMILIES


CHECKPOINTED = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
LORA = {"peft_config": LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM"), "learning_rate": 1.0}
MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "no images": ({"images": 0}, {}),
    "two images": ({"images": 2}, {}),
    "chats": ({"kind": "messages"}, {"gradient_accumulation_steps": 2}),
    "turns": ({"kind": "turns"}, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3}),
    "checkpointed LoRA": ({}, CHECKPOINTED | LORA),
    "fused": ({}, {"fast": {"fused_layers": "on"}}),
    "workers": ({}, {"dataloader_num_workers": 2, "eval_strategy": "steps", "eval_steps": 1}),
}


BY_FAMILY = product(("no images", "two images", "checkpointed LoRA"), ("qwen2_5_vl", "gemma3", "idefics3"))
ONCE = [("chats", "qwen2_5_vl"), ("turns", "qwen2_5_vl"), ("fused", "qwen2_5_vl"), ("workers", "gemma3")]


@pytest.mark.parametrize(("mode", "family"), [*BY_FAMILY, *ONCE])
def test_modes_of_runs_learn_as_padded_batches(family: str, mode: str, tmp_path: Path) -> None:
    given, fields = MODES[mode]
    model, data = composite(family, torch.float64), image_data(family=family, **given)
    more = {"learning_rate": 0.1} | fields
    fast = more.pop("fast", {}) | {"vision_rows": "on"}
    more |= {"eval_dataset": data} if "eval_strategy" in fields else {}
    stock = run(SFTTrainer, SFTConfig, tmp_path, family, model, data, **more)
    ours = run(FastSFTTrainer, FastSFTConfig, tmp_path, family, model, data, **more, **fast)
    assert_equal(figures(ours), figures(stock), rtol=1e-6, atol=1e-6)
    assert differences(ours, stock) < (2e-5 if "LoRA" in mode else 3e-6)  # PEFT makes adapters in fp32


@pytest.mark.usefixtures("varlen_on_the_cpu")
def test_two_calls_over_a_row_let_images_see_themselves(tmp_path: Path) -> None:
    model, data = composite("gemma3", torch.float64), image_data(family="gemma3")
    step = {"max_steps": 1, "per_device_train_batch_size": 8}
    stock = run(SFTTrainer, SFTConfig, tmp_path, "gemma3", model, data, **step)
    ours = run(FastSFTTrainer, FastSFTConfig, tmp_path, "gemma3", model, data, **step, packed_attention="varlen")
    assert ours.fastpack_run.attention_path == "varlen"
    assert differences(ours, stock) < 3e-6


@pytest.mark.usefixtures("exact_scan")
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_text_alone_merges_micro_batches_with_a_mean_each(family: str, tmp_path: Path) -> None:
    """These families divide the loss by the tokens of a micro-batch: weights per position keep that in a merged row."""
    model, data = composite(family, torch.float64), Dataset.from_dict({"text": sentences(16, 3)})
    fields = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 4, "learning_rate": 0.1}
    stock = run(SFTTrainer, SFTConfig, tmp_path, family, model, data, **fields)
    ours = run(FastSFTTrainer, FastSFTConfig, tmp_path, family, model, data, **fields, merge_accumulation="on")
    assert_line(ours, "merge_accumulation", status="on", path="one row per optimizer step")
    assert_equal(figures(ours), figures(stock), rtol=1e-6, atol=1e-6)
    assert differences(ours, stock) < 3e-6


class Reads(TorchFunctionMode):
    """Counts reads of tensors."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        reads = (Tensor.tolist, Tensor.item, Tensor.cpu, Tensor.__int__, Tensor.__bool__, Tensor.__index__)
        self.count += func in reads
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_reads_of_a_step_depend_neither_on_layers_nor_on_documents(family: str) -> None:
    """On a device each would wait for it: those left are transformers', around the tower."""
    found = {}
    for repeats, count in ((1, 4), (3, 4), (1, 12)):
        model, data = composite(family, repeats=repeats), image_data(count, family=family, images=1)
        collate = ImageRows(DataCollatorForVisionLanguageModeling(processor(family), completion_only_loss=True), model)
        row = collate([dict(each) for each in data])
        row.pop("labels")
        grids = row.get(GRIDS)
        if grids is not None:  # as on a device: another tensor, whose host copy is known
            row[GRIDS] = grids.clone()
            keep_on_host(row[GRIDS], grids)
        with packed_attention(model), Reads() as reads:
            model(**row).logits.sum().backward()
        found[repeats, count] = reads.count
    assert found[1, 4] == found[3, 4]
    # Windows are counted image by image, on the host.
    assert found[1, 12] == found[1, 4] + (8 if family == "qwen2_5_vl" else 0)


def one_dimension(rows: ImageRows) -> None:
    rows.positions = None


def causal(rows: ImageRows) -> None:
    rows.sees_blocks = False
    rows.stock.torch_call = lambda examples, own=rows.stock.torch_call: {
        name: value for name, value in own(examples).items() if name != "token_type_ids"
    }


@pytest.mark.parametrize(("family", "wrong"), [("qwen3_vl", one_dimension), ("gemma3", causal)])
def test_wrong_positions_and_causal_images_differ(
    family: str, wrong: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controls: what the tests above compare depends on them."""
    model, data = composite(family, torch.float64), image_data(family=family)
    step = {"max_steps": 1, "per_device_train_batch_size": 8}
    stock, own = run(SFTTrainer, SFTConfig, tmp_path, family, model, data, **step), ImageRows.__init__

    def init(self: ImageRows, *args: Any) -> None:
        own(self, *args)
        wrong(self)

    monkeypatch.setattr(ImageRows, "__init__", init)
    ours = run(FastSFTTrainer, FastSFTConfig, tmp_path, family, model, data, **step)
    assert differences(ours, stock) > 0.1


def test_a_token_sees_its_image_to_its_end_and_else_what_is_before_it() -> None:
    """Against brute force, also with images that touch inside of a document and across two; masks and both calls."""
    random = np.random.default_rng(0)
    for _ in range(60):
        lengths = random.integers(1, 9, random.integers(1, 5))
        image = random.random(lengths.sum()) < 0.6
        document = np.arange(len(lengths)).repeat(lengths)
        ends, total = [], len(image)
        for token in range(total):
            end = token + 1
            while image[token] and end < total and image[end] and document[end] == document[token]:
                end += 1
            ends.append(end)
        blocks = Blocks.of(image, lengths)
        if blocks is None:
            assert not image.any()
            continue
        assert blocks.key_ends.tolist() == ends
        batch = replace(PackedBatch.from_lengths(lengths), blocks=blocks)
        same, places = torch.tensor(document)[:, None] == torch.tensor(document), torch.arange(total)
        query, key, value = torch.randn(3, total, 2, 8, dtype=torch.float64)
        for window in (None, 3):
            mask = torch.block_diag(*map(torch.Tensor.double, block_masks(batch, window, torch.device("cpu")))).bool()
            seen = same & (places < torch.tensor(ends)[:, None]) & (places > places[:, None] - (window or 99))
            assert torch.equal(mask, seen)
            whole = F.scaled_dot_product_attention(
                *(each.transpose(0, 1) for each in (query, key, value)), attn_mask=seen, scale=0.3
            )
            own = attend_blocks(blocks, query, key, value, 0.3, window)
            torch.testing.assert_close(own, whole.transpose(0, 1)[image])
