"""The fields of the config: what they take, whoever sets them and when, and where their choices are written."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from trl import SFTConfig

from fastpack_trl import FastSFTConfig
from fastpack_trl.attention.backends import BACKENDS
from fastpack_trl.config import _CHOICES, PACKED_ATTENTION_CHOICES, Settings
from fastpack_trl.run import PADDED_ROWS

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("kind", [SFTConfig, FastSFTConfig])
@pytest.mark.parametrize(
    ("field", "wrong", "message"),
    [
        ("lora", "nonsense", "lora='nonsense' is not available: use one of auto, on, off"),
        ("packed_attention", "varlne", "did you mean"),
        ("padded_rows_limit", -3, r"padded_rows_limit=-3\.0 is below 1"),
        ("activation_memory_gib", 0, r"activation_memory_gib=0\.0 must be above 0"),
        ("offload_budget_gib", "much", "offload_budget_gib='much' is not a number"),
        ("keep_last_layers", -1, "keep_last_layers=-1 is no number of layers"),
    ],
)
def test_a_wrong_value_is_refused_also_if_it_was_set_on_a_config(
    kind: Any, field: str, wrong: object, message: str
) -> None:
    config = kind(use_cpu=True)
    setattr(config, field, wrong)
    with pytest.raises(ValueError, match=message):
        Settings.of(config)
    with pytest.raises(ValueError, match=message):
        Settings(**{field: wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [SFTConfig, FastSFTConfig])
def test_a_value_that_was_set_on_a_config_is_normalised(kind: Any) -> None:
    config = kind(use_cpu=True)
    config.sync_free, config.packed_attention, config.padded_rows_limit = False, "ON", "3"
    found = Settings.of(config)
    assert (found.sync_free, found.packed_attention, found.padded_rows_limit) == ("off", "auto", 3.0)


def test_every_backend_can_be_asked_for_and_nothing_else() -> None:
    assert set(PACKED_ATTENTION_CHOICES) == {"auto", *BACKENDS, PADDED_ROWS, "off"}
    assert len(set(PACKED_ATTENTION_CHOICES)) == len(PACKED_ATTENTION_CHOICES)


def test_the_page_of_features_has_the_choices_of_every_field() -> None:
    page = (ROOT / "docs" / "features.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([\w, ]+?) \|", page, re.MULTILINE))
    assert {name: rows.get(name) for name in _CHOICES} == {name: ", ".join(of) for name, of in _CHOICES.items()}
