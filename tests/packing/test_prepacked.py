"""Rows that a user has packed, with ``seq_lengths``, train as in TRL: truncated, packed again or as documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trainer_material import assert_same_log, build, packed_rows, train
from transformers import AutoConfig, AutoModelForCausalLM
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.packing.dataset import check_vocabulary, counted_tokens

PADDING_FREE = {"padding_free": True, "max_length": None}


def masked(column: str) -> Dataset:
    rows = packed_rows(40, 3, labels=False)
    return rows.add_column(column, [[token % 3 > 0 for token in ids] for ids in rows["input_ids"]])


@pytest.mark.parametrize("labels", [False, True], ids=["", "labels"])
@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 24},
        {"max_length": 24, "truncation_mode": "keep_end", "gradient_accumulation_steps": 2},
        {"max_length": None},
        {**PADDING_FREE, "pad_to_multiple_of": 8},
        {"max_length": 24, "packing": True},
        {"max_length": 24, "packing": True, "packing_strategy": "wrapped"},
    ],
    ids=["cut", "end", "whole", "documents", "packed", "wrapped"],
)
def test_log_is_stocks(options: dict[str, Any], labels: bool, tmp_path: Path) -> None:
    given = {"data": packed_rows(40, 3, labels=labels), **options}
    assert_same_log(*(train(cls, tmp_path, **given) for cls in (FastSFTTrainer, SFTTrainer)), rtol=5e-5)


@pytest.mark.parametrize("column", ["assistant_masks", "completion_mask"])
@pytest.mark.parametrize("options", [{"max_length": 24}, PADDING_FREE], ids=["cut", "documents"])
def test_masks_become_labels_as_in_stock(options: dict[str, Any], column: str, tmp_path: Path) -> None:
    given = {"data": masked(column), "completion_only_loss": True, **options}
    assert_same_log(*(train(cls, tmp_path, **given) for cls in (FastSFTTrainer, SFTTrainer)), rtol=5e-5)


def test_first_tokens_of_documents_count_in_rows_that_are_one_document(tmp_path: Path) -> None:
    rows = Dataset.from_list([{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, -100], "seq_lengths": [2, 2]}])
    assert (counted_tokens(rows), counted_tokens(rows, padding_free=True)) == (1, 0)
    cut = Dataset.from_list([{"input_ids": [5, 6], "seq_lengths": [1, 3, 2]}] * 2)
    assert counted_tokens(cut, padding_free=True) <= counted_tokens(cut) == 2, "the collator names the stale lengths"
    check_vocabulary(cut, 96, padding_free=True)
    facts = build(FastSFTTrainer, tmp_path, data=rows, max_length=4).fastpack_report.facts
    assert "loss tokens" not in facts
    facts = build(FastSFTTrainer, tmp_path, data=rows, **PADDING_FREE).fastpack_report.facts
    assert facts["loss tokens"].startswith("none")


@pytest.mark.parametrize("options", [PADDING_FREE, {"packing": True, "max_length": 48}], ids=["documents", "packed"])
@pytest.mark.parametrize("family", ["stablelm", "doge"])
def test_documents_padded_one_by_one_count_the_padding_of_a_multiple(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(family, vocab_size=96, num_key_value_heads=4, **sizes)
    data = packed_rows(12, 3, labels=True)
    given = {"data": data, "pad_to_multiple_of": 8, "include_num_input_tokens_seen": "all", "eval_strategy": "no"}
    given["router_aux_loss_coef"] = 0.0  # Doge has no router
    logs = []
    for cls in (FastSFTTrainer, SFTTrainer):
        trainer = train(cls, tmp_path, model=AutoModelForCausalLM.from_config(config), **given, **options)
        logs.append([(row.get("num_tokens"), row.get("num_input_tokens_seen")) for row in trainer.state.log_history])
        if cls is FastSFTTrainer:
            assert trainer.fastpack_report["batches"].path == "documents"
    assert logs[0] == logs[1]
