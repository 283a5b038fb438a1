"""docs/hardware.md, models.md, usage.md: their tables are what the package's rules say, with the capability forced."""

from __future__ import annotations

import hardware_doc
import pytest
from hardware_doc import DOCS, PAGES, kinds, page_with

from fastpack_trl.recipe.gpus import GPUS


@pytest.mark.parametrize(
    "table", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("rows", "doctor"))) for name in PAGES]
)
def test_tables_are_what_the_rules_of_the_features_say(table: str) -> None:
    text = (DOCS / PAGES[table]).read_text(encoding="utf-8")
    assert page_with(table, text) == text, f"run: python {hardware_doc.__file__}"


def test_every_gpu_that_doctor_knows_has_a_column() -> None:
    assert sum(map(len, kinds().values())) == len(GPUS)
    line = next(
        line for line in (DOCS / "hardware.md").read_text(encoding="utf-8").splitlines() if "| feature |" in line
    )
    assert all(name in line for name in GPUS)
