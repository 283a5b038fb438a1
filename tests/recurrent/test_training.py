"""Training of hybrid models: the log is stock's, which pads; LoRA, merged rows, compiled layers, no wait per step."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_material import Counting, loss_of, one_step
from datasets import Dataset
from hybrid_material import HYBRIDS, composite_model, hybrid_model, reached
from side_by_side import assert_same_tokens
from torch import Tensor
from trainer_material import assert_same_log, both, figures, sentences, train
from transformers import TrainerCallback
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.compile.layers import compiled_layers
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.testing import count_host_syncs

FAMILIES = [family for family in HYBRIDS if family not in ("granitemoehybrid", "lfm2_moe")]
"""Stock raises with granitemoehybrid, whose configuration has no ``num_experts``; lfm2_moe is lfm2 with experts."""
LONG = {"max_length": 256, "eval_strategy": "no", "logging_steps": 1, "per_device_train_batch_size": 2}


def documents() -> Dataset:
    """Of up to 200 tokens: states cross chunks."""
    return Dataset.from_dict({"text": sentences(24, 5, 200)})


def adapters() -> Any:
    from peft import LoraConfig

    # PEFT refuses `out_proj` and `conv1d` of some of these families by name.
    return LoraConfig(r=4, target_modules=r".*\.(in_proj\w*|q_proj|v_proj|o_proj)", lora_alpha=4)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", [*FAMILIES, "composite"])
def test_the_log_of_a_run_is_stocks(family: str, lora: bool, tmp_path: Path) -> None:
    """TRL pads its batches; ours are rows without padding, two micro-batches merged to one."""
    if family == "composite":
        model = composite_model()
    elif reached(family):
        model = hybrid_model(family)
    else:
        pytest.skip("absent from this transformers, or in padded rows with it")
    ours, stock = both(
        tmp_path, model=model, data=documents(), trainer={"peft_config": adapters()} if lora else {},
        gradient_accumulation_steps=2, learning_rate=1e-4, **LONG,
    )  # fmt: skip
    report = {line.feature: (line.status, line.path) for line in ours.fastpack_report}
    assert report["packed_attention"] == ("on", "per_document")
    assert report["verify_packing"] == ("on", "proof")
    assert report["merge_accumulation"][0] == ("off" if family == "composite" else "on")
    assert_same_log(ours, stock, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", ["qwen3_5_text", "olmo_hybrid", "bamba", "lfm2"])
def test_packed_rows_are_proven_and_run_without_a_wait_per_step(family: str, tmp_path: Path) -> None:
    if not reached(family):
        pytest.skip("in padded rows with this transformers")
    trainer = train(
        FastSFTTrainer, tmp_path, model=hybrid_model(family), data=documents(), packing=True, max_length=512,
        eval_strategy="no", logging_steps=4,
    )  # fmt: skip
    assert trainer.fastpack_report["verify_packing"].path == "proof"
    model, (ids, batch) = trainer.model, row((150, 3, 40))
    with packed_attention(model), count_host_syncs() as syncs:
        loss_of(model, ids, batch).backward()
    assert syncs.total == 0, syncs.entries


class Generates(TrainerCallback):
    """Generates after each step, from prompts with padding on the left."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
        ids = torch.randint(5, 90, (2, 70), generator=torch.Generator().manual_seed(3))
        mask = torch.ones_like(ids)
        mask[0, :30] = 0
        model.eval()
        with torch.no_grad():
            found = model.generate(
                ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        self.seen.append(found)
        model.train()


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1"])
def test_generating_in_the_middle_of_a_run_is_stocks(family: str, tmp_path: Path) -> None:
    runs, texts = [], []
    for trainer in (FastSFTTrainer, SFTTrainer):
        callback = Generates()
        more: Any = {"trainer": {"callbacks": [callback]}, **LONG}
        runs.append(train(trainer, tmp_path / trainer.__name__, model=hybrid_model(family), data=documents(), **more))
        texts.append(callback.seen)
    assert len(texts[0]) == 4
    for ours, stock in zip(*texts, strict=True):
        assert_same_tokens(ours, stock)
    assert_same_log(*runs, rtol=1e-5, atol=1e-6)


# In a process where the packages are installed: transformers decides on import which of their functions it calls.
BROKEN_RUN = """
import sys
from pathlib import Path
from hybrid_material import hybrid_model
from test_training import LONG, documents
from trainer_material import build, figures
from fastpack_trl import FastSFTTrainer

for family in ("qwen3_5_text", "falcon_h1"):
    for proof in ("auto", "off"):
        runner = build(
            FastSFTTrainer, Path(sys.argv[1], family), model=hybrid_model(family), data=documents(),
            fast={"verify_packing": proof}, **LONG,
        )
        try:
            runner.train()
            print("losses:", *(row["loss"] for row in figures(runner) if "loss" in row))
        except RuntimeError as error:
            print("raised:", error, "|", runner.fastpack_report["batches"].reason)
"""
PACKAGES = {
    "causal_conv1d": "causal_conv1d_fn", "fla.ops.gated_delta_rule": "chunk_gated_delta_rule",
    "mamba_ssm.ops.triton.ssd_combined": "mamba_chunk_scan_combined",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["import", "call"])
def test_packages_that_are_broken_are_named_and_do_not_matter_to_packed_rows(broken: str, tmp_path: Path) -> None:
    """If a call raises, transformers runs no batch, and the packing check, which compares with it, names it."""
    for package, name in PACKAGES.items():
        folder = tmp_path / "site" / package.replace(".", "/")
        folder.mkdir(parents=True)
        source = f"def {name}(*args, **kwargs): raise RuntimeError('{package} is broken')"
        (folder / "__init__.py").write_text("raise OSError('undefined symbol')" if broken == "import" else source)
    path = os.pathsep.join([str(tmp_path / "site"), str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", BROKEN_RUN, str(tmp_path)], env={**os.environ, "PYTHONPATH": path},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("raised: ", "losses: "))]
    for family, (proven, unproven) in zip(("qwen3_5_text", "falcon_h1"), (lines[:2], lines[2:]), strict=True):
        whole = train(FastSFTTrainer, tmp_path / family, model=hybrid_model(family), data=documents(), **LONG)
        losses = pytest.approx([row["loss"] for row in figures(whole) if "loss" in row], rel=1e-6)
        assert [float(loss) for loss in unproven.split()[1:]] == losses
        if broken == "import":
            assert [float(loss) for loss in proven.split()[1:]] == losses
        else:
            assert proven.startswith("raised: causal_conv1d is broken | ")
            assert "the proof cannot run on this model: RuntimeError: causal_conv1d is broken" in proven


def row(lengths: tuple[int, ...]) -> tuple[Tensor, PackedBatch]:
    ids = torch.randint(3, 90, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    return ids, PackedBatch.from_lengths(lengths, labels=ids)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1", "lfm3"])
def test_rows_of_other_lengths_share_a_few_graphs(family: str) -> None:
    """No break inside of a layer, and at most three graphs for a kind of layer."""
    if not reached(family):
        pytest.skip("in padded rows with this transformers")
    model, backend = hybrid_model(family), Counting(differentiate=True)
    with packed_attention(model), compiled_layers(model, verbose=False, _backend=backend) as layers:
        for lengths in ((150, 3, 40), (70, 58, 1), (64, 64), (300, 9), (20, 11, 5), (129, 127)):
            one_step(model, *row(lengths))
    assert layers.path == "compiled", layers.reason
    assert backend.graphs <= 3 * len(layers.kinds)
