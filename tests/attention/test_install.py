"""The seam into transformers: what is built, how often, what is restored, what is refused."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_material import LENGTHS, snapshot
from torch import Tensor
from torch.testing import assert_close
from trainer_material import assert_same_log, train
from transformers import AutoConfig, AutoModelForCausalLM
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention.backends import BACKENDS
from fastpack_trl.attention.install import PackedAttention, backend_installed, packed_attention
from fastpack_trl.attention.interface import AttentionCall
from fastpack_trl.attention.per_document import PerDocumentLayer
from fastpack_trl.errors import PackingError
from fastpack_trl.model.facts import read_features
from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs
from fastpack_trl.run import Choice
from fastpack_trl.testing import tiny_model

IDS = torch.randint(3, 96, (1, 30), generator=torch.Generator().manual_seed(1))


def forward(model: Any, batch: PackedBatch | None = None) -> Tensor:
    batch = PackedBatch.from_lengths(LENGTHS) if batch is None else batch
    keywords = {"packed_batch": batch, "use_cache": False, **to_transformers_kwargs(batch)}
    logits: Tensor = model(input_ids=IDS, **keywords).logits
    return logits


@pytest.mark.parametrize("implementation", ["auto", "sdpa"])
@pytest.mark.parametrize("family", ["qwen3", "gpt_oss"])
def test_model_is_as_stock_made_it_after_success_an_exception_and_a_refusal(family: str, implementation: str) -> None:
    model = tiny_model(family)
    before = snapshot(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # switching is silent
        with packed_attention(model, implementation):
            forward(model).sum().backward()
    assert snapshot(model) == before
    with pytest.raises(ZeroDivisionError), packed_attention(model, implementation):
        forward(model)
        _ = 1 / 0
    assert snapshot(model) == before
    model = tiny_model("falcon")
    before = snapshot(model)
    message = "keeps the documents of this falcon apart: .*does not call.*; train with packing=False"
    with pytest.raises(ValueError, match=message), packed_attention(model):
        pass
    assert snapshot(model) == before


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copy_taken_inside_after_a_batch_works_inside_and_as_stock_outside(duplicate: Any) -> None:
    """A callback that averages weights copies the model in the middle of training."""
    model = tiny_model("mistral").eval()
    expected = model(input_ids=IDS, use_cache=False).logits
    batch = PackedBatch.from_lengths(LENGTHS)
    with packed_attention(model):
        packed = forward(model, batch)
        other = duplicate(model)
        assert torch.equal(forward(other, batch), packed)
    assert torch.equal(other(input_ids=IDS, use_cache=False).logits, expected)


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("implementation", ["per_document", "sdpa"])
def test_metadata_is_built_once_per_batch_and_does_not_outlive_the_next(
    monkeypatch: pytest.MonkeyPatch, implementation: str, checkpointing: bool
) -> None:
    backend, built = type(BACKENDS[implementation]), list[PackedBatch]()
    prepare = backend.prepare

    def counted(self: Any, batch: PackedBatch, *where: Any) -> Any:
        built.append(batch)
        return prepare(self, batch, *where)

    kinds = ["sliding_attention", "full_attention"] * 4
    model = tiny_model("gemma3_text", num_hidden_layers=8, layer_types=kinds)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    batches = [PackedBatch.from_lengths(lengths) for lengths in (LENGTHS, (15, 15), LENGTHS)]
    alive: list[Any] = []
    with packed_attention(model, implementation):
        monkeypatch.setattr(backend, "prepare", counted)
        for batch in batches:
            forward(model, batch).sum().backward()
            gc.collect()
            assert not any(reference() is not None for reference in alive)
            layer = next(value for key, value in batch.derived.values.items() if key[0] == implementation)
            alive = [weakref.ref(mask) for mask in layer.masks.values()]
            assert alive
            del layer
    assert built == batches
    assert not any(batch.derived.values for batch in batches)


def test_autocast_decides_the_dtype_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL trains fp32 weights in bf16 autocast: queries and keys arrive in fp32, values in bf16."""
    seen = []
    model, attend = tiny_model("qwen3"), PerDocumentLayer.attend
    with packed_attention(model):
        pass  # it is tried

    def record(self: Any, call: AttentionCall) -> Tensor:
        seen.append((call.query.dtype, call.key.dtype, call.value.dtype))
        return attend(self, call)

    monkeypatch.setattr(PerDocumentLayer, "attend", record)
    with packed_attention(model), torch.autocast("cpu", torch.bfloat16):
        forward(model).float().sum().backward()
    assert set(seen) == {(torch.bfloat16,) * 3}


def test_metadata_that_does_not_describe_its_row_or_does_not_arrive_is_named() -> None:
    model = tiny_model("qwen3")
    with packed_attention(model), pytest.raises(ValueError, match=r"documents of 20 tokens .* a row of 30"):
        model(input_ids=IDS, packed_batch=PackedBatch.from_lengths((9, 11)), use_cache=False)
    # The guard behind the reading of the source.
    model = tiny_model("stablelm")
    features = replace(read_features(model), gap="")
    handle = PackedAttention(Choice("per_document", ""), features)
    with backend_installed(model, handle):
        with pytest.raises(PackingError, match="drop keywords; set packing=False"):
            forward(model)


def test_two_models_share_the_registered_name_and_rows_without_metadata_are_one_document() -> None:
    first, second = tiny_model("qwen3"), tiny_model("llama")
    with packed_attention(first):
        expected = forward(first)
        with packed_attention(second):
            packed = forward(second)
        assert torch.equal(forward(first), expected)
        leaking = second(input_ids=IDS, use_cache=False).logits
    assert torch.equal(leaking, second(input_ids=IDS, use_cache=False).logits)
    assert not torch.allclose(leaking, packed, atol=1e-3)


def test_attention_dropout_acts_in_stocks_function_with_dense_masks() -> None:
    model = tiny_model("qwen3", attention_dropout=0.2)
    with packed_attention(model) as attention:
        assert attention.path == "sdpa"
        assert not torch.equal(forward(model), forward(model))


@pytest.mark.parametrize(("packing", "path"), [(True, "documents"), (False, "stock")])
def test_model_whose_layers_add_to_the_mask_trains_in_bf16_as_stock(tmp_path: Path, packing: bool, path: str) -> None:
    """Doge's learned mask moves hidden states by less than what bf16 does to those of other models."""
    fields = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("doge", vocab_size=96, **fields))
    given = {"packing": packing, "bf16": True, "router_aux_loss_coef": 0.0, "eval_strategy": "no"}
    ours, stock = (train(cls, tmp_path, model=copy.deepcopy(model), **given) for cls in (FastSFTTrainer, SFTTrainer))
    assert ours.fastpack_report["batches"].path == path
    assert "makes an attention mask of its own" in str(ours.fastpack_report)
    assert_same_log(ours, stock, rtol=2e-2)
    assert_close(ours.model.state_dict(), stock.model.state_dict(), rtol=0, atol=5e-3)
