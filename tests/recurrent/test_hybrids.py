"""Hybrid models: packed rows equal separate documents, nothing leaks, and everything but a packed row stays stock's."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from attention_material import packed, separate
from model_material import HYBRIDS, hybrid_model, long_row, reached
from shared_material import tree_row
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from fastpack_trl.attention import install
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.attention.proof import verify_packing
from fastpack_trl.errors import NonFiniteError, PackingError
from fastpack_trl.model.facts import read_features
from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs
from fastpack_trl.recurrent.seams import OURS
from fastpack_trl.testing import count_host_syncs, gradients


def in_rows_of_their_own(model: Any, ids: Tensor, batch: PackedBatch) -> dict[str, Tensor]:
    """Gradients of the documents, each as a packed row."""
    for document in ids.split(batch.seq_lengths, dim=1):
        row = PackedBatch.from_lengths((document.shape[1],), labels=document)
        (packed(model, document, row) * len(row.loss_positions) / len(batch.loss_positions)).backward()
    return gradients(model)


@pytest.mark.parametrize("family", HYBRIDS)
def test_packed_loss_and_gradients_equal_separate_documents_and_are_proven(family: str) -> None:
    if not reached(family):
        assert "conv layers" in read_features(hybrid_model(family)).gap
        return
    model, (ids, batch) = hybrid_model(family), long_row()
    expected_loss, stock = separate(model, ids, batch)
    with packed_attention(model) as attention:
        assert attention.path == "per_document"
        assert "over chunks" in attention.choice.reason
        with count_host_syncs() as syncs:
            loss = packed(model, ids, batch)
            loss.backward()
        assert syncs.total == 0, syncs.entries
        # In float64 stock's functions would still compute in fp32: ours, in rows of one document, are the exact ones.
        wide = copy.deepcopy(model).double()
        if getattr(wide.config, "_experts_implementation", None) is not None:
            wide.set_experts_implementation("eager")  # grouped matrix products know no float64
        exact = in_rows_of_their_own(wide, ids, batch)
    actual = gradients(model)
    assert abs(loss.item() - expected_loss) <= 1e-5
    assert actual.keys() == stock.keys() == exact.keys()
    everything = float(torch.stack([gradient.norm() for gradient in exact.values()]).norm())
    for name, right in exact.items():
        error, theirs = (float((side[name].double() - right).norm()) for side in (actual, stock))
        # The gradients of `A_log` and `dt_bias` are tiny sums of large numbers, in stock as here.
        assert error <= 2 * theirs + 1e-5 * float(right.norm()) + 1e-8 * everything, name
    proof = verify_packing(model)
    assert proof.proven, str(proof)
    assert max(proof.lengths) > 2 * 64  # carries a state across chunks


@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1"])
def test_the_proof_finds_a_state_that_is_kept_across_documents(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only from chunk to chunk: a probe of a few dozen tokens would not see it. And a dropped keyword."""
    model, right = hybrid_model(family), install.chunks_of
    monkeypatch.setattr(install, "chunks_of", lambda row: right(row)._replace(carry_in=right(row).carry_in | True))
    assert verify_packing(model).leaks
    monkeypatch.setattr(install, "chunks_of", right)
    mixer = next(module for module in model.modules() if hasattr(module, "conv1d"))
    forward = mixer.forward
    mixer.forward = lambda hidden_states, **keywords: forward(hidden_states, **keywords)
    assert verify_packing(model).proven
    mixer.forward = lambda hidden_states, **_dropped: forward(hidden_states)
    assert verify_packing(model).leaks


class Func(torch.nn.Module):
    """What the package `kernels` makes of a function, for the case that a kernel of the hub is asked for."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = (function,)  # no part of it, if the package is there and has made a module of it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function[0](*args, **kwargs)


@pytest.mark.parametrize("wrapped", [False, True], ids=["", "wrapped"])
@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "lfm3"])
def test_ordinary_batches_stay_bit_equal_to_stock(family: str, wrapped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left-padded `generate` and padded evaluation, while the functions are replaced; all is restored on exit."""
    reached(family)
    model, (row, batch) = hybrid_model(family).eval(), long_row()
    home = sys.modules[type(model).__module__]
    for name in OURS if wrapped else ():
        if callable(vars(home).get(name)):
            monkeypatch.setattr(home, name, Func(vars(home)[name]))
    before = {name: vars(home).get(name) for name in OURS}
    ids = torch.randint(3, 96, (3, 80), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, :50], mask[1, :2] = 0, 0

    def outputs() -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
            generated = model.generate(ids, attention_mask=mask, **options)
            return generated, model(input_ids=ids, attention_mask=mask.flip(1), use_cache=False).logits

    expected, loss = outputs(), separate(model, row, batch)[0]
    with packed_attention(model):
        assert all(vars(home).get(name) is not stock for name, stock in before.items() if stock is not None)
        with packed_attention(hybrid_model(family)):  # another model of the family, in the same process
            actual = outputs()
        again = outputs()
        assert abs(packed(model, row, batch).item() - loss) <= 1e-5
    assert {name: vars(home).get(name) for name in OURS} == before
    assert all(torch.equal(*pair) for pair in zip(actual + again, expected * 2, strict=True))


def test_only_layers_whose_functions_are_called_pack() -> None:
    model, (ids, batch) = hybrid_model("qwen3_next"), long_row()
    layer = model.model.layers[0].linear_attn
    layer.__class__ = type("Inherits", (cls := type(layer),), {})
    expected = separate(model, ids, batch)[0]
    with packed_attention(model):
        assert abs(packed(model, ids, batch).item() - expected) <= 1e-5
    model._use_kernels = True
    with pytest.raises(ValueError, match=r"hub kernels in .*use_kernels=True"), packed_attention(model):
        pass
    model._use_kernels = False
    layer.__class__ = type("Overrides", (cls,), {"forward": lambda self, *args, **kwargs: None})
    with pytest.raises(ValueError, match="qwen3_next has linear_attention layers"), packed_attention(model):
        pass


HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "lru_width": 32}


@pytest.mark.parametrize(("family", "more"), [("mamba", {}), ("recurrent_gemma", {**HEADS, "num_hidden_layers": 3})])
def test_families_that_no_function_reaches_are_named(family: str, more: dict[str, int]) -> None:
    sizes = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "pad_token_id": 0, "intermediate_size": 48}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes | more))
    with pytest.raises(ValueError, match=f"{family} (has linear|does not call|mixes tokens)"), packed_attention(model):
        pass


def test_a_row_takes_no_cache_and_no_shared_prefixes_and_nan_stays_nan() -> None:
    model, (ids, batch) = hybrid_model("qwen3_next").eval(), long_row((9, 6))
    keywords = {"input_ids": ids, "packed_batch": batch, **to_transformers_kwargs(batch)}
    tree = tree_row((4, 3, 3), (-1, 0, 0))
    with packed_attention(model), torch.no_grad():
        assert model(**keywords).past_key_values is None
        with pytest.raises(PackingError, match="use_cache=False"):
            model(past_key_values=DynamicCache(config=model.config), **keywords)
        with pytest.raises(PackingError, match=r"gated delta rule.*without shared prefixes"):
            model(input_ids=ids[:, :10], packed_batch=tree, use_cache=False, **to_transformers_kwargs(tree))
        model.model.layers[0].linear_attn.A_log.fill_(torch.nan)
        assert packed(model, ids, batch).isnan()
    with pytest.raises(NonFiniteError, match=r"linear_attn\.A_log"):
        verify_packing(model)
