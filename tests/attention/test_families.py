"""Every family: packed documents, also with images, equal separate ones or are refused; other batches are stock's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from attention_material import (
    LENGTHS,
    PER_DOCUMENT,
    assert_packed_equals_separate,
    make_row,
    packed,
    relative_errors,
    separate,
)  # fmt: skip
from model_material import KINDS_OF_TOKENS, SECTIONS, vision_model
from torch import Tensor

from fastpack_trl.attention.install import packed_attention
from fastpack_trl.attention.proof import verify_packing
from fastpack_trl.errors import PackingError
from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs
from fastpack_trl.testing import tiny_model

# With all experts chosen no token changes its experts for a rounding, which would move its loss by far more than one.
MOE = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss", "afmoe", "granitemoehybrid", "qwen3_next")
ALL_EXPERTS = {family: {"num_experts_per_tok": 4} for family in MOE}
BF16_ON_CPU = ("gemma3_text", "deepseek_v3", "gpt_oss", "opt", "qwen3_next")
# One rounding of the result: the mean loss of 26 tokens is too short a sum for its errors to average out.
ROUNDING = torch.finfo(torch.bfloat16).eps / 2


@pytest.mark.parametrize(
    ("family", "path", "checkpointing"),
    [
        *((family, "per_document", False) for family in PER_DOCUMENT),
        *((family, "per_document", True) for family in ("gemma3_text", "gpt_oss", "qwen3_moe")),
        *((family, "sdpa", False) for family in ("qwen3", "mistral", "gpt_oss", "gemma2", "deepseek_v3")),
    ],
)
def test_packed_loss_and_gradients_equal_separate_documents(family: str, path: str, checkpointing: bool) -> None:
    # transformers 5.17 gives gemma2 an sdpa that leaves out the softcap.
    model = tiny_model(family, **({"attn_implementation": "eager"} if (family, path) == ("gemma2", "sdpa") else {}))
    proof = verify_packing(model, implementation=path)
    assert (proof.proven, proof.leaks) == (True, ()), str(proof)
    requested = "auto" if path == "per_document" else path
    assert assert_packed_equals_separate(model, requested, checkpointing=checkpointing) == path


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "afmoe", "opt", "bloom", "falcon"])
def test_proof_finds_the_leaks_of_stock_that_other_tokens_show(family: str) -> None:
    """falcon, say, leaks until transformers 5.23."""
    model, (ids, _, batch), leaks = tiny_model(family), make_row(), set()

    def documents(row: Tensor) -> Any:
        with torch.no_grad():
            return model(input_ids=row, use_cache=False, **to_transformers_kwargs(batch)).logits[0].split(LENGTHS)

    before = documents(ids)
    for source, tokens in enumerate(torch.arange(sum(LENGTHS)).split(LENGTHS)):
        other = ids.clone()
        other[0, tokens] = 99 - other[0, tokens]
        pairs = enumerate(zip(before, documents(other), strict=True))
        leaks |= {(source, target) for target, pair in pairs if not torch.allclose(*pair, atol=1e-6)} - {(source,) * 2}
    proof = verify_packing(model, implementation="off", lengths=LENGTHS)
    assert {(source, target) for source, target, _ in proof.leaks} == leaks
    assert proof.proven == (not leaks)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gpt_oss", "opt", "qwen3_next"])
def test_ordinary_batches_stay_bit_equal_to_stock(family: str) -> None:
    """Left-padded `generate` and padded evaluation, while the feature is on."""
    model = tiny_model(family).eval()
    ids = torch.randint(3, 96, (3, 8), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, :5], mask[1, :2] = 0, 0

    def outputs() -> tuple[Tensor, Tensor, Tensor]:
        with torch.no_grad():
            generated = model.generate(
                ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
            padded = model(input_ids=ids, attention_mask=mask.flip(1), use_cache=False).logits
        return generated.sequences, torch.stack(generated.logits), padded

    expected = outputs()
    with packed_attention(model):
        actual = outputs()
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize(
    ("family", "device"),
    [
        *((family, "cpu") for family in BF16_ON_CPU),
        *(pytest.param(family, "cuda", marks=pytest.mark.cuda) for family in PER_DOCUMENT),
    ],
)
def test_bf16_autocast_is_within_twice_the_error_of_separate_documents(family: str, device: str) -> None:
    """bf16 over fp32 weights, as TRL trains."""
    model: Any = tiny_model(family, **ALL_EXPERTS.get(family, {}))
    if family in ALL_EXPERTS and getattr(model.config, "_experts_implementation", None) is not None:
        model.set_experts_implementation("eager")  # grouped matrix products know no float64
    exact_model = copy.deepcopy(model).double()
    model.to(device)
    path = "varlen" if device == "cuda" and family != "gemma2" else "per_document"  # varlen has no softcap
    ours, stock = [], []
    for seed in range(4):
        ids = torch.randint(3, 96, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(seed))
        batch = PackedBatch.from_lengths(LENGTHS, labels=ids)
        exact = separate(exact_model, ids, batch)
        ids, batch = ids.to(device), batch.to(device)
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            stock.append(relative_errors(separate(model, ids, batch), exact))
        with packed_attention(model, compute_dtype=torch.bfloat16) as attention:
            assert attention.path == path, attention.choice.reason
            with torch.autocast(device, torch.bfloat16):
                assert seed or verify_packing(model, attention=attention).proven
                loss = packed(model, ids, batch)
            loss.backward()
        grads = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
        ours.append(relative_errors((loss.item(), grads), exact))
    mean_error, mean_budget = (torch.stack(rows).square().mean(0).sqrt() for rows in (ours, stock))
    assert (mean_error <= 2 * mean_budget + ROUNDING).all(), (mean_error, mean_budget)


IMAGE_LENGTHS = (9, 5, 14, 6)
IMAGES = (slice(3, 6), slice(16, 22))


def image_row() -> tuple[Tensor, Tensor, PackedBatch]:
    """Token ids, 1 where a token is of an image, and the documents."""
    ids = torch.randint(3, 90, (1, sum(IMAGE_LENGTHS)), generator=torch.Generator().manual_seed(1))
    kinds = torch.zeros_like(ids)
    for image in IMAGES:
        kinds[:, image] = 1
    return ids, kinds, PackedBatch.from_lengths(IMAGE_LENGTHS, labels=ids)


def assert_row_equals_separate(model: Any, implementation: str, **keywords: Any) -> None:
    ids, _, batch = image_row()
    path = assert_packed_equals_separate(model, implementation, row=(ids, batch), stock="sdpa", rtol=1e-4, **keywords)
    assert path == implementation


@pytest.mark.parametrize("implementation", ["per_document", "sdpa"])
@pytest.mark.parametrize("family", KINDS_OF_TOKENS)
def test_image_tokens_that_see_each_other_are_refused_by_name(family: str, implementation: str) -> None:
    name, model = KINDS_OF_TOKENS[family], vision_model(family)
    ids, kinds, batch = image_row()
    kinds = 1 - kinds if family == "paligemma" else kinds
    message = rf"{name} of {family}_text .*packed_attention='{implementation}'.*train such data "
    with pytest.raises((PackingError, ValueError), match=rf"{message}|attends in both directions"):
        with packed_attention(model, implementation):
            packed(model, ids, batch, **{name: kinds})


@pytest.mark.parametrize("implementation", ["per_document", "sdpa"])
@pytest.mark.parametrize("family", ["gemma3", "gemma4", "molmo2"])
def test_rows_of_text_alone_equal_separate_documents(family: str, implementation: str) -> None:
    name, model = KINDS_OF_TOKENS[family], vision_model(family)
    assert_row_equals_separate(model, implementation, of_tokens={name: torch.zeros_like(image_row()[1])})
    if family != "molmo2":  # which asks for them in training
        model.zero_grad()
        assert_row_equals_separate(model, implementation)


@pytest.mark.parametrize("sections", [0, 3, 4])
@pytest.mark.parametrize("family", SECTIONS)
def test_positions_of_several_sections_are_exact(family: str, sections: int) -> None:
    _, kinds, batch = image_row()
    given = {"position_ids": batch.position_ids[None].expand(sections, 1, -1)} if sections else {}
    # Kinds that no mask reads are no reason to refuse.
    assert_row_equals_separate(vision_model(family), "per_document", mm_token_type_ids=kinds, **given)
