"""Training steps with LoRA and QLoRA: `FastSFTTrainer` beside stock with the same attention, and beside stock tuned.

All sides train over one frozen base, each with adapters of its own, on the same packed rows of real text, under the
same checkpoint policy, in turns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from trl import SFTConfig, SFTTrainer

from benchmarks.cases import Run, row_lengths
from benchmarks.command import known
from benchmarks.lora_models import ALPHA, MODELS, PROJECTIONS, RANK, LoraModel, build, definitions
from benchmarks.model_shapes import shape_of
from benchmarks.step_turns import OURS, STOCK, packed, steps_in_turn
from benchmarks.workload import SPARE_ROWS, Setting, trainer_arguments
from fastpack_trl.bench.baselines import SideRecipe, compiled_regions
from fastpack_trl.bench.result_file import RowTask
from fastpack_trl.config import FastSFTConfig
from fastpack_trl.trainer import FastSFTTrainer

DEFAULTS = Run(rounds=9)
COMPILED, PLANNED = "tuned", "fastpack_plan"
SIDES = (STOCK, COMPILED, OURS, PLANNED)
TOKENS = (2048, 4096, 8192)
WARMUP = 5
RECOMPILES = 64
"""Graphs that torch keeps per function where compiled sides take turns, 8 by default: they share the functions, and at
the limit all of them run eager."""


def measure(
    run: Run = DEFAULTS, *, rows: Sequence[str] | None = None, tokens: Sequence[int] | None = None,
    layers: int | None = None, checkpointing: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Time whole training steps of each side in turn.

    ``stock``: `trl.SFTTrainer` with PEFT as installed, but with the packed attention of this package, so that the
    attention is no difference. ``tuned``: the same, its decoder layers compiled by accelerate (``torch_compile=True``,
    ``ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=1``), which fuses what Liger's kernels fuse (those are a side of
    `benchmarks.side_by_side`, in a process of its own).
    ``fastpack``: `FastSFTTrainer` with ``activation_memory="off"``, so that what is recomputed is no difference either.
    ``fastpack_plan``: `FastSFTTrainer`, every field at its default: recompute only where the memory asks for it.

    Args:
        layers: only so many decoder layers; stated in the row.
        checkpointing: TRL's gradient checkpointing, on every side or on none.

    Returns:
        A record; its rows are those of `steps_in_turn`.

    Raises:
        UserError: an unknown model.
    """
    default = ["qwen3-0.6b", "qwen3-8b", "qwen3-14b"] if run.device == "cuda" else ["small"]
    models = known("LoRA model", rows or default, list(MODELS))
    tasks = [
        row_task(run, MODELS[name], length, layers, checkpointing)
        for name in models
        for length in row_lengths(tokens, TOKENS)
    ]
    settings = {
        "documents": "top-level functions and classes of the standard library, packed best-fit decreasing",
        "lora": {"rank": RANK, "alpha": ALPHA, "dropout": 0.0, "target_modules": list(PROJECTIONS)},
        "warmup_steps": WARMUP,
        "recompile_limit": RECOMPILES,
        "sides": list(SIDES),
        "checkpointing": checkpointing,
    }
    return run.record("lora", tasks, settings, alike=True)


def row_task(
    run: Run, model: LoraModel, tokens: int, layers: int | None, checkpointing: bool, backend: str = "inductor"
) -> RowTask:
    """Return the row of a model and a length; `backend` of the compiled side, else as `measure`."""
    shape = shape_of(model.shape).cut_to(layers)
    policy = "checkpointing" if checkpointing else "no checkpointing"
    title = f"{model.name}, {shape.layers} of {shape.published_layers} layers, bf16 autocast, {policy}"
    label = {"setting": title, "model": model.shape, "tokens": tokens, "layers": shape.layers}
    return RowTask(label, partial(_measure_row, run, model, tokens, layers, checkpointing, backend))


def _measure_row(
    run: Run, model: LoraModel, tokens: int, layers: int | None, checkpointing: bool, backend: str, _seconds: float
) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        stack.callback(torch._dynamo.reset)  # the next row's layers are other shapes: their graphs are made anew anyway
        stack.enter_context(torch._dynamo.config.patch(recompile_limit=RECOMPILES))
        weights = build(model, layers=layers, positions=tokens, seed=run.seed, device=run.device)
        vocabulary = int(weights.get_base_model().config.vocab_size)
        tokenizer, documents = definitions(tokens * (WARMUP + run.rounds + 4 + SPARE_ROWS), vocabulary, longest=tokens)
        given = {"model": weights, "processing_class": tokenizer, "train_dataset": documents}
        arguments = trainer_arguments(Setting("", True, checkpointing), tokens, run.device, run.seed)
        recipes = {
            STOCK: SideRecipe(SFTTrainer, SFTConfig, {}, packed),
            COMPILED: SideRecipe(SFTTrainer, SFTConfig, {}, partial(packed_and_compiled, backend=backend)),
            OURS: SideRecipe(FastSFTTrainer, FastSFTConfig, {"activation_memory": "off"}),
            PLANNED: SideRecipe(FastSFTTrainer, FastSFTConfig),
        }
        row = steps_in_turn(recipes, given, arguments, rounds=run.rounds, warmup=WARMUP, seed=run.seed)
        return row | {"base": model.base, "attention": "varlen or per_document of fastpack-trl, on every side"}


@contextlib.contextmanager
def packed_and_compiled(trainer: Any, backend: str = "inductor") -> Iterator[str]:
    """Compile the layers of a stock trainer too."""
    # `auto` goes document by document where they are long: to a compiled layer each number of documents is another
    # graph, and after torch's limit of recompiles it runs eager.
    implementation = "varlen" if trainer.args.device.type == "cuda" else "auto"
    by = "accelerate" if backend == "inductor" else f"accelerate ({backend} backend)"
    with packed(trainer, implementation) as path, compiled_regions(trainer, backend):
        yield f"{path}, layers compiled by {by}"
