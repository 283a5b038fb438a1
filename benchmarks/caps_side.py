"""One side of the case ``memory_caps``: rows of growing length under growing caps of device memory, in this process."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import get_peft_model
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

from benchmarks.caps_search import Curve, largest_row
from benchmarks.lora_models import shared_copy
from benchmarks.training_rows import Row, model_of
from benchmarks.training_side import device_here
from benchmarks.workload import SPARE_ROWS, TRL_DEFAULTS, Setting, make_tokenizer, trainer_arguments
from fastpack_trl import FastSFTConfig, FastSFTTrainer
from fastpack_trl.bench.run_watch import peaks_gib
from fastpack_trl.checkpointing import activation_memory as plans
from fastpack_trl.checkpointing.activation_memory import ActivationMemory
from fastpack_trl.checkpointing.streams import GIB
from fastpack_trl.checkpointing.trace import trace_levels
from fastpack_trl.measure.device_memory import free_memory
from fastpack_trl.measure.failures import attempt
from fastpack_trl.measure.payback import LONG_RUN
from fastpack_trl.model.changes import patch_attribute

OURS = "fastpack"
SIDES: dict[str, dict[str, Any]] = {"stock": {}, OURS: {"verify_packing": "off"}}
"""Fields that make each side."""
WORKLOADS = {
    "qwen3-8b": Row("qwen3-8b", 0, "lora"), "qwen3-8b-nf4": Row("qwen3-8b", 0, "nf4"),
    "qwen3-14b-nf4": Row("qwen3-14b", 0, "nf4"), "gpt-oss-20b-nf4": Row("gpt-oss-20b", 0, "nf4-experts", 24),
    "tiny": Row("tiny-qwen3", 0, "lora"), "tiny-gpt-oss": Row("tiny-gpt-oss", 0, "nf4-experts"),
}  # fmt: skip
"""By the name on the command line: LoRA r=16 on all projections; of the mixture of experts on the attention, with the
frozen expert stacks in four bits, which stock can train too."""
DEEPEST = {"activation_memory": "offload", "cache_dequantized": "off"}
"""Of ours, while bytes per token are measured: at its largest row the plan leaves no layer's input on the device, and
nothing for copies of weights."""
DOCUMENT = 2048
ROOM = 0.97
"""Of what a cap leaves, for the first row that is tried; the allocator's gaps need the rest."""
STEPS, SLOW_STEPS, SLOW_SECONDS = 3, 2, 4.0
"""Steps of a row, of which the last two are timed, or the second where it took longer."""
ONE_STEP_SECONDS = 20.0
"""A row whose first step takes longer has no other, and is timed by it: the rows before have loaded all kernels."""
LONG, BEFORE_LONG = {"max_steps": LONG_RUN}, 4
"""Of the row that is timed beside another side's: what pays back in a long run is on in it; and the steps that run
before those that are timed, beside the first one: layers are compiled in the second, graphs are recorded then."""
_OUT_OF_MEMORY = ("OutOfMemory", "out of memory", "ALLOC_FAILED")
_START_UP = 3.0  # seconds of a row beside its steps: data, trainer, plan


class Watch(TrainerCallback):
    """Notes the seconds of each step, the device's memory, and the plan; ends the run.

    Args:
        steps: run before those that are timed, beside the first one.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.trainer: Any = None
        self.seconds: list[float] = []
        self.memory: dict[str, float | None] = {"peak_gib": None, "reserved_gib": None}
        self.plan: ActivationMemory | None = None
        self._start = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._start = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            self.memory = peaks_gib("cuda")
        self.seconds.append(time.perf_counter() - self._start)
        if isinstance(self.trainer, FastSFTTrainer):
            self.plan = self.trainer.fastpack_run.get_state(ActivationMemory)
        if len(self.seconds) >= self.steps + steps_at(self.seconds[-1]):
            control.should_training_stop = True


@dataclass
class Side:
    """A model, and the rows that one side has trained it on.

    Args:
        model: with adapters; every row trains a copy of its modules around the same parameters.
        seconds: for all rows; one that is likely to take longer than what is left is not begun.
        note: called with the figures of all rows so far after each of them.
    """

    model: Any
    name: str
    device: str
    seed: int
    seconds: float
    note: Callable[[list[dict[str, Any]]], None] = lambda rows: None
    rows: list[dict[str, Any]] = field(default_factory=list)
    cap: float | None = None

    def __post_init__(self) -> None:
        self._end_at = time.perf_counter() + self.seconds
        self._vocabulary = int(self.model.config.get_text_config().vocab_size)
        self._tokenizer = make_tokenizer(self._vocabulary)

    def run(self, tokens: int, **more: Any) -> dict[str, Any]:
        """Train on rows of `tokens` tokens; return the figures, with ``failed`` where a step could not be run."""
        row: dict[str, Any] = {"cap_gib": self.cap, "tokens": tokens, **({"settings": more} if more else {})}
        watch = Watch(BEFORE_LONG if more.get("max_steps") else 0)
        began = time.perf_counter()
        trained, failure = attempt(partial(self._train, watch, tokens, more))
        row |= {"failed": failure} if trained is None else trained
        row |= {"step_seconds": watch.seconds, **watch.memory}
        row["out_of_memory"] = failure is not None and any(sign in failure for sign in _OUT_OF_MEMORY)
        timed = watch.seconds[1 + watch.steps :][-2:] or [s for s in watch.seconds if s >= ONE_STEP_SECONDS]
        row["tokens_per_second"] = tokens / median(timed) if trained is not None and timed else None
        del watch, trained
        free_memory(self.device)
        row["seconds"] = time.perf_counter() - began
        self.rows.append(row)
        self.note(self.rows)
        return row

    def fits(self, tokens: int, **more: Any) -> bool | None:
        """Run a row (`run`); return whether it could be trained, and None, noted, where there is no time left for it.

        Raises:
            RuntimeError: it failed for another reason than memory.
        """
        if self._likely_seconds(tokens) > self._end_at - time.perf_counter():
            self.rows.append({"cap_gib": self.cap, "tokens": tokens, "skipped": f"not within {self.seconds:g} s"})
            self.note(self.rows)
            return None
        row = self.run(tokens, **more)
        if "failed" in row and not row["out_of_memory"]:
            raise RuntimeError(row["failed"])
        return "failed" not in row

    def curve(self) -> Curve:
        """Return the curve of the peaks of the rows that were run without a cap."""
        done = [row for row in self.rows if row["peak_gib"] and row["cap_gib"] is None and "failed" not in row]
        return Curve.through([(row["tokens"], round(row["peak_gib"] * GIB)) for row in done])

    def _likely_seconds(self, tokens: int) -> float:
        steps = [(row["tokens"], round(min(row["step_seconds"]) * 1e6)) for row in self.rows if row.get("step_seconds")]
        unique = list(dict(sorted(steps)).items())
        try:
            step = Curve.through(unique).at(tokens) / 1e6
        except ValueError:
            return _START_UP
        return _START_UP + step * steps_at(step)

    def _train(self, watch: Watch, tokens: int, more: dict[str, Any]) -> dict[str, Any]:
        kinds: tuple[Any, Any] = (FastSFTTrainer, FastSFTConfig) if self.name == OURS else (SFTTrainer, SFTConfig)
        setting = TRL_DEFAULTS if self.device == "cuda" else Setting("", bf16=False, gradient_checkpointing=True)
        with tempfile.TemporaryDirectory(prefix="fastpack-bench-") as folder:
            arguments = trainer_arguments(setting, tokens, self.device, self.seed)
            arguments |= {"output_dir": folder, "max_steps": STEPS}
            arguments |= {"logging_steps": 1, "save_strategy": "no", "learning_rate": 1e-6, **SIDES[self.name]}
            if self.model.config.model_type == "gpt_oss":
                arguments["router_aux_loss_coef"] = 0.0  # the router is frozen
            trainer = watch.trainer = kinds[0](
                model=shared_copy(self.model), args=kinds[1](**arguments | more),
                train_dataset=rows_of(tokens, STEPS + SPARE_ROWS, self._vocabulary, self.seed),
                processing_class=self._tokenizer, callbacks=[watch],
            )  # fmt: skip
            attention = str(trainer.model.config.get_text_config()._attn_implementation)
            try:
                trainer.train()
            finally:
                watch.trainer = None
                trainer.model.zero_grad()  # the parameters are those of all rows
        found: dict[str, Any] = {
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "attention": attention,
        }
        if watch.plan is not None:
            plan, measured = watch.plan.plan, watch.plan.measured
            found["plan"] = {
                "text": str(plan), "predicted_gib": plan.predicted / GIB, "budget_gib": plan.budget / GIB,
                "measured_gib": None if measured is None else measured / GIB, "ran_again": watch.plan.fell,
            }  # fmt: skip
        if isinstance(trainer, FastSFTTrainer):
            found["attention"] = trainer.fastpack_run.attention_path
            found["report"] = trainer.fastpack_report.to_dict()
        return found


def steps_at(seconds: float) -> int:
    """Return the steps of a row that takes `seconds` for one."""
    if seconds < SLOW_SECONDS:
        return STEPS
    return SLOW_STEPS if seconds < ONE_STEP_SECONDS else 1


def rows_of(tokens: int, count: int, vocabulary: int, seed: int) -> Dataset:
    """Return documents of random ids, of `DOCUMENT` tokens or the rest, that packing makes `count` full rows of."""
    random = np.random.default_rng(seed)
    lengths = [DOCUMENT] * (tokens // DOCUMENT) + ([tokens % DOCUMENT] if tokens % DOCUMENT else [])
    return Dataset.from_dict({"input_ids": [random.integers(2, vocabulary, length) for length in lengths * count]})


@contextlib.contextmanager
def traced_once() -> Iterator[None]:
    """Keep the costs that the first plan inside traces for the later ones: rows of one cap differ in length only."""
    kept: list[Any] = []

    def trace(*args: Any, **kwargs: Any) -> Any:
        if not kept:
            kept.append(trace_levels(*args, **kwargs))
        return kept[0]

    with patch_attribute(plans, "trace_levels", trace):
        yield


@contextlib.contextmanager
def capped(gib: float, context: int) -> Iterator[None]:
    """Limit torch to what a device of `gib` GiB has beside the `context` bytes that CUDA itself takes."""
    if not torch.cuda.is_available():
        yield
        return
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, (gib * GIB - context) / total)))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def context_bytes() -> int:
    """Return the device memory that is in use beside torch's allocator: CUDA's context, kernels, other processes."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def measure_side(
    row: Mapping[str, Any], side: str, *, caps: Sequence[float], beside: Mapping[str, int], longest: int,
    probes: Sequence[int], seed: int, seconds: float, note: Callable[[dict[str, Any]], None] = lambda found: None,
) -> dict[str, Any]:  # fmt: skip
    """Find the largest row of one side under each cap, from the smallest cap to the largest.

    Args:
        beside: by cap, the tokens of a further row to be timed: the largest one of another side.
        longest: tokens that no row exceeds.
        probes: tokens of the rows that are run without a cap, from which the largest ones are predicted.
        note: called with the figures so far after each row.

    Returns:
        ``{"weights_gib", "context_gib", "largest": {cap: tokens}, "predicted": {cap: tokens}, "rows": [...]}``; a cap
        below the model's own memory has 0 tokens and a reason in ``too_small``.
    """
    device = device_here()
    model, peft_config = model_of(WORKLOADS[row["row"]], longest, device, seed)
    if peft_config is not None:
        model = get_peft_model(model, peft_config)
    free_memory(device)
    resident = torch.cuda.memory_allocated() if device == "cuda" else 0
    found: dict[str, Any] = {"weights_gib": resident / GIB, "largest": {}, "predicted": {}, "too_small": {}, "rows": []}

    def so_far(rows: list[dict[str, Any]]) -> None:
        note(found | {"rows": rows})

    runs = Side(model, side, device, seed, seconds, so_far)
    found["rows"] = runs.rows
    # A CPU has nothing to offload from, and a level that cannot be used stops the run.
    deepest = DEEPEST if device == "cuda" else DEEPEST | {"activation_memory": "checkpoint"}
    with traced_once():
        for tokens in probes:
            runs.run(tokens, **(deepest if side == OURS else {}))
    context = context_bytes()
    found["context_gib"] = context / GIB
    curve = runs.curve() if device == "cuda" else None
    for cap in sorted(caps):
        key, runs.cap = f"{cap:g}", cap
        room = cap * GIB - context
        if room <= resident:
            found["largest"][key] = 0
            found["too_small"][key] = f"weights {resident / GIB:.1f} GiB, CUDA {context / GIB:.1f} GiB"
            continue
        guess = longest if curve is None else curve.tokens(room * ROOM, longest)
        found["predicted"][key] = guess
        with capped(cap, context), traced_once():
            found["largest"][key] = largest_row(runs.fits, guess, longest=longest)
            if beside.get(key):
                runs.fits(beside[key], **LONG)
        so_far(runs.rows)
    return found
