"""TRL's own examples, re-created on tiny models: same log as stock with one import changed, and what is on in them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from script_material import BF16, FP32, assert_same_figures, files, run, with_ours
from trainer_material import figures
from transformers import AutoModelForCausalLM, set_seed
from trl import SFTTrainer
from trl_examples import EXAMPLES, HEADING, PAGE, SCRIPTS, off_on_a_cpu, row, save_material

from fastpack_trl import FastSFTTrainer

QUANTISED = ("qlora_notebook", "sft_tiny_aya_tool_calling")
LEAKS = "sft_gpt_oss"
"""Stock lets the documents of its packed rows see each other on a CPU: there is no log to compare with."""

DROPOUT = "lora_dropout=0.05"


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_material(tmp_path_factory.mktemp("examples"))


def read(name: str) -> str:
    source = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    if "8bit" in source or name in QUANTISED:
        pytest.importorskip("bitsandbytes")
    return source


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_with_one_line_changed_has_on_what_the_page_says(
    name: str, material: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = read(name)
    ours = run(with_ours(source), tmp_path / "ours", material, monkeypatch)
    assert type(ours) is FastSFTTrainer
    expected = row(name, ours.fastpack_report)
    assert expected in PAGE.read_text(encoding="utf-8"), f"the line of {name} in {PAGE.name} should be:\n{expected}"
    if name == LEAKS:
        check_documents_apart(ours, material)
        return
    if DROPOUT in source:  # the draws depend on the shape of a batch
        source = source.replace(DROPOUT, "lora_dropout=0.0")
        ours = run(with_ours(source), tmp_path / "exact", material, monkeypatch)
    stock = run(source, tmp_path / "stock", material, monkeypatch)
    assert type(stock) is SFTTrainer
    assert_same_figures(figures(ours), figures(stock), BF16 if name in QUANTISED else FP32)
    assert files(tmp_path / "ours") == sorted([*files(tmp_path / "stock"), "out/fastpack_report.json"])


def check_documents_apart(trainer: Any, material: Path) -> None:
    """The first logged loss is that of the first batch's documents, run one by one through the untrained model."""
    set_seed(trainer.args.seed)
    batch = next(iter(trainer.get_train_dataloader()))
    ids = batch["input_ids"][0]
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    assert len(starts) > trainer.args.per_device_train_batch_size
    model = AutoModelForCausalLM.from_pretrained(material / "models" / "gpt_oss", dtype="float32").eval()
    losses, count = torch.zeros(()), 0
    with torch.no_grad():
        for start, end in pairwise([*starts, len(ids)]):
            document = ids[start:end]
            logits = model(input_ids=document[None]).logits[0, :-1]
            losses += torch.nn.functional.cross_entropy(logits, document[1:], reduction="sum")
            count += len(document) - 1
    logged = trainer.state.log_history[0]
    auxiliary = trainer.router_aux_loss_coef * logged["aux_loss"]
    assert logged["loss"] - auxiliary == pytest.approx(float(losses) / count, rel=FP32)


def test_the_page_has_a_line_for_each_script_and_no_other() -> None:
    assert {path.stem for path in SCRIPTS.glob("*.py")} == set(EXAMPLES)
    page = PAGE.read_text(encoding="utf-8")
    table = page[page.index(HEADING) + len(HEADING) :].split("\n\n")[0]
    assert [line.split(" | ")[:2] for line in table.splitlines()] == [
        [f"| {source}", settings] for source, settings in EXAMPLES.values()
    ]
    assert off_on_a_cpu() in page
