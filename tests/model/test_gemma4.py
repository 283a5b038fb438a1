"""Gemma 4, whose last layers may share the keys of an earlier one and which reads token ids beside embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import preference_material as preference
import pytest
import torch
from model_material import STEPS, gemma4
from peft import LoraConfig
from trainer_material import assert_same_log, both, make_tokenizer, train

from fastpack_trl import FastSFTTrainer, PackedBatch, packed_attention, verify_packing
from fastpack_trl.attention.backends import BACKENDS
from fastpack_trl.cli.main import main
from fastpack_trl.errors import PackingError
from fastpack_trl.testing import tiny_model

CPU, CUDA = "cpu", pytest.param("cuda", marks=pytest.mark.cuda)
LORA = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "o_proj"])}
MODELS = [("text", 0, "full"), ("text", 2, "sliding"), ("composite", 3, "three")]
SLOW = [pytest.param(*model, marks=pytest.mark.slow) for model in (("text", 2, "full"), ("composite", 3, "three"))]

of_models = pytest.mark.parametrize(("kind", "shared", "last"), [*MODELS, SLOW[0]])
of_few = pytest.mark.parametrize(("kind", "shared", "last"), SLOW)


@of_models
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_every_attention_is_proven(kind: str, shared: int, last: str, device: str) -> None:
    """Also past the window; a kernel that reads past its tensors ends the process."""
    paths = ("auto", "sdpa", "off") if device == "cpu" else ("auto", "varlen", "per_document", "off")
    for dtype in (torch.float32, torch.bfloat16) if device == "cpu" else (torch.bfloat16,):
        model = gemma4(kind, shared, last, dtype).to(device)
        for path in paths:
            for lengths in ({}, {"lengths": (9, 40, 6)}):
                proof = verify_packing(model, implementation=path, **lengths).raise_if_failed()
                assert not proof.not_exercised


@of_models
@pytest.mark.parametrize("device", [CPU, CUDA])
def test_every_attention_refuses_rows_cut_inside_of_a_model(kind: str, shared: int, last: str, device: str) -> None:
    """One cuts the queries of its layers with shared keys, as transformers' versions do; another, queries and keys."""
    model = gemma4(kind, shared, last)

    def cut(_module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        kwargs["hidden_states"] = kwargs["hidden_states"][:, -6:]
        kwargs["position_embeddings"] = tuple(part[:, -6:] for part in kwargs["position_embeddings"])
        return args, kwargs

    other = tiny_model("qwen3")
    other.model.layers[1].self_attn.register_forward_pre_hook(cut, with_kwargs=True)
    ids = torch.randint(3, 90, (1, 30), generator=torch.Generator().manual_seed(1)).to(device)
    batch, ran = PackedBatch.from_lengths((9, 1, 14, 6)).to(device), []
    row = {"input_ids": ids, "packed_batch": batch, "position_ids": batch.position_ids, "use_cache": False}
    for each, fields in ((model, {"logits_to_keep": 4}), (other, {})):
        each = each.to(device, torch.float32 if device == "cpu" else torch.bfloat16).eval()
        for name in BACKENDS:
            said = ""
            try:
                with packed_attention(each, name):
                    found = each(**row, **fields).logits
                    whole = each(**row).logits[:, -4:] if each is model else None
            except (ValueError, PackingError) as error:
                said = str(error)
            if "cannot be used here" in said:
                continue
            if each is model and not said:  # this transformers cuts nothing there
                torch.testing.assert_close(found, whole)
            else:
                text = "4 queries over 30 keys" if each is model else "6 queries over 6 keys and 6 values"
                assert text in said, (name, said)
                assert "end at 30" in said
            ran.append(name)
    assert {"per_document", "sdpa"} | ({"varlen"} if device == "cuda" else set()) <= set(ran)


@of_models
@pytest.mark.parametrize(
    "options", [{"packing": True}, {"packing": True, "trainer": LORA}, {}], ids=["packed", "packed-lora", "padded"]
)
def test_training_is_as_under_stock(kind: str, shared: int, last: str, options: dict[str, Any], tmp_path: Path) -> None:
    ours, stock = both(tmp_path, model=gemma4(kind, shared, last), **options, **STEPS)
    assert ours.fastpack_report["packed_attention"].path == "per_document"
    assert ours.fastpack_report["verify_packing"].path == "passed"
    for run in (ours, stock):
        run.evaluate()
    assert_same_log(ours, stock, rtol=2e-5, atol=1e-5)


@of_few
@pytest.mark.parametrize("name", ["DPO", "GRPO"])
def test_preferences_are_as_under_stock(kind: str, shared: int, last: str, name: str, tmp_path: Path) -> None:
    runs = []
    for fast in (True, False):
        options = {"model": gemma4(kind, shared, last), "trainer": LORA, **STEPS}
        runs.append(preference.build(name, tmp_path / str(fast), fast=fast, **options))
        runs[-1].train()
    assert runs[0].fastpack_report["packed_attention"].path == "per_document"
    preference.assert_same(*runs, rtol=2e-5, atol=1e-5)


@of_few
def test_stock_is_proven_and_so_is_a_saved_model(kind: str, shared: int, last: str, tmp_path: Path) -> None:
    off = {"packed_attention": "off"}
    run = train(FastSFTTrainer, tmp_path, model=gemma4(kind, shared, last), fast=off, packing=True, **STEPS)
    assert run.fastpack_report["verify_packing"].path == "passed, TRL's rows"
    gemma4(kind, shared, last).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    assert main(["verify", "--model", str(tmp_path / "model")]) == 0
