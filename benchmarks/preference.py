"""Whole optimizer steps of TRL's trainers for preferences and online learning beside ours, on the same batches.

Sides take turns, step by step, in one process, from the same weights; losses must agree before times are believed.
Prompts of 50 to 400 tokens, completions of 30 to 200, as in sets of preferences; LoRA, gradient checkpointing on.
GRPO's completions are made up, so that its steps are the learner's alone, shuffled as TRL does. Rows of public shapes
are for a GPU (``qwen3-8b`` has 12 of its layers), those of ``small`` for a CPU.
"""

from __future__ import annotations

import copy
import gc
import random
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from transformers import TrainerCallback

from benchmarks.command import CaseCommand
from benchmarks.model_shapes import build_model, shape_of
from benchmarks.step_turns import OURS, STOCK, steps_in_turn
from benchmarks.training_side import SAME_MEMORY, device_here
from benchmarks.workload import make_tokenizer
from fastpack_trl.bench.baselines import SAME_CHECKPOINTS, SideRecipe
from fastpack_trl.bench.result_file import RowTask
from fastpack_trl.measure.intervals import summary
from fastpack_trl.measure.tables import aligned, fact_lines

CASE = "preference"
WARMUP = 2
PROMPTS, COMPLETIONS = (50, 400), (30, 200)
"""Least and most tokens, drawn evenly."""
VOCABULARY = 8192
"""Of the small models, larger than the others' for the share that the head has in a step."""


@dataclass(frozen=True, slots=True)
class Row:
    """One trainer, model and batch: ``Row("DPO", "small", 4)``."""

    trainer: str
    model: str
    examples: int
    """Pairs, judged completions, or generated completions of a micro-batch."""
    layers: int | None = None
    prompts: tuple[int, int] = PROMPTS
    run: int = 0
    """Steps of a whole run of each side, one after the other; 0: steps take turns, too few to compile or record."""

    @property
    def name(self) -> str:
        """Return what ``--rows`` takes: ``dpo small 4``."""
        short = " short" if self.prompts != PROMPTS else ""
        return f"{self.trainer.lower()} {self.model} {self.examples}{short}{' run' if self.run else ''}"

    @property
    def is_online(self) -> bool:
        """Return whether its trainer generates."""
        return self.trainer in ("GRPO", "RLOO")


ROWS = {
    row.name: row
    for row in (
        Row("DPO", "small", 4), Row("DPO", "small", 8), Row("Reward", "small", 4),
        Row("KTO", "small", 8), Row("GRPO", "small", 8), Row("RLOO", "small", 8),
        Row("DPO", "small", 1, prompts=(10, 10)),
        Row("DPO", "qwen3-0.6b", 8), Row("DPO", "qwen3-8b", 4, 12), Row("Reward", "qwen3-0.6b", 8),
        Row("KTO", "qwen3-0.6b", 8), Row("GRPO", "qwen3-0.6b", 8), Row("DPO", "tiny-qwen3", 2),
        Row("DPO", "qwen3-0.6b", 8, run=70), Row("DPO", "qwen3-8b", 4, 12, run=60), Row("DPO", "tiny-qwen3", 2, run=6),
        Row("Reward", "tiny-qwen3", 2), Row("KTO", "tiny-qwen3", 2), Row("GRPO", "tiny-qwen3", 4),
    )
}  # fmt: skip
ON_A_CPU = ("dpo small 4", "reward small 4", "kto small 8", "grpo small 8", "dpo small 1 short")
ON_A_GPU = ("dpo qwen3-0.6b 8", "dpo qwen3-8b 4", "dpo qwen3-0.6b 8 run", "dpo qwen3-8b 4 run")
LONG = 500
"""Steps that a whole run is said to have, for what weighs its start-up costs; it ends when the timed ones are done."""
GROUP, MICRO_BATCHES = 8, 4
"""Completions of a prompt, and micro-batches of a step, of GRPO and RLOO."""


def measure_row(row: Row, rounds: int, seed: int, _seconds: float = 0.0) -> dict[str, Any]:
    """Return the figures of a row, as of `steps_in_turn`."""
    import trl
    from peft import LoraConfig

    import fastpack_trl

    name, device = row.trainer, device_here()
    steps = (row.run or WARMUP + rounds + 6) * row.examples * (MICRO_BATCHES if row.is_online else 1)
    given: dict[str, Any] = {
        "model": _model(row, device, seed), "processing_class": _tokenizer(_vocabulary(row)),
        "train_dataset": _documents(row, steps, seed),
        "peft_config": LoraConfig(
            r=8, target_modules="all-linear", task_type="SEQ_CLS" if name == "Reward" else "CAUSAL_LM"
        ),
    }  # fmt: skip
    if row.is_online:
        given["reward_funcs"] = len  # never called: rewards are made up too
    stock = SideRecipe(getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config"))
    ours = SideRecipe(getattr(fastpack_trl, f"Fast{name}Trainer"), getattr(fastpack_trl, f"Fast{name}Config"))
    if row.is_online:
        stock, ours = stock.of_the_learner(), ours.of_the_learner()
    sides = {STOCK: stock, OURS: ours}
    if row.run:
        return _whole_runs(row, sides, given, _arguments(row, device, seed))
    if device == "cuda":
        sides[SAME_MEMORY] = replace(ours, changes=SAME_CHECKPOINTS)
    return steps_in_turn(sides, given, _arguments(row, device, seed), rounds=rounds, warmup=WARMUP, seed=seed)


def _whole_runs(
    row: Row, sides: Mapping[str, SideRecipe], given: Mapping[str, Any], arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Return seconds of the steps in the second half of a run of each side, as of `steps_in_turn`, and first losses."""
    found: dict[str, Any] = {}
    for side, recipe in sides.items():
        watch = _Watch(row.run)
        with tempfile.TemporaryDirectory(prefix="fastpack-bench-") as folder:
            args = recipe.config_class(
                **arguments,
                **recipe.changes,
                output_dir=folder,
                max_steps=LONG,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            )
            trainer = recipe.trainer_class(**_copies(given), args=args, callbacks=[watch])
            trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found[side] = {"seconds": summary(watch.seconds()), "losses": losses[:3]}
        if torch.cuda.is_available():
            found[side]["memory"] = {"peak_bytes": torch.cuda.max_memory_allocated()}
        if (report := getattr(trainer, "fastpack_report", None)) is not None:
            found[side]["features"] = {line.feature: line.path for line in report}
        del trainer, watch
        gc.collect()
        torch.cuda.empty_cache()
    first = {side: each["losses"][0] for side, each in found.items()}
    return {"steps": row.run, "sides": found, "loss_difference": abs(first[OURS] - first[STOCK])}


def _copies(given: Mapping[str, Any]) -> dict[str, Any]:
    return dict(given) | {name: copy.deepcopy(given.get(name)) for name in ("model", "peft_config")}


class _Watch(TrainerCallback):
    """Ends a run after `steps`, and times each of its second half with the device's work done."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.times: list[float] = []
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step >= self.steps // 2:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.times.append(time.perf_counter())
        control.should_training_stop = state.global_step >= self.steps

    def seconds(self) -> list[float]:
        """Return the seconds of each timed step."""
        return [later - earlier for earlier, later in pairwise(self.times)]


def _tokenizer(vocabulary: int) -> Any:
    """Return a tokenizer whose words are ``t4 t5 ...``."""
    from tokenizers import pre_tokenizers

    tokenizer = make_tokenizer(vocabulary)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def _vocabulary(row: Row) -> int:
    return VOCABULARY if row.model == "small" else int(shape_of(row.model).fields["vocab_size"])


def _model(row: Row, device: str, seed: int) -> Any:
    shape = shape_of(row.model).cut_to(row.layers)
    weights = torch.bfloat16 if device == "cuda" else torch.float32
    shape = replace(shape, fields={**shape.fields, "vocab_size": _vocabulary(row)}, weights=weights)
    model = build_model(shape, positions=1024, seed=seed, device=device)
    if row.trainer != "Reward":
        return model
    from transformers import AutoModelForSequenceClassification

    config = copy.deepcopy(model.config)
    config.num_labels = 1
    with torch.device(device):
        return AutoModelForSequenceClassification.from_config(config, dtype=weights)


def _documents(row: Row, count: int, seed: int) -> Any:
    """Return prompts and completions of random words, of the kind of the trainer."""
    from datasets import Dataset

    draw, vocabulary = random.Random(seed), min(_vocabulary(row), VOCABULARY)

    def words(least: int, most: int) -> str:
        return " ".join(f"t{draw.randrange(4, vocabulary)}" for _ in range(draw.randint(least, most)))

    short = row.prompts != PROMPTS
    prompts = [f"{words(*row.prompts)} " for _ in range(count)]
    answers = [[words(*((8, 12) if short else COMPLETIONS)) for _ in range(count)] for _ in range(2)]
    if row.is_online:
        return Dataset.from_dict({"prompt": prompts})
    if row.trainer == "KTO":
        labels = [bool(index % 2) for index in range(count)]
        return Dataset.from_dict({"prompt": prompts, "completion": answers[0], "label": labels})
    return Dataset.from_dict({"prompt": prompts, "chosen": answers[0], "rejected": answers[1]})


def _arguments(row: Row, device: str, seed: int) -> dict[str, Any]:
    found: dict[str, Any] = {
        "seed": seed, "use_cpu": device != "cuda", "bf16": device == "cuda", "logging_steps": 1,
        "per_device_train_batch_size": row.examples, "learning_rate": 1e-5, "gradient_checkpointing": True,
    }  # fmt: skip
    if row.is_online:
        online = {
            "gradient_accumulation_steps": MICRO_BATCHES, "num_generations": GROUP, "beta": 0.0,
            "max_completion_length": COMPLETIONS[1],
        }  # fmt: skip
        return found | online
    if row.trainer != "Reward" and device == "cuda":
        # The loss moves by half of beta times what sums of hundreds of log-probabilities lose in bf16.
        found["beta"] = 0.01
    return found | {"max_length": 1024}


def tasks(args: Namespace) -> list[RowTask]:
    """Return the rows to measure."""
    return [RowTask({"row": name}, partial(measure_row, ROWS[name], args.rounds, args.seed)) for name in args.rows]


def settings(args: Namespace) -> dict[str, Any]:
    """Return what the rows share."""
    return {
        "rounds": args.rounds, "warmup": WARMUP, "prompts": PROMPTS, "completions": COMPLETIONS, "lora_rank": 8,
        "micro_batches_online": MICRO_BATCHES, "group": GROUP, "gradient_checkpointing": True,
    }  # fmt: skip


def table(record: Mapping[str, Any]) -> str:
    """Return the record for people: seconds of a step by side, times stock's, peak memory."""
    cells = [["row", "side", "s/step", "of stock", "interval", "peak GiB"]]
    notes: list[str] = []
    for row in record["rows"]:
        notes += [f"{row['row']}: {row['failed']}"] if "failed" in row else []
        cells += [[row["row"], *line] for line in _lines(row)]
    return "\n".join([f"{CASE}: optimizer steps beside TRL's", *fact_lines(record), *aligned(cells), *notes])


def _lines(row: Mapping[str, Any]) -> Iterator[list[str]]:
    stock = row.get("sides", {}).get(STOCK, {})
    for side, found in row.get("sides", {}).items():
        if "failed" in found:
            yield [side, found["failed"], "-", "-", "-"]
            continue
        times = [a / b for a, b in zip(stock["seconds"]["values"], found["seconds"]["values"], strict=False)]
        low, high = (f"{each:.2f}" for each in (min(times), max(times)))
        median = sorted(times)[len(times) // 2]
        peak = (found.get("memory") or {}).get("peak_bytes")
        yield [
            side, f"{found['seconds']['median']:.4f}", f"{median:.2f}", f"{low} to {high}",
            "-" if peak is None else f"{peak / 2**30:.2f}",
        ]  # fmt: skip


COMMAND = CaseCommand(
    case=CASE, help=__doc__, rows=ROWS, default_rows=ON_A_GPU if torch.cuda.is_available() else ON_A_CPU, rounds=7,
    tasks=tasks, settings=settings, table=table,
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(COMMAND.start())
