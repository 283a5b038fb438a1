"""TRL's own examples on tiny models: the same log as under TRL's trainer, and what is on in them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from side_by_side import assert_equal
from trainer_material import figures
from transformers import AutoModelForCausalLM, set_seed
from trl import SFTTrainer
from trl_examples import EXAMPLES, LEAKS, PAGE, ROWS, cells, save_material

from fastpack_trl import FastSFTTrainer

FP32, BF16 = 1e-5, 2**-7  # eight bits of mantissa, and a product over other rows


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_material(tmp_path_factory.mktemp("examples"))


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_logs_as_stock_and_has_on_what_the_page_says(name: str, material: Path, tmp_path: Path) -> None:
    example = EXAMPLES[name]
    if example.is_quantised or "8bit" in example.config.get("optim", ""):
        pytest.importorskip("bitsandbytes")
    ours = example.train(FastSFTTrainer, material, tmp_path / "ours")
    expected = cells(ours.fastpack_report)
    assert ROWS[name].endswith(f" | {expected}"), f"the line of {name} in {PAGE.name} should end:\n{expected}"
    if name == LEAKS:
        check_documents_apart(ours, material)
        return
    dropless = {"lora_dropout": 0.0}  # the draws depend on the shape of a batch
    if example.lora and example.lora.get("lora_dropout"):
        ours = example.train(FastSFTTrainer, material, tmp_path / "exact", **dropless)
    stock = example.train(SFTTrainer, material, tmp_path / "stock", **dropless)
    rtol = BF16 if example.is_quantised else FP32
    assert len(figures(stock)) >= 4
    assert_equal(figures(ours), figures(stock), rtol, rtol / 5)
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
    assert [*ROWS] == [*EXAMPLES]
