"""Training steps of models in their public shapes: stock, the per-layer rebuild of the metadata, and fastpack.

All sides train one set of weights with one optimizer, so that a model fits once and peak memory compares: each has its
own modules around the same parameters, and its own trainer.
"""

from __future__ import annotations

import contextlib
import copy
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from trl import SFTConfig, SFTTrainer

from benchmarks.model_gate import TIMES_BUDGET, Reference, reference, token_losses
from benchmarks.model_shapes import ModelShape, build_model
from benchmarks.side_turns import largest_memory, make_sides, time_sides
from benchmarks.steps import Step, SteppedTrainer, document_tokens, side_figures
from benchmarks.workload import (
    OURS,
    SPARE_ROWS,
    STOCK,
    Setting,
    make_tokenizer,
    random_documents,
    trainer_arguments,
    without_emptiest,
)
from fastpack_trl.bench.environment import limited_threads, quiet
from fastpack_trl.bench.rebuild import dense_mask_of, metadata_of, rebuild_per_layer
from fastpack_trl.bench.result_file import ResultFile, RowTask, run_rows
from fastpack_trl.config import FastSFTConfig
from fastpack_trl.errors import UserError
from fastpack_trl.measure.device_memory import free_memory
from fastpack_trl.measure.failures import attempt
from fastpack_trl.measure.intervals import median_interval
from fastpack_trl.measure.rounds import Rounds, take_turns
from fastpack_trl.measure.timing import Clock, clock_of
from fastpack_trl.trainer import FastSFTTrainer

REBUILD = "rebuild"
SIDES = (STOCK, REBUILD, OURS)
DEFAULT_TOKENS, DEFAULT_ROUNDS, DEFAULT_SECONDS = (2048, 8192), 9, 480.0
DOCUMENTS = (64, 1024)
GATE_ROWS, WARMUP = 1, 1
LEAST_ROUNDS = 3
_REBUILDS = 7  # times that one rebuild of the metadata is measured by itself


@dataclass(frozen=True, slots=True)
class Run:
    """Settings that every row of one call shares."""

    rounds: int
    checkpointing: bool
    device: str
    seed: int
    documents: tuple[int, int]
    """Tokens of the shortest and the longest document of random tokens."""

    @property
    def setting(self) -> Setting:
        name = f"bf16, {'checkpointing' if self.checkpointing else 'no checkpointing'}"
        return Setting(name, bf16=True, gradient_checkpointing=self.checkpointing)

    @property
    def clock(self) -> Clock:
        return clock_of(self.device)


def measure(
    shapes: dict[str, ModelShape],
    *,
    tokens: Sequence[int] = DEFAULT_TOKENS,
    rounds: int = DEFAULT_ROUNDS,
    seconds: float = DEFAULT_SECONDS,
    checkpointing: bool = True,
    threads: int = 2,
    device: str = "cpu",
    seed: int = 0,
    documents: tuple[int, int] = DOCUMENTS,
    progress: bool = False,
    file: ResultFile | None = None,
) -> dict[str, Any]:
    """Time whole training steps of three sides in turn, on the same packed rows and the same weights.

    ``stock``: `trl.SFTTrainer` as installed. ``rebuild``: the same, with mask and metadata rebuilt from the positions
    in each layer (`rebuild_per_layer`). ``fastpack``: `FastSFTTrainer`. A step is fetch, collate, forward, backward,
    clipping, AdamW and the schedule. Before anything is timed, each side's loss per token is compared with separate
    documents in fp32, within twice the error of stock's own bf16 on separate documents. A side that fails that, or runs
    out of memory, is a row with its reason; the others go on.

    Args:
        shapes: models by name, cut to the layers that are to run (`ModelShape.cut_to`).
        tokens: row lengths.
        rounds: timed steps per side at most; 6 or more give an interval of 95 %.
        seconds: for the whole call; row by row an equal share of what is left. A row that has begun is finished with at
            least 3 rounds, one that finds no time is skipped, named.
        checkpointing: gradient checkpointing, on all sides or on none.
        threads: torch's intra-op threads.
        device: ``cpu`` or ``cuda``.
        seed: of weights, documents and order.
        documents: tokens of the shortest and of the longest document, uniform between.
        progress: show a progress bar (on a terminal).
        file: written after every row; what it has of this very run is taken over (`run_rows`).

    Returns:
        A record (`make_record`). A row has ``sides``: seconds, tokens per second, phases, losses and bytes of memory,
        or ``failed`` with the reason; ``ratios``: seconds of each other side / seconds of fastpack, round by round;
        ``gate``: the errors that were allowed and found; ``rebuild_seconds``: of one rebuild by itself.

    Raises:
        UserError: a row shorter than the longest document, no round, no time, more than one CUDA device.
    """
    if rounds < 1 or threads < 1 or seconds <= 0:
        raise UserError(f"rounds={rounds}, threads={threads}, seconds={seconds:g}: each must be above 0")
    if min(tokens) < documents[1]:
        raise UserError(
            f"tokens={min(tokens)} is shorter than the longest document ({documents[1]} tokens), which would be cut: "
            f"give {documents[1]} or more"
        )
    check_one_device(device)
    run = Run(rounds, checkpointing, device, seed, documents)
    tasks = [row_task(name, shape, length, run) for name, shape in shapes.items() for length in tokens]
    with limited_threads(threads), quiet():
        return run_rows(
            tasks,
            case="packed_attention",
            settings={
                "models": {name: {"model_type": shape.model_type, **shape.fields} for name, shape in shapes.items()},
                "documents": {"shortest": documents[0], "longest": documents[1], "distribution": "uniform"},
                "rounds": rounds,
                "warmup_steps": GATE_ROWS + WARMUP,
                "checkpointing": checkpointing,
                "gate": f"per token, {TIMES_BUDGET:g} x stock's bf16 error against fp32, both on separate documents",
                "interval": "order statistics of the median; `coverage` is the least probability that they cover it",
            },
            apart={"seconds": seconds},
            seconds=seconds,
            device=device,
            threads=threads,
            seed=seed,
            file=file,
            progress=progress,
        )


def check_one_device(device: str) -> None:
    """Check that the trainers would run on one device.

    Raises:
        UserError: torch sees several.
    """
    if device == "cuda" and torch.cuda.device_count() > 1:
        raise UserError(
            f"torch sees {torch.cuda.device_count()} CUDA devices, and the trainers would split each batch: set "
            "CUDA_VISIBLE_DEVICES=0"
        )


def row_task(name: str, shape: ModelShape, tokens: int, run: Run) -> RowTask:
    """Return one row: a model, cut to the layers that are to run, and a row length."""
    label = {"setting": _title(name, shape, run), "model": name, "tokens": tokens, "layers": shape.layers}
    return RowTask(label, partial(_measure_row, shape, tokens, run))


def _title(name: str, shape: ModelShape, run: Run) -> str:
    dtype = str(shape.weights).removeprefix("torch.")
    return f"{name}, {shape.layers} of {shape.published_layers} layers, {dtype} weights, {run.setting.name}"


def _measure_row(shape: ModelShape, tokens: int, run: Run, seconds: float) -> dict[str, Any]:
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fastpack-bench-"))
        model = build_model(shape, positions=tokens, seed=run.seed, device=run.device)
        sides, paths, failed = _sides(model, shape, tokens, run, folder, stack)
        gate, wrong, positions = _gate(model, shape, sides, run.device)
        failed |= wrong
        found, other_load = time_sides(
            {name: side for name, side in sides.items() if name not in failed}, weights=model, device=run.device,
            rounds=run.rounds, warmup=WARMUP, least=LEAST_ROUNDS,
            seconds=seconds - (time.perf_counter() - start), clock=run.clock,
        )  # fmt: skip
        return {
            "weights": str(shape.weights).removeprefix("torch."),
            "attention": model.config._attn_implementation,
            "experts": getattr(model.config, "_experts_implementation", None) if shape.has_experts else None,
            "gate": gate,
            "documents": document_tokens([step for steps in found.results.values() for step, _ in steps]),
            "rebuild_seconds": _rebuild_seconds(positions, run),
            "sides": {
                name: {"failed": (failed | found.failed)[name]}
                if name not in found.seconds
                else {"path": paths[name], **_figures(found, name, run.clock)}
                for name in SIDES
            },
            "ratios": {name: found.ratio(name, OURS) for name in found.seconds if name != OURS}
            if OURS in found.seconds
            else {},
            "order": found.order,
            "other_load": other_load,
        }


def _sides(
    model: Any, shape: ModelShape, tokens: int, run: Run, folder: str, stack: contextlib.ExitStack
) -> tuple[dict[str, SteppedTrainer], dict[str, str], dict[str, str]]:
    """Return the sides that could be built, what each runs, and why the others could not be built."""
    steps = GATE_ROWS + WARMUP + run.rounds
    vocabulary, needed = shape.fields["vocab_size"], tokens * (steps + SPARE_ROWS + 1)
    tokenizer = make_tokenizer(vocabulary)
    documents = random_documents(*run.documents, vocabulary, needed, run.seed)
    arguments = trainer_arguments(run.setting, tokens, steps, run.device, run.seed, folder)
    if shape.has_experts:
        arguments["router_aux_loss_coef"] = 0.0  # the loss is compared with that of separate documents
    paths: dict[str, str] = {}

    def make(name: str, first: SteppedTrainer | None) -> SteppedTrainer:
        trainer_class, config_class = (FastSFTTrainer, FastSFTConfig) if name == OURS else (SFTTrainer, SFTConfig)
        trainer: Any = trainer_class(
            model=shared_copy(model),
            args=config_class(**arguments),
            train_dataset=documents,
            processing_class=tokenizer,
        )
        trainer.train_dataset = without_emptiest(trainer.train_dataset)
        if first is not None:
            trainer.optimizer = first.optimizer.optimizer
        paths[name] = stack.enter_context(_installed(name, trainer))
        return SteppedTrainer(trainer, run.clock, steps)

    sides, failed = make_sides(SIDES, make)
    return sides, paths, failed


@contextlib.contextmanager
def _installed(name: str, trainer: Any) -> Iterator[str]:
    """Make a trainer this side; yield the name of its path."""
    stock = trainer.model.config._attn_implementation
    if name == OURS:
        with trainer._fastpack_features():
            yield trainer.fastpack_report["packed_attention"].path
    elif name == REBUILD:
        with rebuild_per_layer(trainer.model):
            yield f"{stock}, mask and metadata in each layer"
    else:
        yield stock


def shared_copy(model: Any) -> Any:
    """Copy modules, hooks and config around the *same* parameters, and around the scales of those in four bits."""
    shared = [*model.parameters()]
    shared += [state for module in model.modules() if (state := getattr(module, "quant_state", None)) is not None]
    return copy.deepcopy(model, {id(one): one for one in shared})


def _gate(
    model: Any, shape: ModelShape, sides: dict[str, SteppedTrainer], device: str
) -> tuple[dict[str, Any], dict[str, str], torch.Tensor | None]:
    """Compare each side's first row with separate documents: figures, the sides that are wrong, the row's positions."""
    row: tuple[torch.Tensor, Reference] | None = None
    positions: torch.Tensor | None = None
    figures: dict[str, Any] = {}
    wrong: dict[str, str] = {}
    for name, side in sides.items():
        (inputs,), items = side.fetch()
        ids, positions = inputs["input_ids"], inputs["position_ids"]
        if row is None:
            row = ids, reference(model, ids, positions)
        if not torch.equal(row[0], ids):
            wrong[name] = "was given another row than the first side"
            continue
        judged, failure = attempt(partial(_judge, name, side, inputs, items, row[1]))
        model.zero_grad()
        if judged is None:
            wrong[name] = failure or ""
            free_memory(device)
            continue
        figures[name], reason = judged
        if reason and name == STOCK and shape.leaks:
            figures[name]["leaks"] = f"documents see each other in stock {shape.model_type}: {reason}"
        elif reason:
            wrong[name] = reason
    budget = None if row is None else row[1].budget
    return {"reference": "separate documents, stock, fp32", "budget": budget, "sides": figures}, wrong, positions


def _judge(name: str, side: SteppedTrainer, inputs: Any, items: Any, expected: Reference) -> tuple[dict[str, Any], str]:
    losses = token_losses(side.trainer.model, inputs, bf16=True)
    loss = float(side.trainer.training_step(side.model, inputs, items))
    return expected.verdict(name, losses, loss)


def _figures(found: Rounds[tuple[Step, Any]], name: str, clock: Clock) -> dict[str, Any]:
    steps = [step for step, _ in found.results[name]]
    return {
        **side_figures(found.seconds[name], steps, clock),
        "memory": largest_memory(found.results[name]),
        "batch_tokens": [step.input_ids.numel() for step in steps],
        "batch_documents": [step.documents for step in steps],
    }


def _rebuild_seconds(positions: torch.Tensor | None, run: Run) -> dict[str, float] | None:
    """Time one rebuild of metadata and mask by itself: what a layer of the rebuild side pays beside its attention."""
    if positions is None:
        return None

    def rebuild() -> None:
        _, lengths, _ = metadata_of(positions)
        dense_mask_of(lengths, None)

    call: dict[str, Callable[[], None]] = {"rebuild": rebuild}
    found = take_turns(call, rounds=_REBUILDS, clock=run.clock)
    return median_interval(found.seconds["rebuild"]).to_dict() if found.seconds else None
