"""The packing check sees each kind of leak, in plain rows and in rows with shared prefixes, and no hook sees it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from odd_models import Bigrams, Unigrams, model_with
from torch import nn

from fastpack_trl.attention import install, probe
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.attention.per_document import PerDocument, PerDocumentLayer
from fastpack_trl.attention.probe import SHARED_LENGTHS
from fastpack_trl.attention.proof import PackingProof, verify_packing, verify_shared
from fastpack_trl.errors import NonFiniteError
from fastpack_trl.model import facts
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.packing.shared_keys import SharedKeys
from fastpack_trl.testing import tiny_model

SHARING = ("llama", "qwen3", "gemma2", "gemma3_text", "mistral", "gpt_oss", "qwen3_moe", "deepseek_v3", "opt")


@pytest.mark.parametrize(
    ("device", "dtype", "family", "window"),
    [
        *(("cpu", torch.float32, *case) for case in (("mistral", 5), ("gpt_oss", 40))),
        ("cpu", torch.bfloat16, "mistral", 5),
        *(
            pytest.param("cuda", torch.bfloat16, *case, marks=pytest.mark.cuda)
            for case in (("gpt_oss", 128), ("gemma3_text", 512), ("mistral", 1024))
        ),
    ],
)
def test_window_that_is_one_off_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, device: str, dtype: torch.dtype, family: str, window: int
) -> None:
    sizes = {"max_position_embeddings": 2048, "hidden_size": 64, "head_dim": 16} if device == "cuda" else {}
    model, window_of = tiny_model(family, sliding_window=window, **sizes).to(device, dtype), facts.window_of
    for implementation in ("auto", "per_document", "sdpa") if device == "cuda" else ("auto",):
        proof = verify_packing(model, implementation=implementation)
        assert proof.proven, (implementation, str(proof))
        assert not proof.not_exercised
    for by in (-1, 1):

        def wrong(module: nn.Module, by: int = by) -> int | None:
            size = window_of(module)
            return None if size is None else size + by

        with monkeypatch.context() as patch:  # for our path; stock makes its masks as before
            patch.setattr(facts, "window_of", wrong)
            patch.setattr(install, "window_of", wrong)
            # 1,025 is past what is exercised; asked for by its lengths, it is all the same.
            proof = verify_packing(model, lengths=(9, window + 16, 6) if device == "cuda" else None)
        assert not proof.proven
        assert {(seen, right) for _, seen, right in proof.windows} == {(window + by, window)}
        assert f"sees {window + by}, not {window}" in str(proof)
        if dtype == torch.float32:  # below, rounding is larger than what one token more or less changes
            assert proof.budget is not None
            assert proof.difference > 10 * proof.budget


def test_windows_up_to_512_tokens_are_exercised_on_the_cpu_where_they_are_affordable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for family, window in (("gpt_oss", 128), ("gemma3_text", 512)):
        proof = verify_packing(tiny_model(family, sliding_window=window, max_position_embeddings=1024))
        assert (proof.proven, proof.not_exercised) == (True, ())
        assert max(proof.past_window) > window + 1
    proof = verify_packing(tiny_model("mistral", sliding_window=513, max_position_embeddings=1024))
    assert (proof.proven, proof.not_exercised, proof.past_window) == (True, ("window 513",), ())
    # A document of the model's own positions never exceeds this one.
    assert verify_packing(tiny_model("mistral", sliding_window=120)).not_exercised == ("window 120",)
    # The last token of 6 predicts nothing: none of those that do sees less than all before it.
    for lengths, skipped in (((6, 3), ("window 5",)), ((7, 3), ())):
        assert verify_packing(tiny_model("mistral"), lengths=lengths).not_exercised == skipped
    monkeypatch.setattr(probe, "_MOST_OPERATIONS", {"cpu": 1e6})
    assert verify_packing(tiny_model("mistral", sliding_window=40)).not_exercised == ("window 40",)


def test_check_makes_no_logits_but_of_the_last_token_and_runs_no_hook_of_the_user() -> None:
    model, rows, seen = tiny_model("gpt_oss", sliding_window=40), [], []
    head = model.lm_head.forward

    def counted(hidden: torch.Tensor) -> Any:
        rows.append(hidden.shape[1])
        return head(hidden)

    model.lm_head.forward = counted
    model.model.layers[0].register_forward_hook(lambda *_: seen.append("forward"))
    model.model.layers[1].mlp.register_full_backward_hook(lambda *_: seen.append("backward"))
    handle = nn.modules.module.register_module_forward_pre_hook(lambda *_: seen.append("global"))
    try:
        assert verify_packing(model).proven
        assert (set(rows), seen) == ({1}, [])
        model(input_ids=torch.ones(1, 3, dtype=torch.long)).logits.sum().backward()
        assert set(seen) == {"forward", "backward", "global"}
    finally:
        handle.remove()


def test_weights_and_packed_results_that_are_not_finite_are_never_within_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, name = tiny_model("qwen3"), "model.layers.1.mlp.up_proj.weight"
    attend = PerDocumentLayer.attend
    with packed_attention(model, "per_document") as attention, monkeypatch.context() as patch:
        patch.setattr(PerDocumentLayer, "attend", lambda *args: attend(*args) * torch.nan)
        proof = verify_packing(model, attention=attention)
    assert proof.difference == torch.inf
    assert len(proof.leaks) == 4 * 3, "a gradient that is NaN may hide one"
    with torch.no_grad():
        model.get_parameter(name).view(-1)[3] = torch.nan
    with pytest.raises(NonFiniteError, match=f"parameter {name} has non-finite values: 1 of 1,536"):
        verify_packing(model)


def test_leak_through_token_ids_alone_shows_in_the_hidden_states() -> None:
    proof = verify_packing(model_with(backbone=Bigrams))
    assert (proof.proven, proof.leaks) == (False, ()), "embeddings say nothing of it"
    assert verify_packing(model_with(backbone=Unigrams)).proven, "ids that stay in their document"


def shared_proof(model: Any, path: str = "per_document") -> PackingProof:
    with packed_attention(model, path) as attention:
        return verify_shared(model, attention)


@pytest.mark.parametrize(
    ("family", "path"),
    [*((family, "per_document") for family in SHARING), *((family, "sdpa") for family in ("llama", "gpt_oss", "opt"))],
)
def test_families_share_prefixes_right(family: str, path: str) -> None:
    proof = shared_proof(tiny_model(family), path)
    assert (proof.proven, proof.leaks) == (True, ()), proof
    assert proof.budget is not None


@pytest.mark.cuda
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "gemma3_text", "gpt_oss", "deepseek_v3"])
@pytest.mark.parametrize("path", ["varlen", "per_document"])
def test_families_share_prefixes_right_on_the_device(family: str, path: str) -> None:
    model = tiny_model(family).cuda()
    if getattr(model.config, "_experts_implementation", None) not in (None, "eager"):
        model.set_experts_implementation("eager")  # grouped matrix products are made for bf16 weights
    compute = torch.autocast("cuda", torch.bfloat16)
    with packed_attention(model, path, compute_dtype=torch.bfloat16) as attention, compute:
        assert verify_shared(model, attention).proven


@pytest.mark.parametrize(
    ("prefixes", "leaks", "unseen", "message"),
    [
        # One token of the first branch.
        ([[], range(7), range(8), range(7), range(7), []], {(1, 2)}, set(), "LEAK"),
        ([[]] * 6, set(), {(0, 1), (0, 2)}, "UNSEEN: segment 1 does not depend on segment 0"),
    ],
)
def test_branch_that_sees_another_or_not_its_prefix_is_named(
    monkeypatch: pytest.MonkeyPatch, prefixes: list[Any], leaks: Any, unseen: Any, message: str
) -> None:
    ends, stock = np.cumsum(SHARED_LENGTHS), PerDocument.prepare
    index = [[*prefix, *range(end - own, end)] for prefix, end, own in zip(prefixes, ends, SHARED_LENGTHS, strict=True)]
    keys = SharedKeys.of(np.array(SHARED_LENGTHS), np.array(list(map(len, prefixes))), np.concatenate(index))

    def prepare(self: PerDocument, batch: PackedBatch, *args: Any) -> Any:
        return stock(self, replace(batch, shared=keys if batch.shared is not None else None), *args)

    monkeypatch.setattr(PerDocument, "prepare", prepare)
    proof = shared_proof(tiny_model("llama"))
    assert not proof.proven
    assert {pair[:2] for pair in proof.leaks} == leaks
    assert unseen <= set(proof.unseen)
    assert message in str(proof)
    assert not replace(proof, difference=0.0).proven, "also where rounding would hide it"


def test_wrong_positions_of_a_branch_show_in_the_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = probe.packed_batch

    def shifted(*args: Any, **kwargs: Any) -> PackedBatch:
        batch = stock(*args, **kwargs)
        return replace(batch, position_ids=torch.arange(batch.total_tokens)[None], positions=None)

    monkeypatch.setattr(probe, "packed_batch", shifted)
    # Learned positions: a rotary embedding hides a shift of a whole segment, not of a part.
    proof = shared_proof(tiny_model("opt"))
    assert (proof.proven, proof.leaks) == (False, ())
    assert proof.budget is not None
    assert proof.difference > proof.budget
