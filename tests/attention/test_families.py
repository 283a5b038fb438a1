"""Every family: packed documents equal separate documents, nothing leaks, ordinary batches stay stock's."""

from __future__ import annotations

import pytest
import torch
from attention_material import (
    LENGTHS,
    PER_DOCUMENT,
    assert_packed_equals_separate,
    leaks_of_stock,
    make_row,
    packed,
    separate,
)  # fmt: skip
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import Tensor

from fastpack_trl.attention.install import packed_attention
from fastpack_trl.attention.proof import verify_packing
from fastpack_trl.testing import tiny_model


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointing"])
@pytest.mark.parametrize("family", PER_DOCUMENT)
def test_packed_loss_and_gradients_equal_separate_documents(family: str, checkpointing: bool) -> None:
    model = tiny_model(family)
    if not checkpointing:
        proof = verify_packing(model)
        assert (proof.proven, proof.leaks) == (True, ()), str(proof)
    assert assert_packed_equals_separate(model, checkpointing=checkpointing) == "per_document"


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "afmoe", "opt", "bloom", "falcon"])
def test_proof_finds_the_leaks_of_stock_that_other_tokens_show(family: str) -> None:
    """falcon, say, leaks until transformers 5.23."""
    model = tiny_model(family)
    proof = verify_packing(model, implementation="off", lengths=LENGTHS)
    leaks = leaks_of_stock(model)
    assert {(source, target) for source, target, _ in proof.leaks} == leaks
    assert proof.proven == (not leaks)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gpt_oss", "gemma2", "deepseek_v3"])
def test_dense_masks_built_once_equal_separate_documents(family: str) -> None:
    # transformers 5.17 gives gemma2 an sdpa that leaves out the softcap.
    assert_packed_equals_separate(
        tiny_model(family, **({"attn_implementation": "eager"} if family == "gemma2" else {})), "sdpa"
    )


def test_mixed_windows_of_composite_gemma3_switch_only_the_text_model() -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = tiny_model("gemma3_text").config.to_dict()
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config=text, vision_config={**vision, "image_size": 28, "patch_size": 14})
    torch.manual_seed(0)
    model = Gemma3ForConditionalGeneration(config).train()
    ids, _, batch = make_row()
    stock = {name: getattr(config, name)._attn_implementation for name in ("text_config", "vision_config")}
    with packed_attention(model) as attention:
        assert attention.path == "per_document"
        assert config.vision_config._attn_implementation == stock["vision_config"]
        loss = packed(model, ids, batch)
    assert {name: getattr(config, name)._attn_implementation for name in stock} == stock
    expected, _ = separate(model, ids, batch)
    assert abs(loss.item() - expected) <= 1e-5


def test_a_model_with_adapters_is_packed_and_one_with_virtual_tokens_refused() -> None:
    model = get_peft_model(tiny_model("qwen3"), LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False))
    assert_packed_equals_separate(model)
    assert verify_packing(model).proven
    virtual = get_peft_model(tiny_model("qwen3"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with (
        pytest.raises(ValueError, match=r"prompt learning prepends .*; train with packing=False"),
        packed_attention(virtual),
    ):
        pass
    assert verify_packing(virtual, implementation="off").leaks, "PEFT drops position_ids"


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss", "qwen3_moe", "opt", "qwen3_next"])
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
    for ours, stock in zip(actual, expected, strict=True):
        assert torch.equal(ours, stock)
