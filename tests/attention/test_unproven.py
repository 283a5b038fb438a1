"""Models that the packing proof cannot run, leaks that only token ids show, and rows before `train()`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainer_material import assert_same_log, build, train
from transformers import Qwen3Model, TrainerCallback
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention.proof import verify_packing
from fastpack_trl.errors import PackingError
from fastpack_trl.testing import tiny_model


class Around(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


class Shift(Around):
    """Mixes neighbouring tokens outside of attention: no path keeps documents apart in it."""

    def forward(self, hidden: Tensor) -> Any:
        return self.layer(hidden) + nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]


class Noise(Around):
    """Drops in evaluation mode too, as Monte Carlo dropout does."""

    def forward(self, hidden: Tensor) -> Any:
        return nn.functional.dropout(self.layer(hidden), 0.1, training=True)


class OneRow(Qwen3Model):
    """Takes no positions of its caller's, as a packed row has them."""

    def forward(self, position_ids: Any = None, **kwargs: Any) -> Any:
        if position_ids is not None and not bool((position_ids.diff() == 1).all()):
            raise ValueError("one row at a time")
        return super().forward(position_ids=position_ids, **kwargs)


class Bigrams(Qwen3Model):
    """Adds embeddings of pairs of tokens (`reach` 1) or of tokens (0), which `inputs_embeds` says nothing of."""

    reach = 1

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **kwargs: Any) -> Any:
        if inputs_embeds is None:
            before = nn.functional.pad(input_ids, (self.reach, 0))[:, : input_ids.shape[1]]
            inputs_embeds = self.embed_tokens(input_ids) + self.pairs((input_ids * 31 + before * 17) % 64)
        return super().forward(inputs_embeds=inputs_embeds, **kwargs)


class Unigrams(Bigrams):
    reach = 0


class Strict(Around):
    """A layer that takes no keyword of its caller's but those that transformers' own layers name."""

    def forward(
        self, hidden_states: Any, attention_mask: Any = None, position_ids: Any = None, past_key_values: Any = None,
        use_cache: Any = None, position_embeddings: Any = None, cache: Any = None,
    ) -> Any:  # fmt: skip
        caches = {"cache": cache, "past_key_values": past_key_values}  # transformers 5.24 renamed it
        given = {name: value for name, value in caches.items() if value is not None}
        return self.layer(
            hidden_states, attention_mask=attention_mask, position_ids=position_ids, use_cache=use_cache,
            position_embeddings=position_embeddings, **given,
        )  # fmt: skip


def model_with(wrapper: Any = None, backbone: Any = None) -> Any:
    model = tiny_model("qwen3")
    if wrapper is Strict:
        model.model.layers[0] = Strict(model.model.layers[0])
    elif wrapper is not None:
        model.model.layers[0].mlp = wrapper(model.model.layers[0].mlp)
    if backbone is not None:
        model.model.__class__ = backbone
        generator = torch.Generator().manual_seed(0)
        model.model.pairs = nn.Embedding.from_pretrained(torch.randn(64, 32, generator=generator), freeze=False)
    return model


def trainer_of(cls: Any, folder: Path, model: Any, fast: dict[str, Any] | None = None, **more: Any) -> Any:
    return build(cls, folder, model=model, fast=fast, eval_strategy="no", max_steps=1, **more)


def evaluated(trainer: Any) -> float:
    return float(trainer.evaluate()["eval_loss"])


@pytest.mark.parametrize("wrapper", [Shift, Strict, Noise])
def test_rows_that_nobody_asked_to_pack_stay_padded_where_the_check_fails(tmp_path: Path, wrapper: Any) -> None:
    ours = train(FastSFTTrainer, tmp_path / "ours", model=model_with(wrapper))
    assert_same_log(ours, train(SFTTrainer, tmp_path / "stock", model=model_with(wrapper)))
    report = ours.fastpack_report
    assert report["batches"].status == "stock"
    why = "rows without padding are not proven: " if wrapper is Strict else "per_document failed its proof: "
    assert report["batches"].reason.startswith(why)
    ours.args.verify_packing = "off"
    if wrapper is not Strict:
        ours.train()
        assert ours.fastpack_run.plan.kind == "padding_free", "verify_packing='off' insists"


def test_packed_documents_are_padded_where_the_check_cannot_run(tmp_path: Path) -> None:
    model = model_with(backbone=OneRow)
    ours = train(FastSFTTrainer, tmp_path, model=model, packing=True, eval_strategy="no")
    assert ours.fastpack_report["batches"].path == "documents"
    reason = ours.fastpack_report["packed_attention"].reason
    assert "the proof cannot run on this model: ValueError: one row at a time" in reason
    with pytest.raises(ValueError, match=r"verify_packing='on': .*set verify_packing='auto' or 'off'"):
        train(FastSFTTrainer, tmp_path, model=model_with(backbone=OneRow), fast={"verify_packing": "on"})


def test_a_leak_through_token_ids_alone_fails_the_check_in_fp32(tmp_path: Path) -> None:
    proof = verify_packing(model_with(backbone=Bigrams))
    assert not proof.proven
    assert not proof.leaks, "embeddings say nothing of it"
    assert verify_packing(model_with(backbone=Unigrams)).proven, "ids that stay in their document"
    packed = train(FastSFTTrainer, tmp_path, model=model_with(backbone=Bigrams), packing=True, max_steps=1)
    assert packed.fastpack_report["batches"].path == "documents", "which gives each document ids of its own"
    models = (model_with(backbone=Bigrams) for _ in range(2))
    ours, stock = (train(cls, tmp_path, model=next(models)) for cls in (FastSFTTrainer, SFTTrainer))
    assert_same_log(ours, stock)
    assert "per_document failed its proof: " in ours.fastpack_report["batches"].reason


def test_rows_that_are_evaluated_before_training_are_proven_once(tmp_path: Path) -> None:
    ours = trainer_of(FastSFTTrainer, tmp_path, model_with())
    evaluated(ours)
    proof = ours.fastpack_proof
    assert proof is not None
    assert proof.proven
    assert ours.fastpack_run.plan.kind == "padding_free"
    ours.predict(ours.eval_dataset)
    assert ours.fastpack_proof is proof
    ours.train()
    trained = ours.fastpack_proof
    assert trained is not proof
    evaluated(ours)
    assert ours.fastpack_proof is trained
    off = trainer_of(FastSFTTrainer, tmp_path, model_with(), {"verify_packing": "off"})
    evaluated(off)
    assert (off.fastpack_proof, off.fastpack_run.plan.kind) == (None, "padding_free")
    alone = trainer_of(FastSFTTrainer, tmp_path, model_with(), per_device_train_batch_size=1)
    alone.eval_dataset, rows = None, alone.eval_dataset
    alone.train()
    assert alone.fastpack_proof is None, "each row is one document"
    alone.evaluate(rows)
    assert alone.fastpack_proof is not None


@pytest.mark.parametrize("attention", ["auto", "per_document"])
def test_an_evaluation_before_training_takes_stocks_batches_where_documents_leak(
    tmp_path: Path, attention: str
) -> None:
    ours = trainer_of(FastSFTTrainer, tmp_path, model_with(Shift), {"packed_attention": attention})
    stock = trainer_of(SFTTrainer, tmp_path, model_with(Shift))
    assert evaluated(ours) == pytest.approx(evaluated(stock), rel=1e-6)
    assert "per_document failed its proof: " in ours.fastpack_report["batches"].reason
    assert ours.predict(ours.eval_dataset).metrics["test_loss"] == pytest.approx(evaluated(stock), rel=1e-6)


def test_an_attention_that_is_switched_in_a_run_without_packing_is_named_with_its_remedy(tmp_path: Path) -> None:
    class Switch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            model.set_attn_implementation("eager")

    options: dict[str, Any] = {"max_steps": 1, "eval_strategy": "no", "trainer": {"callbacks": [Switch()]}}
    with pytest.raises(PackingError, match=r"set to 'eager' in the middle of a run .*set packed_attention='off'"):
        train(FastSFTTrainer, tmp_path, **options)
    train(FastSFTTrainer, tmp_path, fast={"packed_attention": "off"}, **options)
