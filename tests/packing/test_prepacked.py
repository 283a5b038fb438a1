"""Rows that a user has packed, with ``seq_lengths``, train as in TRL: truncated, packed again or as documents."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trainer_material import assert_same_log, build, packed_rows, train
from transformers import AutoConfig, AutoModelForCausalLM
from trl import SFTTrainer
from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

from fastpack_trl import FastSFTTrainer
from fastpack_trl.packing.dataset import check_vocabulary, counted_tokens

PADDING_FREE = {"padding_free": True, "max_length": None}
BOTH = (FastSFTTrainer, SFTTrainer)


FORMS: dict[str, dict[str, Any]] = {
    "cut": {"max_length": 24, "gradient_accumulation_steps": 2},
    "end": {"max_length": 24, "truncation_mode": "keep_end", "pad_to_multiple_of": 8},
    "documents": PADDING_FREE,
    "packed": {"max_length": 24, "packing": True},
}
MASKED = [(form, mask) for form in ("cut", "packed") for mask in ("assistant_masks", "completion_mask")]


@pytest.mark.parametrize(("form", "column"), [*product(FORMS, ("", "labels")), *MASKED])
def test_log_is_stocks(form: str, column: str, tmp_path: Path) -> None:
    rows = packed_rows(40, 3, labels=column == "labels")
    if "mask" in column:
        rows = rows.add_column(column, [[token % 3 > 0 for token in ids] for ids in rows["input_ids"]])
    given = {"data": rows, "completion_only_loss": column == "completion_mask", **FORMS[form]}
    assert_same_log(*(train(cls, tmp_path, **given) for cls in BOTH), rtol=5e-5)


def test_a_collator_that_numbers_the_positions_of_documents_in_padded_rows_stays(tmp_path: Path) -> None:
    given: dict[str, Any] = {"data": "packed", "packing": False, "max_length": None, "eval_strategy": "no"}
    sides = []
    for cls in BOTH:
        collator = DataCollatorForLanguageModeling(pad_token_id=0, return_position_ids=True)
        sides.append(build(cls, tmp_path, trainer={"data_collator": collator}, **given))
        sides[-1].train()
    assert "numbers the positions" in sides[0].fastpack_report["batches"].reason
    assert_same_log(*sides)


def test_first_tokens_of_documents_count_in_rows_that_are_one_document(tmp_path: Path) -> None:
    rows = Dataset.from_list([{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, -100], "seq_lengths": [2, 2]}])
    assert (counted_tokens(rows, padding_free=False), counted_tokens(rows)) == (1, 0)
    for options, named in ({"max_length": 4}, False), (PADDING_FREE, True):
        assert ("loss tokens" in build(FastSFTTrainer, tmp_path, data=rows, **options).fastpack_report.facts) == named
    cut = Dataset.from_list([{"input_ids": [5, 6], "seq_lengths": [1, 3, 2]}] * 2)
    assert counted_tokens(cut) <= 2, "the collator names lengths that do not fit"
    check_vocabulary(cut, 96, padding_free=True)


@pytest.mark.parametrize("options", [PADDING_FREE, {"packing": True, "max_length": 48}], ids=["documents", "packed"])
@pytest.mark.parametrize("family", ["stablelm", "doge"])
def test_padded_documents_count_the_padding_of_a_multiple(family: str, options: Any, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(family, vocab_size=96, num_key_value_heads=4, **sizes)
    given = {"pad_to_multiple_of": 8, "include_num_input_tokens_seen": "all", "eval_strategy": "no", **options}
    given |= {"data": packed_rows(12, 3, labels=True), "router_aux_loss_coef": 0.0}  # Doge has no router
    ours, stock = (train(cls, tmp_path, model=AutoModelForCausalLM.from_config(config), **given) for cls in BOTH)
    assert ours.fastpack_report["batches"].path == "documents"
    names = ("num_tokens", "num_input_tokens_seen")
    logs = [[[row.get(name) for name in names] for row in one.state.log_history] for one in (ours, stock)]
    assert logs[0] == logs[1]
