"""A trainer made in the middle of another's training of the same model: a callback that evaluates, probes or tunes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from side_by_side import assert_equal
from torch import Tensor
from trainer_material import build, figures, make_dataset, train
from transformers import TrainerCallback
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.errors import PackingError
from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs
from fastpack_trl.testing import tiny_model


class Nest(TrainerCallback):
    """After the second step makes a trainer on the same model, and calls it."""

    def __init__(self, cls: type[SFTTrainer], folder: Path, calls: tuple[str, ...], **options: Any) -> None:
        self.cls, self.calls = cls, calls
        self.folder, self.options = folder / "inner", {"packing": True, "max_steps": 2, "eval_strategy": "no"} | options
        self.inner: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.inner is not None:
            return
        data = {"train_dataset": make_dataset("text", seed=3)}
        self.inner = build(self.cls, self.folder, model=model, trainer=data, **self.options)
        for call in self.calls:
            getattr(self.inner, call)()


def nested(
    outer: type[SFTTrainer], inner: type[SFTTrainer], folder: Path, calls: tuple[str, ...], **options: Any
) -> tuple[Any, Any, list[dict[str, float]]]:
    """Both trainers, and every figure that they logged: of the first training, the nested calls, a second training."""
    family = options.pop("family", "qwen3")
    nest = Nest(inner, folder, calls, **options)
    trainer = train(
        outer, folder / "outer", model=tiny_model(family), packing=True, trainer={"callbacks": [nest]}, **options
    )
    logs = figures(trainer) + figures(nest.inner)
    trainer.train()
    return trainer, nest.inner, logs + figures(trainer)


ALL = ("evaluate", "train", "evaluate")


@pytest.mark.parametrize(
    ("calls", "options"),
    [((), {}), (("evaluate",), {}), (ALL, {}), (ALL, {"gradient_accumulation_steps": 2}), (ALL, {"bf16": True})],
    ids=str,
)
def test_a_trainer_made_in_a_callback_of_another_logs_as_stocks_do(
    tmp_path: Path, calls: tuple[str, ...], options: dict[str, Any]
) -> None:
    *_, expected = nested(SFTTrainer, SFTTrainer, tmp_path / "stock", calls, **options)
    rtol = 2e-2 if "bf16" in options else 1e-5
    pairs = [(FastSFTTrainer, FastSFTTrainer)]
    if calls == ALL and not options:
        pairs += [(FastSFTTrainer, SFTTrainer), (SFTTrainer, FastSFTTrainer)]
    for outer, inner in pairs:
        first, second, logs = nested(outer, inner, tmp_path / f"{outer.__name__}-{inner.__name__}", calls, **options)
        assert_equal(logs, expected, rtol, rtol / 5)
        for trainer in (first, second):
            if isinstance(trainer, FastSFTTrainer):
                assert trainer.fastpack_report["packed_attention"].path == "per_document"
                if trainer is first or "train" in calls:
                    assert trainer.fastpack_report["sync_free"].path == "loss, metrics, host work"
        model = first.model
        assert model.config._attn_implementation == "sdpa"
        assert not [name for module in model.modules() for name in vars(module) if name.startswith("_fastpack")]


def test_experts_and_a_leaking_family_nest_too(tmp_path: Path) -> None:
    """Stock's own figures are no reference in gpt_oss: what trains alone is."""
    first, second, _ = nested(
        FastSFTTrainer, FastSFTTrainer, tmp_path, ("evaluate", "train"), family="gpt_oss", router_aux_loss_coef=0.1
    )
    for trainer in (first, second):
        assert trainer.fastpack_report["packed_attention"].path == "per_document"
        assert trainer.fastpack_report["moe"].status == "on"
        assert trainer.fastpack_proof is not None
        assert trainer.fastpack_proof.proven
    assert first.model.config._attn_implementation == "eager"
    assert not [name for module in first.model.modules() for name in vars(module) if name.startswith("_fastpack")]


def packed(model: Any, batch: PackedBatch) -> Tensor:
    ids = torch.arange(batch.total_tokens)[None] % 90
    logits: Tensor = model(input_ids=ids, use_cache=False, packed_batch=batch, **to_transformers_kwargs(batch)).logits
    return logits.detach()


@pytest.mark.parametrize("first_out", ["outer", "inner"])
@pytest.mark.parametrize("inner_path", ["per_document", "sdpa"])
def test_the_model_is_restored_with_the_last_who_leaves(inner_path: str, first_out: str) -> None:
    model = tiny_model("gpt_oss").eval()
    before = [sorted(vars(module)) for module in model.modules()]
    batch = PackedBatch.from_lengths((9, 3, 7))
    with packed_attention(model):
        expected = packed(model, batch)
    stacks = {name: contextlib.ExitStack() for name in ("outer", "inner")}
    stacks["outer"].enter_context(packed_attention(model))
    attention = stacks["inner"].enter_context(packed_attention(model, inner_path))
    assert attention.features.implementation == "eager"
    torch.testing.assert_close(packed(model, batch), expected)
    stacks.pop(first_out).close()
    batch.clear_derived()
    torch.testing.assert_close(packed(model, batch), expected)
    (last,) = stacks.values()
    last.close()
    assert model.config._attn_implementation == "eager"
    assert [sorted(vars(module)) for module in model.modules()] == before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_an_attention_that_is_switched_while_packed_rows_run_is_named() -> None:
    """Stock's function would read our mask as no mask at all."""
    model = tiny_model("qwen3")
    with (
        packed_attention(model),
        pytest.raises(PackingError, match="attn_implementation was set to 'eager' in the middle"),
    ):
        model.set_attn_implementation("eager")
        packed(model, PackedBatch.from_lengths((3, 4)))
