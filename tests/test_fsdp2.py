"""Whole runs of `train` under FSDP 2 on two ranks log what they log under TRL's trainer."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers.integrations
from model_material import STEPS, gemma4
from peft import LoraConfig
from ranks import BASE, fsdp2, two_ranks
from replayed_graphs import TapeDevice
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from trainer_material import assert_line, assert_same_log, build, callback
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention.varlen import Varlen
from fastpack_trl.callbacks import async_checkpoint
from fastpack_trl.checkpointing import offload
from fastpack_trl.config import Settings
from fastpack_trl.errors import PackingError
from fastpack_trl.features import checkpoint_offload as feature
from fastpack_trl.features import cuda_graph as capture
from fastpack_trl.testing import tiny_model

LINEAR = {"target_modules": "all-linear"}
STACKS = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
Options = dict[str, Any]


@pytest.mark.slow
@two_ranks
def test_two_ranks_train_under_fsdp2_as_stock() -> None:
    """In two processes, which take longer to start than most of the cases."""
    dist.init_process_group("gloo")
    for case in (steps, memory, shared_keys, proof, experts, one_rank, stepped_down, engines):
        with pytest.MonkeyPatch.context() as patch:
            case(patch)


def make(
    cls: Any, *, family: str = "qwen3", lora: Options | None = None, tied: bool = False, callbacks: Sequence[Any] = (),
    fast: Options, **more: Any,
) -> Any:  # fmt: skip
    """A trainer of three packed steps; `callbacks` are made anew for each."""
    torch.manual_seed(0)
    adapters = None if lora is None else LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, **lora)
    return build(
        cls, Path(), model=tiny_model(family, tie_word_embeddings=tied), fast=fast if cls is FastSFTTrainer else None,
        trainer={"peft_config": adapters, "callbacks": [one() for one in callbacks]},
        **BASE | {"max_steps": 3, "gradient_checkpointing": False} | more,
    )  # fmt: skip


def trained(trainer: Any, times: int = 1, **plugin: Any) -> Any:
    with fsdp2(trainer, **plugin):
        for _ in range(times):
            trainer.train()
    return trainer


def both(*, plugin: Options | None = None, times: int = 1, rtol: float = 1e-5, **options: Any) -> Any:
    """Ours after one training or two, of which the second begins with sharded weights; the log is that of stock."""
    ours, stock = (trained(make(cls, **options), times, **plugin or {}) for cls in (FastSFTTrainer, SFTTrainer))
    assert type(ours.model).__name__.startswith("FSDP"), type(ours.model)
    assert_same_log(ours, stock, rtol=rtol, atol=rtol / 10)
    return ours


def assert_on(trainer: Any, feature: str, path: str) -> Any:
    line = trainer.fastpack_report[feature]
    assert (line.status, line.path) == ("on", path), trainer.fastpack_report.table()
    return line


def steps(patch: pytest.MonkeyPatch) -> None:
    """Loss, metrics and LoRA in steps of two micro-batches, with evaluations, in a first and a second run."""
    # FSDP casts the sum of the losses to `output_dtype` here, each of them in stock: two steps of bf16, which
    # weights must not learn from, since Adam divides what is rounded by itself.
    cast = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True, output_dtype=torch.bfloat16)
    low: Options = {"plugin": {"mixed_precision_policy": cast}, "learning_rate": 0.0, "rtol": 2**-6}
    full: Options = {"times": 2, "eval_strategy": "steps", "eval_steps": 2, "family": "llama"}
    for options in (full | {"tied": True}, full | {"lora": LINEAR}, full | {"family": "qwen3_moe"}, low):
        report = both(gradient_accumulation_steps=2, fast={"verify_packing": "off"}, **options).fastpack_report
        assert "loss" in report["sync_free"].path, report.table()
        assert "lora" not in options or report["lora"].path == "fast", report.table()


def look(state: Any, model: Any) -> None:
    with torch.no_grad():
        model.eval()(input_ids=torch.arange(8)[None], use_cache=False)


def memory(patch: pytest.MonkeyPatch) -> None:
    """Levels by name, by a budget that one process has less of, and offloaded layer inputs."""
    for options, fast, level in (
        ({"lora": LINEAR}, {"activation_memory": "keep"}, "keep"),
        ({}, {"activation_memory_gib": 1.0 if dist.get_rank() else 2e-4}, "checkpoint"),
    ):
        ours = both(gradient_checkpointing=True, gradient_accumulation_steps=2, fast=fast, **options)
        assert ours.fastpack_run.memory is None, "kept after the run"
        line = assert_on(ours, "activation_memory", level)
        assert ("weights gathered once a step" in line.reason) == (level == "keep"), line
    # Between the backward pass and the step, whose weights the next pass must have. FSDP keeps the head whole by itself
    # for a look under stock: so ours with and without.
    looks = callback("on_pre_optimizer_step", look)
    looked = [
        trained(make(FastSFTTrainer, gradient_checkpointing=True, callbacks=[looks], fast=fast))
        for fast in ({"activation_memory_gib": 1.0}, {"activation_memory": "off"})
    ]
    assert "weights gathered once a step" in looked[0].fastpack_report["activation_memory"].reason
    assert_same_log(looked[0], looked[1], rtol=1e-6, atol=1e-7)
    both(gradient_checkpointing=True, max_grad_norm=0.05, fast={"activation_memory_gib": 1.0})
    for place in (feature, async_checkpoint):
        patch.setattr(place, "offload_unavailable", lambda device: "")
    patch.setattr(offload, "MIN_BYTES", 1)
    ours = both(gradient_checkpointing=True, fast={"checkpoint_offload": "double_buffer"})
    assert ours.fastpack_report["checkpoint_offload"].status == "on"
    assert "offload, host memory" in ours.fastpack_report.facts, ours.fastpack_report.table()


def shared_keys(patch: pytest.MonkeyPatch) -> None:
    """Gemma 4, whose last layers take the keys of earlier ones: proof and plan run the whole row in each of them."""
    losses = []
    for cls, fast in ((SFTTrainer, None), (FastSFTTrainer, {"activation_memory_gib": 1.0, "verify_packing": "on"})):
        model = gemma4("text", 2, "full")
        trainer = build(cls, Path(), model=model, fast=fast, packing=True, gradient_checkpointing=True, **STEPS)
        trained(trainer, transformer_cls_names_to_wrap=["Gemma4TextDecoderLayer"])
        losses.append([row["loss"] for row in trainer.state.log_history if "loss" in row])
    assert trainer.fastpack_report["activation_memory"].status == "on"
    assert trainer.fastpack_report["verify_packing"].path == "passed"
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def proof(patch: pytest.MonkeyPatch) -> None:
    """With windows and without; tied embeddings, which are in one unit with the head; a leak of stock's stops all."""
    ours = both(fast={"verify_packing": "on"}, tied=True)
    assert_on(ours, "verify_packing", "passed")
    assert ours.fastpack_proof.proven
    ours = trained(make(FastSFTTrainer, family="gpt_oss", lora=LINEAR, fast={"verify_packing": "on"}))
    assert ours.fastpack_proof.proven
    assert ours.fastpack_proof.not_exercised == ()
    unpacked: Options = {"packing": False, "per_device_train_batch_size": 2}
    with fsdp2(make(FastSFTTrainer, fast={"verify_packing": "on"}, **unpacked)) as ours:
        with ours._fastpack_features():  # accelerate prepares no sharded model for an evaluation before training
            assert ours.fastpack_run.plan.kind == "padding_free"
        ours.train()
        assert ours.fastpack_proof.proven
        ours.evaluate(ours.train_dataset)
        assert ours.fastpack_run.plan.kind == "padding_free"
    with pytest.raises(PackingError, match="packed_attention='auto'"):
        trained(make(FastSFTTrainer, family="gpt_oss", fast={"packed_attention": "off"}))


def experts(patch: pytest.MonkeyPatch) -> None:
    """Trained, and with LoRA on their stacks."""
    for lora in (None, STACKS):
        options = {"family": "qwen3_moe", "lora": lora, "gradient_checkpointing": lora is not None}
        assert_on(both(fast={"moe": "on", "verify_packing": "off"}, **options), "moe", "fastpack")


def one_rank(patch: pytest.MonkeyPatch) -> None:
    """One process has a callback or a hook before training, or cannot plan: the others do as it does."""
    substep = callback("on_substep_end", lambda *_: None, "Substep")
    for add, why in (
        (lambda trainer: trainer.add_callback(substep()), "on_substep_end of Substep"),
        (lambda trainer: trainer.model.register_forward_pre_hook(lambda *_: None), "runs once per micro-batch"),
    ):
        trainer = make(FastSFTTrainer, fast={}, gradient_accumulation_steps=2, max_steps=1)
        if dist.get_rank() == 0:
            add(trainer)
        trainer.train()
        line = trainer.fastpack_report["merge_accumulation"]
        assert (line.path, why in line.reason) == ("stock", True), line
        assert line.reason.startswith("rank 0: ") == bool(dist.get_rank()), line
    options = {"gradient_checkpointing": True, "max_steps": 1, "max_length": None, "packing": False}
    for engine in (contextlib.nullcontext, fsdp2):
        # Rows of any length: no plan. Of the first process only, whose documents are not measured.
        trainer = make(FastSFTTrainer, fast={"activation_memory_gib": 1.0}, **options)
        if dist.get_rank() == 0:
            trainer.fastpack_run.facts = None
        with engine(trainer):
            trainer.train()
        line = trainer.fastpack_report["activation_memory"]
        assert (line.path, "rows may have any length" in line.reason) == ("stock", True), line
        assert ("rank 0: ValueError" in line.reason) == bool(dist.get_rank()), line


def stepped_down(patch: pytest.MonkeyPatch) -> None:
    """What no process can run, inside of the plan's passes, is left out by all: the run goes on."""
    fast = {"activation_memory_gib": 1.0, "verify_packing": "off"}
    ours, stock = (make(cls, fast=fast, gradient_checkpointing=True) for cls in (FastSFTTrainer, SFTTrainer))
    mlp = ours.model.model.layers[1].mlp
    forward, failures = mlp.forward, iter([RuntimeError("the kernel failed")])

    def fail_once(*args: Any) -> Any:
        for error in failures:
            raise error
        return forward(*args)

    mlp.forward = fail_once
    assert_same_log(trained(ours), trained(stock), rtol=1e-5, atol=1e-6)
    assert_line(ours, "activation_memory", "the kernel failed", path="stock")


def engines(patch: pytest.MonkeyPatch) -> None:
    """The table in docs/several-gpus.md: the features that are entered under each engine."""
    page = (Path(__file__).parents[1] / "docs/several-gpus.md").read_text(encoding="utf-8")
    lines = [line for line in page.partition("\n| features")[2].splitlines() if "|" in line]
    head, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    table = {
        name: dict(zip(head[1:], row[1:], strict=True)) for row in rows[1:] for name in re.findall(r"`(\w+)`", row[0])
    }
    patch.setattr(feature, "offload_unavailable", lambda device: "")
    patch.setattr(Settings, "is_explicit", lambda *_: False)  # what an engine lacks is said, and stops nothing
    patch.setattr(Varlen, "refuses", lambda self, features: "")
    patch.setattr(capture, "unavailable", lambda device: "")
    patch.setattr(capture, "CudaGraphs", lambda device: TapeDevice(nn.Module()))
    base = {"packed_attention": "varlen", "verify_packing": "on", "moe": "on", "fused_layers": "on"}
    more = {"gradient_checkpointing": True, "gradient_accumulation_steps": 2, "family": "qwen3_moe"}
    flags = {"DDP": "", "FSDP 2": "", "FSDP 1": "is_fsdp_enabled"}
    flags |= dict.fromkeys(("ZeRO 1, 2", "ZeRO 3"), "is_deepspeed_enabled")
    offloaded = {"checkpoint_offload": "double_buffer"}
    for engine, flag in flags.items():
        zero3 = engine == "ZeRO 3"
        patch.setattr(transformers.integrations, "is_deepspeed_zero3_enabled", lambda zero3=zero3: zero3)
        found: dict[str, str] = {}
        for fast in ({"merge_accumulation": "on", "activation_memory_gib": 1.0}, offloaded):
            trainer = make(FastSFTTrainer, lora={"target_modules": ["q_proj"]}, fast=base | fast, **more)
            with fsdp2(trainer) if engine == "FSDP 2" else contextlib.nullcontext():
                if flag:
                    setattr(trainer, flag, True)
                try:
                    with trainer._fastpack_features(announce=True):
                        report = {name: trainer.fastpack_report[name] for name in table}
                except ValueError:
                    if fast is not offloaded:
                        raise
                    found["checkpoint_offload"] = "stock"  # an error, since it was asked for by name
                    continue
            for name, line in report.items():
                assert line.path != "pending" or "when train() begins" in line.reason or name == "cuda_graph", line
                on = line.status == "on" and line.path != "host work only"
                found[name] = "on" if on else found.get(name, "stock")
        assert found == {name: row[engine] for name, row in table.items()}, (engine, found)
