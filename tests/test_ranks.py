"""Two ranks: with uneven work, or where one fails, nobody waits longer; sharded layers; DeepSpeed trains as stock."""

from __future__ import annotations

import sys
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers.training_args
import trl
from peft import LoraConfig
from ranks import BASE, command_of, fork_ranks, free_port, fsdp2, run_ranks, start_ranks, two_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trainer_material import assert_same_log, build, callback, figures, make_dataset, train
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from trl import SFTTrainer

from fastpack_trl import FastSFTTrainer
from fastpack_trl.config import Settings
from fastpack_trl.errors import RankFailedError
from fastpack_trl.features.feature import Feature
from fastpack_trl.model import sharded
from fastpack_trl.model.sharded import Ranks, keep_unsharded, layer_units, whole_bytes
from fastpack_trl.testing import tiny_model

pytestmark = pytest.mark.slow


def make(cls: Any, *, folder: Path | None = None, streamed: bool = False, callbacks: Any = (), **more: Any) -> Any:
    data: Any = make_dataset("text", 40)
    data = data.to_iterable_dataset(num_shards=1) if streamed else data
    options = BASE | {"max_steps": 4, "data": data, "trainer": {"callbacks": [*callbacks]}} | more
    return build(cls, folder or Path(cls.__name__), **options)


def run(cls: Any, resume: str = "", **options: Any) -> Any:
    trainer = make(cls, **options)
    trainer.train(resume_from_checkpoint=str(Path(f"one_{cls.__name__}", resume)) if resume else None)
    return trainer


def _uneven() -> None:
    """Stock itself cannot dispatch packed rows from one rank to the others: their lengths differ."""
    dispatched = {"dispatch_batches": True, "split_batches": True}
    for options in (
        {"max_steps": -1, "num_train_epochs": 1, "gradient_accumulation_steps": 3},
        {"accelerator_config": {"even_batches": False}, "per_device_train_batch_size": 2},
        {"packing": False, "per_device_train_batch_size": 4, "accelerator_config": dispatched},
        {"streamed": True, "accelerator_config": {"dispatch_batches": False}},  # the second rank has no shard
        {"save_strategy": "steps", "save_steps": 2},
        {"resume": "checkpoint-2", "max_steps": 6},
    ):
        assert_same_log(run(FastSFTTrainer, **options), run(SFTTrainer, **options))


def test_uneven_batches_log_as_stock_and_resume_in_any_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for cls in (FastSFTTrainer, SFTTrainer):
        run(cls, folder=Path(f"one_{cls.__name__}"), max_steps=2, save_strategy="steps", save_steps=2)
    fork_ranks(_uneven, tmp_path)
    ours, stock = (make(cls, max_steps=6) for cls in (FastSFTTrainer, SFTTrainer))
    for trainer in (ours, stock):
        trainer.train(resume_from_checkpoint=f"{type(trainer).__name__}/checkpoint-2")
    assert_same_log(ours, stock)
    assert ours.state.global_step == 6


def hook(model: Any) -> None:
    model.register_forward_pre_hook(lambda *_: None)


def replace(model: Any) -> None:
    model.forward = partial(lambda forward, *args, **kwargs: forward(*args, **kwargs), model.forward)


@two_ranks
def test_a_reason_of_one_process_for_the_batches_or_the_loss_of_stock_is_one_of_all() -> None:
    for rank, add, feature, why, options in (
        (0, hook, "batches", "may expect the rows that TRL makes", {"packing": False}),
        (1, replace, "sync_free", "the model's forward was replaced", {}),
    ):
        ours, stock = (make(cls, gradient_accumulation_steps=2, **options) for cls in (FastSFTTrainer, SFTTrainer))
        for trainer in (ours, stock):
            if dist.get_rank() == rank:
                add(trainer.model)
            trainer.train()
        assert_same_log(ours, stock)
        line = ours.fastpack_report[feature]
        assert why in line.reason, line
        assert (f"rank {rank}: " in line.reason) == (dist.get_rank() != rank), line


def fail(error: Exception, *_: Any, **__: Any) -> None:
    raise error


def no_memory(state: Any, model: Any) -> None:
    """Let one rank run out of memory inside of its second step."""
    if state.global_step == 1 and dist.get_rank() == 1:
        model.register_forward_pre_hook(partial(fail, torch.OutOfMemoryError("no memory is left")))


def _fails(where: str) -> None:
    match where:
        case "no memory":
            run(FastSFTTrainer, callbacks=[callback("on_step_begin", no_memory)()])
        case "dispatched":
            run(FastSFTTrainer, accelerator_config={"dispatch_batches": True})
        case _:  # in the forward pass of a layer that FSDP 2 shards, while the other rank gathers the next one
            sharded.FAILURE_GRACE_SECONDS = 0.5
            fast = {"verify_packing": "off"} | ({"activation_memory_gib": 1.0} if where == "plan" else {})
            trainer = make(FastSFTTrainer, gradient_checkpointing=True, fast=fast)
            if dist.get_rank():
                trainer.model.model.layers[0].mlp.forward = partial(fail, RuntimeError("the kernel failed"))
            with fsdp2(trainer):
                trainer.train()


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("no memory", ["a step of several processes cannot run again", "lower activation_memory_gib"]),
        ("plan", ["RankFailedError: rank 1: RuntimeError: the kernel failed", "wait for this one", "in plan_memory"]),
        ("step", ["RuntimeError: the kernel failed", "in training_step"]),
        ("dispatched", ["TypeError: Can only concatenate tensors but got"]),  # as under stock
    ],
)
def test_one_rank_that_fails_ends_all_with_its_reason(where: str, said: list[str], tmp_path: Path) -> None:
    """Inside of the plan and the first step under FSDP 2; out of memory, or in a loader, under DDP."""
    with pytest.raises(AssertionError):  # not a timeout
        fork_ranks(_fails, tmp_path, where=where, timeout=60)
    text = (tmp_path / f"said{int(where != 'dispatched')}").read_text(encoding="utf-8")
    assert [words for words in said if words not in text] == [], text


@two_ranks
def test_a_process_that_fails_takes_the_others_along_and_sharded_layers_stay_whole_for_a_step() -> None:
    dist.init_process_group("gloo")
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
    with pytest.raises(ValueError, match="of 1") if rank else nullcontext():
        assert ranks.first_reason(partial(fail, ValueError("of 1")) if rank else str) == "rank 1: ValueError: of 1"
    assert ranks.first_reason(lambda: "no" * rank) == ("no" if rank else "rank 1: no")

    ids = (torch.arange(24).view(1, 24) * 7 + rank) % 60

    def whole() -> set[bool]:
        return {not isinstance(p, DTensor) for layer in layers for p in layer.parameters()}

    gradients = []
    for keep in (False, True):
        model = tiny_model("qwen3")
        for module in (*model.model.layers, model):  # the units that accelerate makes
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
        layers = layer_units(model)
        assert layers == list(model.model.layers)
        assert whole_bytes(layers, 2) == 2 * sum(p.numel() for layer in layers for p in layer.parameters())
        with keep_unsharded(layers if keep else []):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            assert whole() == {keep}
            loss.backward()
            assert whole() == {False}
        gradients.append([p.grad.full_tensor() for p in model.parameters()])
    assert all(map(torch.equal, *gradients))
    with pytest.raises(ValueError, match="stopped"), keep_unsharded(layers):
        model(input_ids=ids, use_cache=False)
        raise ValueError("stopped")
    assert whole() == {False}
    with keep_unsharded(layers):  # a batch that is replaced by a zero has no backward pass
        model(input_ids=ids, use_cache=False)
    assert whole() == {False}


@two_ranks
def test_a_process_that_is_alone_in_the_decision_about_an_option_does_not_fall_back() -> None:
    dist.init_process_group("gloo")
    for why_not in (lambda _: iter(()), lambda run: iter([not run.ranks.all(True)])):
        run: Any = SimpleNamespace(ranks=Ranks(2, timedelta(seconds=1)), kind="sft", training=True, settings=Settings())
        run.model, run.set_status = tiny_model("qwen3"), print
        run.ranks.all(True)
        if dist.get_rank() == 0:
            with pytest.raises(RankFailedError, match="rank 0: "), ExitStack() as stack:
                Feature("lora", lambda _: nullcontext(), why_not).enter(run, stack)
        dist.barrier()


ALONE = """
from datetime import timedelta
import torch.distributed as dist
from fastpack_trl.model.sharded import Ranks

dist.init_process_group("gloo", timeout=timedelta(seconds=300))
ranks = Ranks(2, timedelta(seconds=300))
ranks.all(True)
with ranks.propagate_failures(0.5):
    if dist.get_rank():
        raise ValueError("alone")
    dist.barrier()
"""


def test_a_process_that_gives_up_waiting_ends_at_once_whatever_the_timeout_of_the_group() -> None:
    """Processes of their own: what a forked one leaves behind does not hold its end."""
    with pytest.raises(AssertionError, match="RankFailedError: rank 1: ValueError: alone"):
        start_ranks(sys.executable, "-c", ALONE, timeout=100)  # the groups would wait for 300 s


def _trained_by_deepspeed(cls: Any, fast: dict[str, str], dtype: str, lora: Any, **options: Any) -> Any:
    unset_hf_deepspeed_config()  # of the trainer before: under ZeRO 3 a model would be sharded when it is made
    torch.manual_seed(0)
    # accelerate starts several processes of DeepSpeed on a CPU where the backend is named.
    base = BASE | {"max_steps": 3, "use_cpu": False, "ddp_backend": "gloo", "bf16": dtype == "bf16"} | options
    fields = {"verify_packing": "on", "packed_attention": "sdpa"} | fast if cls is FastSFTTrainer else None
    trainer = train(cls, Path(), fast=fields, trainer={"peft_config": lora}, **base)
    assert type(trainer.model_wrapped).__name__ == "DeepSpeedEngine"
    assert trainer.accelerator.num_processes == 2
    return trainer


def _deepspeed(stage: int, dtype: str) -> None:
    # A CPU has bf16: only the check of the arguments asks for a GPU. What ZeRO 3 lacks is said, and stops nothing.
    transformers.training_args.is_torch_bf16_gpu_available = lambda: dtype == "bf16"
    patch = pytest.MonkeyPatch()
    if stage == 3:
        patch.setattr(Settings, "is_explicit", lambda *_: False)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
    steps = 1 if stage == 1 else 2  # TRL's configuration of ZeRO 1 fixes one
    for given, asked, feature, path in (
        ({"family": "qwen3_moe", "lora": None, "gradient_accumulation_steps": steps}, {"moe": "on"}, "moe", "fastpack"),
        ({"lora": lora, "gradient_checkpointing": True}, {}, "lora", "fast"),
    ):
        ours, stock = (_trained_by_deepspeed(cls, asked, dtype, **given) for cls in (FastSFTTrainer, SFTTrainer))
        low = dtype == "bf16"
        keys = ("loss",) if low else ("loss", "grad_norm")  # updates of bf16 weights differ by whole steps of theirs
        logs = ([[row[key] for key in keys] for row in figures(one)[:-1]] for one in (ours, stock))
        torch.testing.assert_close(*map(torch.tensor, logs), rtol=1e-3 if low else 1e-5, atol=2e-6)
        report, whole = ours.fastpack_report, not ours.fastpack_run.is_sharded
        assert whole == (stage < 3), report.table()
        assert report["verify_packing"].path == "passed", report.table()
        for name, expected in {feature: path, "sync_free": "loss, metrics"}.items():
            assert (report[name].path == expected) == whole, (stage, report.table())
            assert whole or "shard" in report[name].reason, report.table()
        assert "engine owns backward and step" in report["sync_free"].reason
        assert "copies of weights and gradients" in report["activation_memory"].reason


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs deepspeed")
@pytest.mark.parametrize(("stage", "dtype"), [(1, "no"), (2, "no"), (3, "no"), (2, "bf16")])
def test_a_stage_of_deepspeed_has_the_losses_and_gradients_of_stock(stage: int, dtype: str, tmp_path: Path) -> None:
    """As `accelerate launch` starts it; no compiled operators are needed: ``DS_BUILD_OPS=0 pip install deepspeed``."""
    config = Path(trl.__file__).parent / "accelerate_configs" / f"zero{stage}.yaml"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    launcher += ["--num_processes", "2", "--mixed_precision", dtype, "--main_process_port", free_port()]
    command = [*launcher, *command_of(_deepspeed, tmp_path, stage=stage, dtype=dtype)]
    run_ranks(*command, timeout=300, DS_ACCELERATOR="cpu", ACCELERATE_USE_CPU="false")
