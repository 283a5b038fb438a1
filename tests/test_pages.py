"""Pages of docs/ that name files, messages and tables are true."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import hardware_doc
import pytest
from pages import PAGES, ROOT, text_of
from preference_material import NAMES, build

from fastpack_trl.features import FEATURES

PACKAGE = ROOT / "fastpack_trl"


TROUBLES = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
REASONS = re.findall(r"^- (`.+?`): (.+)$", TROUBLES, re.MULTILINE)
COMMONEST = re.findall(r"^1\. `(.+?)`: ", TROUBLES, re.MULTILINE)


def template(node: ast.AST) -> str | None:
    """Return a string of the source with ``...`` for what is filled in; None for what is no string."""
    if isinstance(node, ast.JoinedStr):
        return "".join(template(part) or "..." for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


@cache
def said() -> set[str]:
    """Return every string of the package."""
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in PACKAGE.rglob("*.py"))
    return {text for tree in trees for node in ast.walk(tree) if (text := template(node)) is not None}


def test_troubleshooting_has_a_section_per_feature_lines_that_the_code_says_and_a_fix_for_each() -> None:
    listed = [reason for cell, _ in REASONS for reason in re.findall(r"`([^`]+)`", cell)]
    assert len(listed) > 100
    assert not [reason for reason in listed if reason not in said()]
    assert all(len(remedy.split()) >= 2 for _, remedy in REASONS)
    assert len(REASONS) == sum(line.startswith("- `") for line in TROUBLES.splitlines())
    patterns = [re.escape(text).replace(r"\.\.\.", ".+") for text in said() if len(text) > 12 and " " in text]
    assert len(COMMONEST) == 10
    assert not [line for line in COMMONEST if not any(re.search(pattern, line) for pattern in patterns)]
    sections = set(re.findall(r"^## (\w+)$", TROUBLES, re.MULTILINE))
    features = {feature.name for feature in FEATURES if feature.falls_back}
    assert sections == features | {"fastpack", "batches", "packed_attention", "verify_packing"}


SOME_ROWS = ("Qwen3-0.6B, all weights", "Qwen3-8B QLoRA")
"""Each row of this table takes seconds."""


@pytest.mark.parametrize(
    "table",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in ("rows", "doctor"))) for name in hardware_doc.TABLES],
)
def test_tables_are_what_the_rules_of_the_features_say(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware_doc, "ROWS", {name: hardware_doc.ROWS[name] for name in SOME_ROWS})
    page, made = hardware_doc.page_with(table)
    text = page.read_text(encoding="utf-8")
    assert table != "rows" or all(f"| {name} |" in made for name in SOME_ROWS)
    is_true = {*made.splitlines()} <= {*text.splitlines()} if table == "rows" else made == text
    assert is_true, f"run: python {hardware_doc.__file__} {table}"


LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def is_about_code(page: Path) -> bool:
    stems = ("architecture", "cuda-graphs", "CONTRIBUTING", "cli", "components", "configuration")
    return page.parent.name == "contributing" or page.stem in stems


@cache
def code() -> tuple[set[str], set[str]]:
    """Return the paths of all Python files, and every word in them."""
    files = [path for folder in ("fastpack_trl", "tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    words = {word for path in files for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    return {f"/{path.relative_to(ROOT)}" for path in files}, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_anchor_file_and_name_of_a_page_exists(page: Path) -> None:
    for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), f"{target}#{anchor}"
    named, (files, words) = re.findall(r"`([^`\n]+)`", text_of(page)), code()
    folders = "fastpack_trl|tests|benchmarks|docs|configs|notebooks"
    paths = [name for name in named if re.fullmatch(rf"(?:{folders})/[\w/.-]+\.(?:py|md|yaml|ipynb|jsonl)", name)]
    assert not [name for name in paths if not (ROOT / name).exists()]
    if is_about_code(page):
        modules = [name for name in named if re.fullmatch(r"[\w/]+\.py", name)]
        assert not [name for name in modules if not any(file.endswith(f"/{name}") for file in files)]
        names = [re.fullmatch(r"(?:\w+\.)*([A-Za-z_]\w*?[A-Za-z0-9])(\(.*\))?", name) for name in named]
        assert not [found[0] for found in names if found and found[1] not in words]


def prose(page: Path) -> list[str]:
    """Return the sentences of a page, without code, quotations, tables, headings and pictures."""
    text = re.sub(r"^ *(\||#|!\[|<).*$", "", text_of(page), flags=re.MULTILINE)
    text = re.sub(r"`[^`]+`|\"[^\"]+\"", "X", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text))
    text = re.sub(r"^ *(- |\d+\. )", "\n", text, flags=re.MULTILINE)
    parts = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return [sentence for part in parts for sentence in re.split(r"(?<=[.!?])\s+", part) if sentence]


PRIVATE = re.compile(
    r"\bstock\b(?! TRL)|\b(proof|proven|insists?|parted|given back|asks? the (device|GPU)|has no form"
    r"|is no (number|name)|what it (is|was)|where it can(not)?)\b"
)
"""Words that only this project would use, or that read as translated: see the style in CONTRIBUTING."""


def test_the_prose_of_the_pages_is_short_and_has_no_private_words() -> None:
    sentences = [sentence for page in (*PAGES, ROOT / "CHANGELOG.md") for sentence in prose(page)]
    assert not [sentence for sentence in sentences if PRIVATE.search(sentence)]
    assert sum(len(re.findall(r"\bbeside\b", sentence)) for sentence in sentences) < 15
    assert sum(len(sentence.split()) > 35 for sentence in sentences) < 0.03 * len(sentences)


def test_readme_names_two_commands_with_their_minutes_and_contributing_what_ci_runs() -> None:
    readme, contributing, ci, makefile = (
        (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md", ".ci/run", "Makefile")
    )
    named = re.findall(r"^make ([\w-]+) .*: \d+ minutes$", readme, re.MULTILINE)
    runs = re.findall(r"^make ([\w-]+)$", ci, re.MULTILINE)
    assert named == ["quickstart", "test"]
    assert {"test"} <= set(runs) <= {*named, *re.findall(r"`?make ([\w-]+)", contributing)}
    assert {*runs, *named} <= {*re.findall(r"^([\w-]+):", makefile, re.MULTILINE)}


def test_the_pages_stay_short() -> None:
    words = {page: len(page.read_text(encoding="utf-8").split()) for page in PAGES}
    assert words[ROOT / "README.md"] <= 900
    assert sum(count for page, count in words.items() if ROOT / "docs" in page.parents) <= 19_500


IN_TRAINERS = (
    "batches", "packed_attention", "share_prefixes", "verify_packing", "merge_accumulation", "lora", "moe",
    "fused_layers", "activation_memory", "checkpoint_offload", "cuda_graph",
)  # fmt: skip


def test_the_page_says_what_is_on_in_which_trainer(tmp_path: Path) -> None:
    """In one step of each on a CPU, LoRA on a tiny mixture of experts."""
    cells: dict[str, list[str]] = {feature: [] for feature in IN_TRAINERS}
    for name in NAMES:
        steps = {"gradient_accumulation_steps": 2} if name in ("GRPO", "RLOO") else {}
        trainer = build(
            name, tmp_path / name, fast=True, family="qwen3_moe", max_steps=1, eval_strategy="no",
            router_aux_loss_coef=None if name == "Reward" else 0.0, **steps,
        )  # fmt: skip
        trainer.train()
        report = trainer.fastpack_report
        for feature, row in cells.items():
            row.append(report[feature].status if feature in report else "-")
    alike: dict[tuple[str, ...], list[str]] = {}
    for feature, row in cells.items():
        alike.setdefault(tuple(row), []).append(f"`{feature}`")
    table = f"| | {' | '.join(NAMES)} |\n|{' --- |' * (len(NAMES) + 1)}\n"
    table += "".join(f"| {', '.join(names)} | {' | '.join(row)} |\n" for row, names in alike.items())
    page = (ROOT / "docs/preference-and-rl.md").read_text(encoding="utf-8")
    assert table in page, f"the table should be:\n{table}"
