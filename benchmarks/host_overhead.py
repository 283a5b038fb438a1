"""Host time of a training step beside its arithmetic: the real loop of both trainers, LoRA, in turn in one process."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from benchmarks.cases import Run, row_lengths
from benchmarks.loop_steps import ARITHMETIC, WARMUP_STEPS, GpuProfile, LoopSteps, LoopWatch
from benchmarks.model_shapes import MODELS, ModelShape, build_model
from benchmarks.packed_attention import ParityError, check_parity, refuse_several_devices
from benchmarks.workload import OURS, STOCK, Setting, make_tokenizer, random_documents, trainer_arguments
from fastpack_trl.bench.result_file import RowTask
from fastpack_trl.config import FastSFTConfig
from fastpack_trl.measure.failures import FAILURES
from fastpack_trl.measure.intervals import median_interval, ratio_summary, summary
from fastpack_trl.measure.record import OtherLoad
from fastpack_trl.measure.rounds import Rounds, take_turns
from fastpack_trl.trainer import FastSFTTrainer

DEFAULTS = Run(rounds=7, threads=1)
OVERHEAD_TARGET, STEP_TARGET = 0.2, 1.0
"""On the CPU: most of stock's overhead that ours may have, and the least ratio of whole steps."""

_STEPS = 8  # per run of either trainer, after `WARMUP_STEPS` that are not timed


@dataclass(frozen=True, slots=True)
class Workload:
    """The training: a model by its shape, LoRA on all linear layers, documents packed into rows.

    Attributes:
        name: of the model.
        shape: of the model, random weights.
        documents: tokens of the shortest and of the longest document, uniform between.
        rows: (tokens of a row, micro-batches of one row per optimizer step).
        bf16: autocast to bf16; fp32 otherwise.
    """

    name: str
    shape: ModelShape
    documents: tuple[int, int]
    rows: tuple[tuple[int, int], ...]
    bf16: bool
    rank: int = 16


CPU = Workload(
    "qwen3, 28 layers of 32",
    ModelShape(
        "qwen3",
        {
            "num_hidden_layers": 28, "hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 512, "tie_word_embeddings": True,
        },
    ),
    (16, 64),
    ((128, 1), (128, 4)),
    bf16=False,
)  # fmt: skip
CUDA = Workload("qwen3-0.6b", MODELS["qwen3-0.6b"], (64, 512), ((1024, 1), (2048, 1), (1024, 8)), bf16=True)


def measure(
    run: Run = DEFAULTS, *, tokens: Sequence[int] | None = None, workload: Workload | None = None
) -> dict[str, Any]:
    """Time short runs of stock's `train` and of ours in turn, and what lies outside of the arithmetic.

    Both train the same weights with LoRA on the same rows, at a learning rate of 0: so each run computes the same
    losses, and they are compared (`ParityError`). A step lasts from the end of one to the end of the next, and has
    forward (the model's own call), backward (until its graph is freed), clipping, the optimizer (with the schedule and
    the gradients set to None), and everything else, the batch included: the *overhead*.

    Args:
        run: a round is a run of 8 steps per side. On CUDA the shape of Qwen3-0.6B in bf16 autocast, and one more run
            per side under torch.profiler.
        tokens: row lengths in place of the workload's, one row per step.
        workload: `CPU` or `CUDA` by default.

    Returns:
        A record. A row has per side ``seconds`` of a step, ``overhead_seconds``, ``tokens_per_second``, ``phases`` and,
        on CUDA, ``gpu``: busy seconds, idle share, kernels and host microseconds per micro-step; ``ratio``: stock's
        seconds / ours; ``overhead``: our overhead / stock's, run by run.

    Raises:
        UserError: a row shorter than the longest document, more than one CUDA device.
        ParityError: the losses differ.
    """
    work = workload or (CUDA if run.device == "cuda" else CPU)
    refuse_several_devices(run.device)
    lengths = row_lengths(tokens, [length for length, _ in work.rows], work.documents[1])
    tasks = [
        RowTask(
            {"setting": _setting(work, micro_batches), "tokens": length, "micro_batches": micro_batches},
            partial(_measure_row, run, work, length, micro_batches),
            empty={"target": None, "below_target": None},
        )
        for length, micro_batches in (((length, 1) for length in lengths) if tokens else work.rows)
    ]
    settings = {
        "model": work.name,
        "shape": {"model_type": work.shape.model_type, **work.shape.fields},
        "documents": {"shortest": work.documents[0], "longest": work.documents[1], "distribution": "uniform"},
        "bf16": work.bf16,
        "lora_rank": work.rank,
        "pairs": run.rounds,
        "steps_per_burst": _STEPS,
        "warmup_steps_per_burst": WARMUP_STEPS,
        "learning_rate": 0.0,
    }
    return run.record("host_overhead", tasks, settings, loud=(ParityError,))


def _setting(work: Workload, ga: int) -> str:
    return f"{work.name}, LoRA, {'bf16' if work.bf16 else 'fp32'}, {ga} micro-batch{'es' * (ga > 1)} per step"


def _measure_row(run: Run, work: Workload, tokens: int, ga: int, _seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="fastpack-bench-") as folder:
        trainers = _trainers(work, tokens, ga, run.device, run.seed, folder)
        load = OtherLoad()
        found = take_turns(
            {name: partial(_run, trainers[name], run.device) for name in (STOCK, OURS)},
            rounds=run.rounds,
            loud=FAILURES,
            after_round=lambda pair: _check(pair, tokens * ga * (WARMUP_STEPS + _STEPS), work.bf16),
        )
        other_load = load.cores()
        cuda = run.device == "cuda"
        profiles = {name: _profiled(trainers[name], run.device, ga) for name in (STOCK, OURS)} if cuda else {}
        report = trainers[OURS].fastpack_report
    ratios = _ratios(found)
    return {
        "path": report["packed_attention"].path,
        "features": {line.feature: f"{line.status}: {line.path}" for line in report},
        "other_load": other_load,
        "order": found.order,
        **{name: _figures(found.results[name], ga, profiles.get(name)) for name in (STOCK, OURS)},
        **ratios,
        **_judged(ga, ratios, work),
    }


def _trainers(work: Workload, tokens: int, ga: int, device: str, seed: int, folder: str) -> dict[str, Any]:
    steps = WARMUP_STEPS + _STEPS
    vocabulary = int(work.shape.fields["vocab_size"])
    documents = random_documents(*work.documents, vocabulary, tokens * ga * (steps + 2), seed)
    setting = Setting("", bf16=work.bf16, gradient_checkpointing=False)
    arguments = trainer_arguments(setting, tokens, steps, device, seed, folder) | {
        "gradient_accumulation_steps": ga, "learning_rate": 0.0, "logging_strategy": "no", "save_strategy": "no",
    }  # fmt: skip
    model = build_model(work.shape, positions=tokens, seed=seed, device=device)
    sides: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        STOCK: (SFTTrainer, SFTConfig, {}),
        # Each run starts a training; its proof is no part of a step.
        OURS: (FastSFTTrainer, FastSFTConfig, {"verify_packing": "off"}),
    }
    return {
        name: trainer_class(
            model=copy.deepcopy(model),
            args=config_class(**arguments, **more),
            train_dataset=documents,
            processing_class=make_tokenizer(vocabulary),
            peft_config=LoraConfig(target_modules="all-linear", r=work.rank, lora_dropout=0.0),
        )
        for name, (trainer_class, config_class, more) in sides.items()
    }


def _run(trainer: Any, device: str, profile: GpuProfile | None = None) -> LoopSteps:
    watch = LoopWatch(device, profile)
    with watch.installed(trainer), contextlib.redirect_stdout(None):
        result = trainer.train()
    watch.steps.loss = float(result.training_loss)
    return watch.steps


def _check(pair: Mapping[str, LoopSteps], tokens: int, bf16: bool) -> dict[str, str]:
    """Raise `ParityError` after a round whose two runs differ in their loss."""
    check_parity(pair[STOCK].loss, pair[OURS].loss, tokens=tokens, bf16=bf16)
    return {}


def _profiled(trainer: Any, device: str, ga: int) -> dict[str, Any]:
    profile = GpuProfile()
    run = _run(trainer, device, profile)
    return profile.figures(micro_steps=len(run.seconds) * ga)


def _figures(runs: Sequence[LoopSteps], ga: int, gpu: Mapping[str, Any] | None) -> dict[str, Any]:
    step = median_interval([run.total / len(run.seconds) for run in runs])
    rates = [run.tokens / run.total for run in runs]
    inside = [parts for run in runs for parts in run.inside]
    overheads = [median(run.outside) for run in runs]
    out = {
        "seconds": {**step.to_dict(), "values": [run.seconds for run in runs]},
        "overhead_seconds": summary(overheads),
        "tokens_per_second": median_interval(rates).to_dict(),
        "phases": {name: median(parts[name] for parts in inside) for name in ARITHMETIC}
        | {"overhead": median(overheads)},
        "losses": [run.loss for run in runs],
    }
    if gpu is None:
        return out
    # Kernels take as long without the profiler, the host does not: busy time against the step that was not profiled.
    busy = gpu["busy_seconds_per_micro_step"]
    return {**out, "gpu": {**gpu, "idle_share": max(0.0, 1 - busy * ga / step.median)}}


def _ratios(found: Rounds[LoopSteps]) -> dict[str, Any]:
    stock, ours = found.results[STOCK], found.results[OURS]
    return {
        "ratio": ratio_summary([run.total for run in stock], [run.total for run in ours]),
        "overhead": ratio_summary([median(run.outside) for run in ours], [median(run.outside) for run in stock]),
    }


def _judged(micro_batches: int, ratios: Mapping[str, Any], work: Workload) -> dict[str, Any]:
    if work is not CPU or micro_batches > 1:
        return {"target": None, "below_target": None}
    reached = ratios["overhead"]["median"] <= OVERHEAD_TARGET and ratios["ratio"]["median"] >= STEP_TARGET
    return {"target": OVERHEAD_TARGET, "below_target": not reached}
