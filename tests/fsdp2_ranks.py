"""Trains stock and ours under FSDP 2 on two ranks, for `test_ranks.py`: whole runs of `train`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers.integrations
from compile_material import Counting
from fsdp2 import fsdp2
from gemma4_uses import STEPS, gemma4
from peft import LoraConfig
from ranks import leave
from replayed_graphs import TapeDevice
from torch.distributed.fsdp import MixedPrecisionPolicy
from trainer_material import assert_same_log, build
from transformers import TrainerCallback
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.attention.varlen import Varlen
from fastpack_trl.capture import feature as capture
from fastpack_trl.checkpointing import checkpoint_offload as feature
from fastpack_trl.checkpointing.activation_memory import ActivationMemory
from fastpack_trl.checkpointing.plan import Level
from fastpack_trl.checkpointing.streams import HostStreams
from fastpack_trl.compile.layers import compiled_layers
from fastpack_trl.config import Settings
from fastpack_trl.errors import PackingError, RankFailedError
from fastpack_trl.model.sharded import Ranks
from fastpack_trl.step import merge_accumulation as merging
from fastpack_trl.testing import tiny_model

FOLDER = sys.argv[1] if len(sys.argv) > 1 else "/tmp"
LINEAR = {"target_modules": "all-linear"}
STACKS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
GRAPHS = Counting(differentiate=True)


def make(
    cls: Any, *, family: str = "qwen3", lora: dict[str, Any] | None = None, tied: bool = False,
    callbacks: Sequence[Any] = (), fast: dict[str, Any], **more: Any,
) -> Any:  # fmt: skip
    base = {"packing": True, "per_device_train_batch_size": 1, "eval_strategy": "no", "max_steps": 3}
    base |= {"gradient_checkpointing": False}
    torch.manual_seed(0)
    adapters = None if lora is None else LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, **lora)
    given = {"peft_config": adapters, "callbacks": [one() for one in callbacks]}
    model = tiny_model(family, tie_word_embeddings=tied)
    return build(
        cls, Path(FOLDER), model=model, trainer=given, fast=fast if cls is FastSFTTrainer else None, **base | more
    )


def both(*, plugin: dict[str, Any] | None = None, again: bool = False, rtol: float = 1e-5, **options: Any) -> Any:
    trainers = []
    for cls in (FastSFTTrainer, SFTTrainer):
        with fsdp2(make(cls, **options), **plugin or {}) as trainer:
            trainer.train()
            if again:  # begins with weights that are parted
                trainer.train()
        trainers.append(trainer)
    ours, stock = trainers
    assert type(ours.model).__name__.startswith("FSDP"), type(ours.model)
    assert_same_log(ours, stock, rtol=rtol, atol=rtol / 10)
    return ours, stock


def steps() -> None:
    """Loss, metrics and LoRA of ours in steps of two micro-batches, with evaluations, in a first and a second run."""
    # FSDP casts the sum of the losses to `output_dtype` here, each of them in stock: two steps of bf16, which
    # weights must not learn from, since Adam divides what is rounded by itself.
    cast = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=True, output_dtype=torch.bfloat16)
    low: dict[str, Any] = {"plugin": {"mixed_precision_policy": cast}, "learning_rate": 0.0, "rtol": 2**-6}
    full: dict[str, Any] = {"again": True, "eval_strategy": "steps", "eval_steps": 2}
    for options in (
        full | {"family": "llama"}, full | {"family": "llama", "tied": True},
        full | {"family": "llama", "lora": LINEAR},
        full | {"family": "qwen3_moe"}, low, low | {"family": "llama", "lora": LINEAR},
    ):  # fmt: skip
        ours, _ = both(gradient_accumulation_steps=2, fast={"verify_packing": "off"}, **options)
        report = ours.fastpack_report
        assert "loss" in report["sync_free"].path, report.table()
        assert "lora" not in options or report["lora"].path == "fast", report.table()


def compiled() -> None:
    """Differentiated by AOT, whose graphs keep the gathered parameters; traced only, with LoRA and checkpoints."""
    compiled_layers.__wrapped__.__kwdefaults__["_backend"] = GRAPHS  # type: ignore[attr-defined]
    for options in ({}, {"gradient_checkpointing": True, "lora": LINEAR}):
        GRAPHS.graphs, GRAPHS.differentiate = 0, not options
        # One mask: a kernel per document would make graphs that take a minute here.
        ours, _ = both(fast={"layer_compile": "on", "packed_attention": "sdpa"}, **options)
        report = ours.fastpack_report
        assert (report["layer_compile"].status, report["layer_compile"].path) == ("on", "compiled"), report.table()
        assert GRAPHS.graphs, options
        for layer in ours.accelerator.unwrap_model(ours.model).get_decoder().layers:
            assert "forward" not in layer.__dict__
            assert type(layer).__name__.startswith("FSDP"), type(layer)


class LooksBeforeTheStep(TrainerCallback):
    """Runs the model between the backward pass and the step, whose weights the next pass must have."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        with torch.no_grad():
            model.eval()(input_ids=torch.arange(8)[None], use_cache=False)


def memory() -> None:
    """Levels by name, by a budget that one process has less of, and offloaded layer inputs."""
    for options, fast, levels in (
        ({}, {"activation_memory": "checkpoint"}, {Level.CHECKPOINT}),
        ({"lora": LINEAR}, {"activation_memory": "keep"}, {Level.KEEP}),
        ({}, {"activation_memory_gib": 1.0 if dist.get_rank() else 2e-4}, {Level.CHECKPOINT}),
    ):
        ours, _ = both(gradient_checkpointing=True, gradient_accumulation_steps=2, fast=fast, **options)
        plan = ours.fastpack_run.get_state(ActivationMemory)
        assert plan is None, "kept after the run"
        line = ours.fastpack_report["activation_memory"]
        assert line.status == "on", line
        assert line.path == " + ".join(map(str, sorted(levels))), line
        assert ("weights gathered once a step" in line.reason) == (levels == {Level.KEEP}), line
    # A look is beside stock's for the head, which FSDP keeps whole by itself: so ours with and without.
    looked = []
    for fast in ({"activation_memory_gib": 1.0}, {"activation_memory": "off"}):
        trainer = make(FastSFTTrainer, gradient_checkpointing=True, callbacks=[LooksBeforeTheStep], fast=fast)
        with fsdp2(trainer):
            trainer.train()
        looked.append(trainer)
    assert "weights gathered once a step" in looked[0].fastpack_report["activation_memory"].reason
    assert_same_log(looked[0], looked[1], rtol=1e-6, atol=1e-7)
    both(gradient_checkpointing=True, max_grad_norm=0.05, fast={"activation_memory_gib": 1.0})
    feature.offload_unavailable = lambda device: ""  # type: ignore[assignment]
    feature.CudaStreams = HostStreams  # type: ignore[misc,assignment]
    feature.MIN_BYTES = 1  # type: ignore[misc]
    ours, _ = both(gradient_checkpointing=True, fast={"checkpoint_offload": "double_buffer"})
    assert ours.fastpack_report["checkpoint_offload"].status == "on"
    assert "offload, host memory" in ours.fastpack_report.facts, ours.fastpack_report.table()


def shared_keys() -> None:
    """Gemma 4, whose last layers take the keys of earlier ones: proof and plan run the whole row in each of them."""
    logs = []
    options = {"packing": True, "gradient_checkpointing": True, **STEPS}
    for cls, fast in ((FastSFTTrainer, {"activation_memory_gib": 1.0, "verify_packing": "on"}), (SFTTrainer, None)):
        trainer = build(cls, Path(FOLDER), model=gemma4("text", 2, "full"), fast=fast, **options)
        with fsdp2(trainer, transformer_cls_names_to_wrap=["Gemma4TextDecoderLayer"]):
            trainer.train()
        logs.append(trainer)
    ours, stock = logs
    assert ours.fastpack_report["activation_memory"].status == "on"
    assert "proven" in ours.fastpack_report["verify_packing"].reason
    losses = [[row["loss"] for row in each.state.log_history if "loss" in row] for each in (ours, stock)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def proof() -> None:
    """With windows and without; tied embeddings, which are in one unit with the head; a leak of stock's stops all."""
    ours, _ = both(fast={"verify_packing": "on"}, tied=True)
    assert ours.fastpack_report["verify_packing"].path == "proof", ours.fastpack_report.table()
    assert ours.fastpack_proof.proven
    with fsdp2(make(FastSFTTrainer, family="gpt_oss", lora=LINEAR, fast={"verify_packing": "on"})) as trainer:
        trainer.train()
    assert trainer.fastpack_proof.proven
    assert trainer.fastpack_proof.not_exercised == ()
    unpacked: dict[str, Any] = {"packing": False, "per_device_train_batch_size": 2, "fast": {"layer_compile": "off"}}
    with fsdp2(make(FastSFTTrainer, **unpacked)) as trainer:
        with trainer._fastpack_features():  # accelerate prepares no sharded model for an evaluation before training
            assert trainer.fastpack_run.plan.kind == "padding_free"
        trainer.train()
        assert trainer.fastpack_proof.proven
        trainer.evaluate(trainer.train_dataset)
        assert trainer.fastpack_run.plan.kind == "padding_free"
    leaky = make(FastSFTTrainer, family="gpt_oss", fast={"packed_attention": "off"})
    with fsdp2(leaky) as trainer, pytest.raises(PackingError, match="packed_attention='auto'"):
        trainer.train()


def experts() -> None:
    """Trained, frozen beside LoRA on the attention, and with LoRA on their stacks."""
    for targets in (None, {"target_modules": ["q_proj", "v_proj"]}, {"target_parameters": STACKS}):
        options = {"gradient_checkpointing": targets is not None}
        ours, _ = both(family="qwen3_moe", lora=targets, fast={"moe": "on", "verify_packing": "off"}, **options)
        assert ours.fastpack_report["moe"].status == "on", ours.fastpack_report.table()
        assert ours.fastpack_report["moe"].path == "fastpack", ours.fastpack_report.table()


class HooksOneRank(TrainerCallback):
    """Hooks the model of one process when the second step begins: its micro-batches must run one by one."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 1 and dist.get_rank() == 0:
            model.register_forward_hook(lambda *_: None)


class Forwards(TrainerCallback):
    """Counts the forward passes of each step."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if not self.counts:
            model.get_input_embeddings().register_forward_pre_hook(_Counts(self.counts))
        self.counts.append(0)


class _Counts:
    __module__ = "transformers.test"  # no hook of the user

    def __init__(self, counts: list[int]) -> None:
        self._counts = counts

    def __call__(self, *_: Any) -> None:
        self._counts[-1] += 1


def merged() -> None:
    """Four micro-batches (three at the end of an epoch) as one row, as two where that has room, or one by one."""
    more = {"gradient_accumulation_steps": 4, "max_steps": 4}
    for fast, callbacks, expected in (
        ({"merge_accumulation": "on"}, [], [1, 1, 1, 1]),
        ({}, [], [2, 2, 2, 2]),
        ({"merge_accumulation": "on"}, [HooksOneRank], [1, 4, 3, 4]),
    ):
        merging.CPU_ROW_NUMBERS = 2 * 48 * 32  # type: ignore[misc]
        ours, _ = both(callbacks=[Forwards, *callbacks], fast=fast, lora=LINEAR, **more)
        counted = next(one for one in ours.callback_handler.callbacks if isinstance(one, Forwards))
        assert counted.counts == expected, (counted.counts, ours.fastpack_report.table())


class Substep(TrainerCallback):
    """Needs each micro-batch to have run."""

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pass


def one_rank() -> None:
    """One process has a callback or a hook before training, or cannot plan: the others do as it does."""
    for add, why in (
        (lambda trainer: trainer.add_callback(Substep()), "on_substep_end of Substep"),
        (lambda trainer: trainer.model.register_forward_pre_hook(lambda *_: None), "runs once per micro-batch"),
    ):
        trainer = make(FastSFTTrainer, fast={}, gradient_accumulation_steps=2, max_steps=1)
        if dist.get_rank() == 0:
            add(trainer)
        with fsdp2(trainer):
            trainer.train()
        line = trainer.fastpack_report["merge_accumulation"]
        assert line.path == "stock", line
        assert why in line.reason, line
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
        assert line.path == "stock", line
        assert "rows may have any length" in line.reason, line
        assert ("rank 0: ValueError" in line.reason) == bool(dist.get_rank()), line


class Fails:
    """The forward of a module, of which the first calls fail."""

    def __init__(self, module: Any, calls: int) -> None:
        self.forward, self.calls = module.forward, calls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls -= 1
        if self.calls >= 0:
            raise RuntimeError("the kernel failed")
        return self.forward(*args, **kwargs)


def stepped_down() -> None:
    """What no process can run, inside of the plan's passes, is left out by all: the run goes on."""
    trainers = []
    for cls in (FastSFTTrainer, SFTTrainer):
        fast = {"activation_memory_gib": 1.0, "verify_packing": "off"}
        trainer = make(cls, fast=fast, gradient_checkpointing=True)
        mlp = trainer.model.model.layers[1].mlp
        mlp.forward = Fails(mlp, int(cls is FastSFTTrainer))
        with fsdp2(trainer):
            trainer.train()
        trainers.append(trainer)
    ours, stock = trainers
    line = ours.fastpack_report["activation_memory"]
    assert (line.path, "the kernel failed" in line.reason) == ("stock", True), line
    assert_same_log(ours, stock, rtol=1e-5, atol=1e-6)


def left_alike() -> None:
    """A process that fails takes the others along, also where a question of theirs was another; one alone ends."""
    ranks, rank = Ranks(2), dist.get_rank()
    for fails in ((1,), (0, 1), ()):
        here, said = rank in fails, ""
        try:
            with ranks.propagate_failures():
                if here:
                    raise ValueError(f"of {rank}")
        except (ValueError, RuntimeError) as error:
            said = f"{type(error).__name__}: {error}"
        assert said == (f"ValueError: of {rank}" if here else "RuntimeError: rank 1: ValueError: of 1" * bool(fails))
    assert ranks.first_reason(lambda: "no" * rank) == ("no" if rank else "rank 1: no")
    waits = contextlib.nullcontext() if rank == 0 else pytest.raises(RankFailedError, match="rank 1: ValueError: alone")
    # The question that it gave up is lost to the others too: they find its connection closed.
    left = pytest.raises(RuntimeError, match=r"[Cc]onnection closed") if rank == 0 else contextlib.nullcontext()
    with waits, left, ranks.propagate_failures(0.5):
        if rank:
            raise ValueError("alone")
        dist.barrier()
    if rank:
        dist.barrier()  # where the other has waited


def engines() -> None:
    """The table in docs/several-gpus.md: the features that are entered under each engine."""
    page = (Path(__file__).parents[1] / "docs/several-gpus.md").read_text(encoding="utf-8")
    head, *rows = (
        [cell.strip(" `") for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"
    )
    table = {row[0].partition("`")[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows[1:]}
    feature.offload_unavailable = lambda device: ""  # type: ignore[assignment]
    patch = pytest.MonkeyPatch()
    patch.setattr(Settings, "is_explicit", lambda *_: False)  # what an engine lacks is said, and stops nothing
    patch.setattr(Varlen, "refuses", lambda self, features: "")
    patch.setattr(capture, "unavailable", lambda device: "")
    patch.setattr(capture, "CudaGraphs", lambda device: TapeDevice(torch.nn.Module()))
    base = {"packed_attention": "varlen", "verify_packing": "on", "moe": "on", "layer_compile": "on"}
    more = {"gradient_checkpointing": True, "gradient_accumulation_steps": 2, "family": "qwen3_moe"}
    flags = {"DDP": "", "FSDP 2": "", "FSDP 1": "is_fsdp_enabled"}
    flags |= dict.fromkeys(("ZeRO 1, 2", "ZeRO 3"), "is_deepspeed_enabled")
    pending = ("layer_compile", "cuda_graph")  # decided in the first steps
    planned = {"merge_accumulation": "on", "activation_memory_gib": 1.0}
    offloaded = {"checkpoint_offload": "double_buffer"}
    for engine, flag in flags.items():
        transformers.integrations.is_deepspeed_zero3_enabled = lambda engine=engine: engine == "ZeRO 3"
        found: dict[str, str] = {}
        for fast in (planned, offloaded):
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
            for name in table:
                line = report[name]
                assert line.path != "pending" or "when train() begins" in line.reason or name in pending, line
                on = line.status == "on" and line.path != "host work only"
                found[name] = "on" if on else found.get(name, "stock")
        assert found == {name: row[engine] for name, row in table.items()}, (engine, found)
    patch.undo()


CASES = {
    "steps": steps,
    "engines": engines,
    "one_rank": one_rank,
    "left_alike": left_alike,
    "stepped_down": stepped_down,
    "merged": merged,
    "experts": experts,
    "proof": proof,
    "shared_keys": shared_keys,
    "memory": memory,
    "compiled": compiled,
}

if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name in sys.argv[2:] or CASES:
        CASES[name]()
    leave()
