"""Fused layers on a GPU: few kernels per layer, the longest rows, Liger's patches beside them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from counted_operators import kernels_of
from peft import LoraConfig, get_peft_model
from torch import nn
from trainer_material import assert_same_log, train
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.kernels.fused_form import GatedForm, NormForm, RotaryForm
from fastpack_trl.kernels.gated import gated
from fastpack_trl.kernels.norm import norm
from fastpack_trl.kernels.rotary import rotary
from fastpack_trl.layers.replace import fused_layers
from fastpack_trl.lora.linear import apply_lora
from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs

pytestmark = pytest.mark.cuda


def launches(layers: int) -> int:
    """Return the kernels of forward and backward of a decoder with LoRA on all projections, 2,048 tokens."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256, hidden_size=1024, intermediate_size=3072, num_hidden_layers=layers, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128,
    )  # fmt: skip
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
        model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"), autocast_adapter_dtype=False)
    batch = PackedBatch.from_lengths([1000, 1048]).to("cuda")
    keywords = to_transformers_kwargs(batch) | {"packed_batch": batch}
    leaf = torch.randn(1, 2048, 1024, device="cuda", dtype=torch.bfloat16).requires_grad_()

    def step() -> None:
        decoder = model.base_model.model.model
        decoder(inputs_embeds=leaf, use_cache=False, **keywords).last_hidden_state.backward(leaf.detach())

    apply_lora(model)
    with packed_attention(model, "varlen"), fused_layers(model, dtype=torch.bfloat16, autocast=False):
        for _ in range(3):
            step()
        return kernels_of(step)


def test_a_layer_launches_at_most_80_kernels() -> None:
    assert launches(3) - launches(2) <= 80


def test_rows_of_one_token_and_of_more_than_2_to_the_31_elements() -> None:
    if torch.cuda.mem_get_info()[0] < 40e9:
        pytest.skip("needs 40 GB")
    x = torch.randn(200_000, 12_288, device="cuda", dtype=torch.bfloat16)
    weight, form, gate = torch.rand(12_288, device="cuda").bfloat16(), NormForm(1e-6, rounds=True), GatedForm("silu")
    for function in (lambda x: norm(x, weight, None, form), lambda x: gated(x, x, gate)):
        assert torch.equal(function(x)[-1:], function(x[-1:]))
    heads = x.view(1, 200_000, 96, 128).transpose(1, 2)
    angles = [torch.randn(1, 200_000, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    last = [each[:, -1:] for each in angles]
    whole = rotary(heads, heads[:, :1], *angles, RotaryForm(), form, weight[:128], weight[:128])[0]
    alone = rotary(heads[:, :, -1:], heads[:, :1, -1:], *last, RotaryForm(), form, weight[:128], weight[:128])[0]
    assert torch.equal(whole[:, :, -1:], alone)


@pytest.mark.parametrize("family", ["starcoder2", "falcon", "bloom", "gpt_neox"])
def test_layer_norms_under_autocast_are_fused(family: str, tmp_path: Path) -> None:
    fields = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields)).cuda()
    with fused_layers(model, dtype=torch.bfloat16, autocast=True) as report:
        assert "LayerNorm" not in report.reasons
        layer = next(each for each in model.modules() if isinstance(each, nn.LayerNorm))
        x = torch.randn(2, 32, device="cuda", dtype=torch.bfloat16)
        with torch.autocast("cuda", torch.bfloat16):
            assert layer(x).dtype == torch.float32
            assert kernels_of(lambda: layer(x)) == 1


def test_ligers_patches_stay_and_are_named(tmp_path: Path) -> None:
    pytest.importorskip("liger_kernel")
    options = {"packing": True, "use_liger_kernel": True, "use_cpu": False, "bf16": True, "eval_strategy": "no"}
    ours = train(FastSFTTrainer, tmp_path / "ours", fast={}, **options)
    assert "Qwen3RMSNorm: liger" in ours.fastpack_report["fused_layers"].reason
    assert_same_log(ours, train(SFTTrainer, tmp_path / "stock", **options), rtol=2e-2, atol=2e-2)


def test_a_compiled_kernel_runs_only_what_it_was_compiled_for() -> None:
    """In any order of dtypes, sizes (1, multiples of 16 and others) and addresses, each of them twice."""
    form, draw = NormForm(1e-6), torch.Generator().manual_seed(0)
    cases = list(itertools.product((torch.float32, torch.bfloat16), (1, 16, 24), (1, 16, 17), (0, 1))) * 2
    for index in torch.randperm(len(cases), generator=draw).tolist():
        dtype, width, rows, offset = cases[index]
        stored = torch.randn(rows * width + offset, generator=draw).to(dtype)
        x, weight = stored[offset:].view(rows, width), torch.randn(width, generator=draw).to(dtype)
        on_device = stored.cuda()[offset:].view(rows, width)
        out = norm(on_device, weight.cuda(), None, form)
        torch.testing.assert_close(out.cpu(), norm(x, weight, None, form), rtol=1e-2, atol=1e-5)
