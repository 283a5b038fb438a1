"""Liger's kernels in single layers."""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from compile_material import (
    Counting,
    attributes,
    cuda_model,
    cuda_row,
    errors,
    loss_of,
    make,
    one_step,
    row,
    stop,
)
from torch import Tensor

from fastpack_trl.attention.install import packed_attention
from fastpack_trl.compile import liger
from fastpack_trl.compile.layers import compiled_layers, decoder_layers
from fastpack_trl.model.facts import window_of

ROTARY = """
import torch
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.compile import liger
from fastpack_trl.compile.layers import decoder_layers
from compile_material import make, one_step, row

model, (ids, batch) = make("llama"), row(0)
attentions = [layer.self_attn for layer in decoder_layers(model)]
with packed_attention(model):
    expected = one_step(model, ids, batch)
    with liger.liger_modules(attentions) as replaced:
        assert replaced == ["LlamaAttention"], replaced
        assert all("forward" in attention.__dict__ for attention in attentions)
        actual = one_step(model, ids, batch)
assert not any("forward" in attention.__dict__ for attention in attentions)
torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)
print("agreed")
"""


def test_ligers_rotary_embedding_is_set_on_single_attentions_and_taken_away() -> None:
    """In Triton's interpreter, which runs this one of Liger's kernels."""
    pytest.importorskip("liger_kernel")
    root = Path(__file__).parents[2]
    path = os.pathsep.join([str(root / "tests" / "support"), str(root)])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    run = subprocess.run([sys.executable, "-c", ROTARY], capture_output=True, text=True, env=environment)
    assert run.stdout.endswith("agreed\n"), run.stderr


def test_liger_is_not_tried_without_a_gpu() -> None:
    model = make("llama")
    with packed_attention(model), compiled_layers(model, measure=True, verbose=False, _backend=Counting()) as layers:
        one_step(model, *row(0))
    assert "liger" not in layers.reason
    assert "GPU" in liger.missing(torch.device("cpu")) or find_spec("liger_kernel") is None


@pytest.mark.cuda
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3"])
def test_cuda_liger_modules_within_twice_the_error_of_eager(family: str, lora: bool) -> None:
    pytest.importorskip("liger_kernel")
    model = make(family, lora=lora, checkpointing=lora, head_dim=16).cuda()
    exact_model, data = copy.deepcopy(model).cpu().double(), [row(seed) for seed in range(6)]
    before = attributes(model)
    with packed_attention(exact_model, "per_document"):
        exact = [one_step(exact_model, *one) for one in data]

    def run() -> Tensor:
        steps = (one_step(model, ids.cuda(), batch.to("cuda")) for ids, batch in data)
        return torch.stack([errors(step, known) for step, known in zip(steps, exact, strict=True)])

    with packed_attention(model, compute_dtype=torch.bfloat16), torch.autocast("cuda", torch.bfloat16):
        eager = run()
        with contextlib.ExitStack() as stack:
            kinds: dict[Any, list[Any]] = {}
            for layer in decoder_layers(model):
                kinds.setdefault(window_of(layer.self_attn), []).append(layer)
            for layers in kinds.values():
                assert stack.enter_context(liger.liger_modules(layers))
            ours = run()
    model.zero_grad()
    assert attributes(model) == before
    mean_error, mean_budget = (values.square().mean(0).sqrt() for values in (ours, eager))
    assert (mean_error <= 2 * mean_budget + torch.finfo(torch.bfloat16).eps / 2).all(), (mean_error, mean_budget)


@pytest.mark.cuda
def test_cuda_without_a_compiler_liger_is_measured_beside_eager() -> None:
    pytest.importorskip("liger_kernel")
    model = cuda_model()
    before = attributes(model)
    with packed_attention(model, compute_dtype=torch.bfloat16), torch.autocast("cuda", torch.bfloat16):
        with compiled_layers(model, measure=True, verbose=False, _backend=stop) as layers:
            for seed in range(3):
                loss_of(model, *cuda_row(seed)).backward()
    model.zero_grad()
    assert layers.path in ("liger", "eager")
    assert "no compiler here" in layers.reason
    assert "liger" in layers.reason
    assert attributes(model) == before


def test_a_side_of_the_benchmark_has_ligers_kernels_and_the_files_of_transformers_keep_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("liger_kernel")
    from trainer_material import make_dataset, make_tokenizer, settings
    from transformers.models.qwen3 import modeling_qwen3
    from trl import SFTConfig, SFTTrainer

    from benchmarks.liger_side import liger_kernels

    args = SFTConfig(**settings(tmp_path, packing=True, max_steps=1, eval_strategy="no"))
    model = make("qwen3", lora=True)
    trainer = SFTTrainer(model, args=args, train_dataset=make_dataset("text"), processing_class=make_tokenizer())
    before, seen = dict(vars(modeling_qwen3)), []

    def step(self: Any, fails: bool) -> None:
        seen.append({name for name, value in vars(modeling_qwen3).items() if before.get(name) is not value})
        if fails:
            raise KeyError

    monkeypatch.setattr(SFTTrainer, "training_step", step)
    with liger_kernels(trainer) as replaced:
        assert replaced == ["Qwen3MLP", "Qwen3RMSNorm", "apply_rotary_pos_emb"]
        assert trainer.model.get_base_model().model.norm.forward.__qualname__ == "LigerRMSNorm.forward"
        assert vars(modeling_qwen3) == before
        trainer.training_step(False)
        with pytest.raises(KeyError):
            trainer.training_step(True)
        assert vars(modeling_qwen3) == before
    trainer.training_step(False)
    assert seen == [set(replaced), set(replaced), set()]
