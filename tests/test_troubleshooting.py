"""docs/troubleshooting.md has each reason that the code can give, and none that the code has lost."""

from __future__ import annotations

import re

from pages import ROOT
from reasons import everywhere, given

from fastpack_trl.features import FEATURES

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (`.*?`) \| (.+) \|$", PAGE, re.MULTILINE)

NO_REASONS = {
    "not run", "asked for", "proof of stock", "split again", "a parameter",  # paths, and parts of a sentence
    "truncated tokens", "padded tokens per token",
    "up to ...", "unknown (streamed or prepared elsewhere)",
}  # fmt: skip
"""Sentences of those functions that are no fallback."""


def listed() -> list[str]:
    return [reason for cell, _ in ROWS for reason in re.findall(r"`([^`]+)`", cell)]


def test_every_reason_of_the_code_is_on_the_page() -> None:
    missing = {text: where for text, where in given().items() if text not in {*listed(), *NO_REASONS}}
    assert not missing, "say in docs/troubleshooting.md why, and what to do"


def test_every_line_of_the_page_is_still_said_by_the_code() -> None:
    said = everywhere()
    assert len(listed()) > 100
    assert not [reason for reason in listed() if reason not in said]
    assert set(given()) >= NO_REASONS


def test_every_feature_has_its_section_and_every_row_a_remedy() -> None:
    sections = set(re.findall(r"^## (\w+)$", PAGE, re.MULTILINE))
    features = {feature.install.__name__ for feature in FEATURES if feature.falls_back}
    assert sections == features | {"fastpack", "batches", "packed_attention", "verify_packing"}
    assert all(len(remedy.split()) >= 2 for _, remedy in ROWS)
    assert len(ROWS) == sum(line.startswith("| `") for line in PAGE.splitlines())
