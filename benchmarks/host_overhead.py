"""Host time of a training step beside its arithmetic: the real loop of both trainers, LoRA, in turn in one process.

The host's clock stands around the four calls that are arithmetic: what is left is the host's work between them.
"""

from __future__ import annotations

import contextlib
import copy
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from peft import LoraConfig
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.cases import Run, row_lengths
from benchmarks.model_shapes import MODELS, ModelShape, build_model
from benchmarks.packed_attention import ParityError, check_parity, refuse_several_devices
from benchmarks.steps import instrument
from benchmarks.workload import OURS, STOCK, Setting, make_tokenizer, random_documents, trainer_arguments
from fastpack_trl.bench.result_file import RowTask
from fastpack_trl.config import FastSFTConfig
from fastpack_trl.measure.failures import FAILURES
from fastpack_trl.measure.intervals import median_interval, ratio_summary, summary
from fastpack_trl.measure.record import OtherLoad
from fastpack_trl.measure.rounds import Rounds, take_turns
from fastpack_trl.trainer import FastSFTTrainer

DEFAULTS = Run(rounds=7, threads=1, seconds=math.inf)

_STEPS = 8  # per run of either trainer, after `WARMUP_STEPS` that are not timed


ARITHMETIC = ("forward", "backward", "clipping", "optimizer")
WARMUP_STEPS = 2
"""The first steps of a run; not timed."""


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


@dataclass(slots=True)
class LoopSteps:
    """Some optimizer steps of one trainer, from the end of one step to the end of another.

    Attributes:
        seconds: of each step, host time.
        inside: seconds of each step in each of `ARITHMETIC`.
        total: seconds of all steps; the device has finished at both ends.
        tokens: of all steps.
        loss: mean loss of the run, its first steps included.
    """

    seconds: list[float] = field(default_factory=list)
    inside: list[dict[str, float]] = field(default_factory=list)
    total: float = 0.0
    tokens: int = 0
    loss: float = 0.0

    @property
    def outside(self) -> list[float]:
        """Return the seconds of each step that are no arithmetic: batches, metrics, loop, callbacks, schedule."""
        return [taken - sum(parts.values()) for taken, parts in zip(self.seconds, self.inside, strict=True)]


class LoopWatch(TrainerCallback):
    """Fills a `LoopSteps` while a trainer trains; `installed` puts it around the calls that are arithmetic."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.steps = LoopSteps()
        self._parts = dict.fromkeys(ARITHMETIC, 0.0)
        self._last = self._start = self._optimizer = self._backward_end = 0.0
        self._tokens = 0

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._parts[name] += time.perf_counter() - start

    @contextlib.contextmanager
    def installed(self, trainer: Any) -> Iterator[None]:
        """Time forward, backward and clipping inside; the optimizer has callbacks of its own."""
        accelerator, model = trainer.accelerator, trainer.model
        starts: list[float] = []

        @instrument
        def before(*_: Any) -> None:
            starts.append(time.perf_counter())

        @instrument
        def after(*_: Any) -> None:
            self._parts["forward"] += time.perf_counter() - starts.pop()

        def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                with self.part(name):
                    return call(*args, **kwargs)

            return instrument(run)

        batches = trainer.get_batch_samples

        @instrument
        def counted(*args: Any, **kwargs: Any) -> Any:
            found, items = batches(*args, **kwargs)
            self._tokens += sum(inputs["input_ids"].numel() for inputs in found)
            return found, items

        around_step, watch = trainer.maybe_activation_offload_context, self

        class UntilTheGraphIsFree:
            """In the place of TRL's context around stock's step: what a step returned holds no graph when it ends."""

            def __enter__(self) -> None:
                around_step.__enter__()

            def __exit__(self, *error: Any) -> None:
                if watch._backward_end:
                    watch._parts["backward"] += time.perf_counter() - watch._backward_end
                    watch._backward_end = 0.0
                around_step.__exit__(*error)

        @instrument
        def backward(*args: Any, **kwargs: Any) -> None:
            with self.part("backward"):
                run_backward(*args, **kwargs)
            self._backward_end = time.perf_counter()

        run_backward = accelerator.backward
        hooks = [model.register_forward_pre_hook(before, prepend=True), model.register_forward_hook(after)]
        accelerator.backward = backward
        trainer.maybe_activation_offload_context = UntilTheGraphIsFree()
        accelerator.clip_grad_norm_ = timed("clipping", accelerator.clip_grad_norm_)
        trainer.get_batch_samples = counted
        trainer.add_callback(self)
        try:
            yield
        finally:
            trainer.remove_callback(self)
            trainer.maybe_activation_offload_context = around_step
            del accelerator.backward, accelerator.clip_grad_norm_, trainer.get_batch_samples
            for hook in hooks:
                hook.remove()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._optimizer = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        end = time.perf_counter()
        self._parts["optimizer"] = end - self._optimizer  # its step, the schedule's, and the gradients set to None
        if state.global_step > WARMUP_STEPS:
            self.steps.seconds.append(end - self._last)
            self.steps.inside.append(dict(self._parts))
        if state.global_step in (WARMUP_STEPS, args.max_steps):
            self._at_an_end(state.global_step == WARMUP_STEPS)
        self._parts = dict.fromkeys(ARITHMETIC, 0.0)
        self._last = time.perf_counter()

    def _at_an_end(self, first: bool) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        if first:
            self._start, self._tokens = now, 0
        else:
            self.steps.total, self.steps.tokens = now - self._start, self._tokens


def measure(
    run: Run = DEFAULTS, *, tokens: Sequence[int] | None = None, workload: Workload | None = None
) -> dict[str, Any]:
    """Time short runs of stock's `train` and of ours in turn, and what lies outside of the arithmetic.

    Both train the same weights with LoRA on the same rows, at a learning rate of 0: so each run computes the same
    losses, and they are compared (`ParityError`). A step lasts from the end of one to the end of the next, and has
    forward (the model's own call), backward (until its graph is freed), clipping, the optimizer (with the schedule and
    the gradients set to None), and everything else, the batch included: the *overhead*.

    Args:
        run: a round is a run of 8 steps per side. On CUDA the shape of Qwen3-0.6B in bf16 autocast.
        tokens: row lengths in place of the workload's, one row per step.
        workload: `CPU` or `CUDA` by default.

    Returns:
        A record. A row has per side ``seconds`` of a step, ``overhead_seconds``, ``tokens_per_second`` and ``phases``;
        ``ratio``: stock's seconds / ours; ``overhead``: our overhead / stock's, run by run.

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
            empty={},
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
        report = trainers[OURS].fastpack_report
    return {
        "path": report["packed_attention"].path,
        "features": {line.feature: f"{line.status}: {line.path}" for line in report},
        "other_load": other_load,
        "order": found.order,
        **{name: _figures(found.results[name]) for name in (STOCK, OURS)},
        **_ratios(found),
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


def _run(trainer: Any, device: str) -> LoopSteps:
    watch = LoopWatch(device)
    with watch.installed(trainer), contextlib.redirect_stdout(None):
        result = trainer.train()
    watch.steps.loss = float(result.training_loss)
    return watch.steps


def _check(pair: Mapping[str, LoopSteps], tokens: int, bf16: bool) -> dict[str, str]:
    """Raise `ParityError` after a round whose two runs differ in their loss."""
    check_parity(pair[STOCK].loss, pair[OURS].loss, tokens=tokens, bf16=bf16)
    return {}


def _figures(runs: Sequence[LoopSteps]) -> dict[str, Any]:
    inside = [parts for run in runs for parts in run.inside]
    overheads = [median(run.outside) for run in runs]
    return {
        "seconds": {
            **median_interval([run.total / len(run.seconds) for run in runs]).to_dict(),
            "values": [run.seconds for run in runs],
        },
        "overhead_seconds": summary(overheads),
        "tokens_per_second": median_interval([run.tokens / run.total for run in runs]).to_dict(),
        "phases": {name: median(parts[name] for parts in inside) for name in ARITHMETIC}
        | {"overhead": median(overheads)},
        "losses": [run.loss for run in runs],
    }


def _ratios(found: Rounds[LoopSteps]) -> dict[str, Any]:
    stock, ours = found.results[STOCK], found.results[OURS]
    return {
        "ratio": ratio_summary([run.total for run in stock], [run.total for run in ours]),
        "overhead": ratio_summary([median(run.outside) for run in ours], [median(run.outside) for run in stock]),
    }
