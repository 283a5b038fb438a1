"""Packed attention, loss, metrics and LoRA of ours under FSDP 2: whole optimizer steps on two ranks, beside stock's.

accelerate starts no FSDP on a CPU, so the model is sharded here, in the units that accelerate makes: each layer, the
embedding, the last norm with the head, and what is left.
"""

from __future__ import annotations

from pathlib import Path

from ranks import fork_ranks

STEPS = """
import contextlib, sys, torch, torch.distributed as dist
from ranks import leave
from peft import LoraConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from static_material import make_inputs
from trainer_material import make_dataset, make_tokenizer, settings
from trl import SFTConfig, SFTTrainer
from fastpack_trl import FastSFTConfig, FastSFTTrainer
from fastpack_trl.step.sync_free import SyncFreeStep
from fastpack_trl.testing import tiny_model

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
LOW = {"param_dtype": torch.bfloat16, "cast_forward_inputs": True, "output_dtype": torch.bfloat16}

def shard(model, base, low, tied):
    policy = MixedPrecisionPolicy(**LOW if low else {})
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    for unit in (*base.model.layers, *([] if tied else [embedding])):
        fully_shard(unit, mesh=mesh, mp_policy=policy)
    tail = [base.model.norm, *([embedding] if tied else []), head]
    fully_shard(tail, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)

def figures(ours, family, lora, low, tied):
    "Of three optimizer steps of two micro-batches: losses, gradient norms, then two evaluation losses."
    arguments = settings(
        sys.argv[1], packing=True, gradient_accumulation_steps=2, average_tokens_across_devices=False
    )
    config = FastSFTConfig(**arguments, verify_packing="off") if ours else SFTConfig(**arguments)
    torch.manual_seed(0)
    data, adapters = make_dataset("tokens", 12), None
    if lora:
        adapters = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
    trainer = (FastSFTTrainer if ours else SFTTrainer)(
        tiny_model(family, tie_word_embeddings=tied), args=config, train_dataset=data, eval_dataset=data,
        processing_class=make_tokenizer(), peft_config=adapters,
    )
    model, found = trainer.model.train(), []
    trainer.current_gradient_accumulation_steps = 2

    def loss_of(seed, items):
        inputs = dict(make_inputs([7, 5, 9], seed=10 * seed + dist.get_rank(), ignored=0.3))
        if not ours:
            inputs = {name: inputs[name] for name in ("input_ids", "labels", "position_ids")}
        return trainer.compute_loss(model, inputs, num_items_in_batch=items)

    def train(steps, *, first):
        "A run of the trainer; the second one begins with DTensors."
        nonlocal optimizer
        with trainer._fastpack_features(announce=True) if ours else contextlib.nullcontext():
            if first:
                shard(model, model.get_base_model() if lora else model, low, tied)
                optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
            trained = optimizer.param_groups[0]["params"]
            for step in steps:
                for micro in range(2):
                    loss = loss_of(2 * step + micro, torch.tensor(30))
                    loss.backward()
                    found.append(float(loss))
                found.append(float(torch.nn.utils.clip_grad_norm_(trained, 1.0).full_tensor()))
                optimizer.step()
                optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                found.extend(float(loss_of(seed, None)) for seed in (50, 60))
            model.train()
            if ours:
                assert trainer.fastpack_run.part(SyncFreeStep).loss, trainer.fastpack_report["sync_free"]

        # Known when the run has ended: layers that were PEFT's in any call are counted there.
        assert not (ours and lora) or trainer.fastpack_report["lora"].path == "fast", trainer.fastpack_report["lora"]

    optimizer = None
    train((0, 1), first=True)
    train((2,), first=False)
    return torch.tensor(found)

for case in (
    ("llama", False, False, False), ("llama", False, False, True), ("llama", True, False, False),
    ("qwen3_moe", False, False, False), ("qwen3", False, True, False), ("llama", True, True, False),
):
    ours, stock = figures(True, *case), figures(False, *case)
    assert torch.isfinite(stock).all()
    if case[2]:
        # FSDP casts the sum of the losses to `output_dtype` here, each of them in stock: two steps of bf16, and in the
        # first optimizer step alone, since Adam divides what is rounded by itself.
        torch.testing.assert_close(ours[:3], stock[:3], rtol=2**-6, atol=0)
    else:
        torch.testing.assert_close(ours, stock, rtol=1e-5, atol=0)
leave()
"""


def test_whole_steps_under_fully_shard_have_the_loss_and_the_gradients_of_stock(tmp_path: Path) -> None:
    script = tmp_path / "steps.py"
    script.write_text(STEPS, encoding="utf-8")
    fork_ranks(script, str(tmp_path), imports="torch.distributed.fsdp,trl:SFTTrainer,peft,fastpack_trl:FastSFTTrainer")
