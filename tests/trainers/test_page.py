"""`docs/preference-and-rl.md` has the table of what is on in which trainer, made here."""

from __future__ import annotations

from pathlib import Path

import pytest
from preference_material import NAMES, build

PAGE = Path(__file__).parents[2] / "docs" / "preference-and-rl.md"
FEATURES = (
    "batches", "packed_attention", "share_prefixes", "verify_packing", "merge_accumulation", "lora", "moe",
    "fused_layers", "activation_memory", "checkpoint_offload", "cuda_graph",
)  # fmt: skip
HEADING = f"| | {' | '.join(NAMES)} |\n|{' --- |' * (len(NAMES) + 1)}\n"


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One step of each trainer on a CPU, LoRA on a tiny mixture of experts."""
    cells: dict[str, list[str]] = {feature: [] for feature in FEATURES}
    for name in NAMES:
        steps = {"gradient_accumulation_steps": 2} if name in ("GRPO", "RLOO") else {}
        trainer = build(
            name, tmp_path_factory.mktemp(name), fast=True, family="qwen3_moe", max_steps=1, eval_strategy="no",
            router_aux_loss_coef=None if name == "Reward" else 0.0, **steps,
        )  # fmt: skip
        trainer.train()
        report = trainer.fastpack_report
        for feature, row in cells.items():
            row.append(f"{report[feature].status}" if feature in report else "-")
    alike: dict[tuple[str, ...], list[str]] = {}
    for feature, row in cells.items():
        alike.setdefault(tuple(row), []).append(f"`{feature}`")
    return HEADING + "".join(f"| {', '.join(names)} | {' | '.join(row)} |\n" for row, names in alike.items())


def test_the_page_says_what_is_on_in_which_trainer(table: str) -> None:
    assert table in PAGE.read_text(encoding="utf-8"), f"the table should be:\n{table}"
