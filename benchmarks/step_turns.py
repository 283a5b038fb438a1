"""Whole optimizer steps of several trainers in one process, in turn: a row as `fastpack_trl.bench.compare` makes it."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from trl import SFTConfig, SFTTrainer

from benchmarks.lora_models import shared_copy
from benchmarks.model_shapes import PAD
from benchmarks.workload import without_emptiest
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.bench.baselines import SideRecipe
from fastpack_trl.bench.compare import bar, measure
from fastpack_trl.bench.side import RoundPlan
from fastpack_trl.config import FastSFTConfig
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.packing.collator import PackingCollator
from fastpack_trl.trainer import FastSFTTrainer

STOCK, OURS = "stock", "fastpack"
PAIR = {STOCK: SideRecipe(SFTTrainer, SFTConfig), OURS: SideRecipe(FastSFTTrainer, FastSFTConfig)}
"""Stock as installed, and ours at its defaults."""
GATE_STEPS = 1
_PEAKS = ("peak_bytes", "reserved_bytes", "before_bytes")


def steps_in_turn(
    recipes: Mapping[str, SideRecipe], given: Mapping[str, Any], arguments: Mapping[str, Any], *, rounds: int,
    warmup: int, seed: int, host_clock: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Return the row of sides whose steps take turns, without what its label says.

    Each side trains a copy of the model, which shares what is frozen, on the same packed rows.

    Args:
        recipes: by side, the reference of the gate first.
        given: of the trainers: ``model``, ``train_dataset``, ``processing_class`` and perhaps ``peft_config``.
        rounds: timed steps of each side.
        warmup: steps before, behind those of the gate.
        host_clock: time what the host does; it waits for the device between two steps only.

    Raises:
        LossParityError: ours was given other rows, or computes something else.
        KeyboardInterrupt: it was interrupted; such a row is measured again.
    """
    plan = RoundPlan(rounds, warmup, GATE_STEPS, seed, host_clock=host_clock)

    def build(trainer_class: Any, config_class: Any, **changes: Any) -> Any:
        args = config_class(**{"output_dir": folder, **arguments, **changes})
        model, peft_config = shared_copy(given["model"], trained=False), copy.deepcopy(given.get("peft_config"))
        trainer = trainer_class(**{**given, "model": model, "args": args, "peft_config": peft_config})
        trainer.train_dataset = without_emptiest(trainer.train_dataset)
        return trainer

    with tempfile.TemporaryDirectory(prefix="fastpack-bench-") as folder, bar("steps", plan.rounds, False) as shown:
        row, complete = measure(recipes, build, plan, shown)
    if row is None or not complete:
        raise KeyboardInterrupt
    frozen = [weight for weight in given["model"].parameters() if weight.is_cuda and not weight.requires_grad]
    with_shared(row, sum(weight.nbytes for weight in frozen))
    return {key: value for key, value in row.items() if key not in ("setting", "model", "tokens")}


def with_shared(row: Mapping[str, Any], nbytes: int) -> None:
    """Add what all sides share to the memory of each: it was there before the first one, and no side has it as its own.

    Args:
        row: of `compare`; a side counts what it allocates itself.
        nbytes: of the frozen base on the device.
    """
    for side in row["sides"].values():
        for key in _PEAKS if side.get("memory") else ():
            side["memory"][key] += nbytes


@contextlib.contextmanager
def packed(trainer: Any, implementation: str = "auto") -> Iterator[str]:
    """Run a stock trainer with the collator and the packed attention of this package; yield the name of its path."""
    collator = PackingCollator(pad_token_id=PAD)
    with (
        patch_attribute(trainer, "data_collator", collator),
        packed_attention(trainer.model, implementation, compute_dtype=torch.bfloat16) as attention,
    ):
        yield attention.path
