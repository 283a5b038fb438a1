"""Training steps with LoRA and QLoRA: `FastSFTTrainer` beside stock with the same attention, and beside stock tuned.

All sides train one set of weights with one optimizer, on the same packed rows of real text, under the same checkpoint
policy, in turns.
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from trl import SFTConfig, SFTTrainer

from benchmarks.cases import LEAST_ROUNDS, Run, count_launches, row_lengths, seconds_of
from benchmarks.command import known
from benchmarks.lora_models import ALPHA, MODELS, PROJECTIONS, RANK, LoraModel, build, definitions, shared_copy
from benchmarks.model_shapes import PAD, shape_of
from benchmarks.steps import (
    SideTurns,
    SteppedTrainer,
    document_tokens,
    largest_memory,
    measure_in_turns,
    side_figures,
)  # fmt: skip
from benchmarks.workload import OURS, SPARE_ROWS, STOCK, Setting, trainer_arguments, without_emptiest
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.bench.baselines import compiled_regions
from fastpack_trl.bench.result_file import RowTask
from fastpack_trl.config import FastSFTConfig
from fastpack_trl.measure.flops import attention_pairs, model_flops
from fastpack_trl.measure.timing import clock_of
from fastpack_trl.packing.collator import PackingCollator
from fastpack_trl.trainer import FastSFTTrainer

DEFAULTS = Run(rounds=9)
COMPILED, PLANNED = "tuned", "fastpack_plan"
SIDES = (STOCK, COMPILED, OURS, PLANNED)
TOKENS = (2048, 4096, 8192)
WARMUP = 5
LOSS_TOLERANCE = 0.01
"""Relative: a side whose loss is further from stock's on the same row is no measurement."""
RECOMPILES = 64
"""Graphs that torch keeps per function where compiled sides take turns, 8 by default: they share the functions, and at
the limit all of them run eager."""
PEAK_TFLOPS = {"NVIDIA H200": 989.0, "NVIDIA H100 80GB HBM3": 989.0, "NVIDIA A100-SXM4-80GB": 312.0}
"""Dense bf16, of the vendors' data sheets."""


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
        run: see `Run`.
        rows: models, of `MODELS`.
        tokens: row lengths; one row per step.
        layers: only so many decoder layers; stated in the row.
        checkpointing: TRL's gradient checkpointing, on every side or on none.

    Returns:
        A record; a row has ``sides`` with seconds, phases, losses, memory, launches and MFU, and ``ratios``: seconds of
        each other side / seconds of fastpack, round by round. The first side that runs says what the losses are.

    Raises:
        UserError: an unknown model.
    """
    cuda = run.device == "cuda"
    models = known("LoRA model", rows or (["qwen3-0.6b", "qwen3-8b", "qwen3-14b"] if cuda else ["small"]), list(MODELS))
    peak = measured_tflops() if cuda else None
    tasks = [
        row_task(run, MODELS[name], length, layers, checkpointing, peak)
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
        "loss_tolerance": LOSS_TOLERANCE,
    }
    return run.record("lora", tasks, settings, apart={"measured_matmul_tflops": peak}, alike=True)


def row_task(
    run: Run, model: LoraModel, tokens: int, layers: int | None, checkpointing: bool, peak: float | None = None,
    backend: str = "inductor",
) -> RowTask:  # fmt: skip
    """Return the row of a model and a length; `peak` in TFLOP/s, `backend` of the compiled side, else as `measure`."""
    shape = shape_of(model.shape).cut_to(layers)
    policy = "checkpointing" if checkpointing else "no checkpointing"
    title = f"{model.name}, {shape.layers} of {shape.published_layers} layers, bf16 autocast, {policy}"
    label = {"setting": title, "model": model.shape, "tokens": tokens, "layers": shape.layers}
    return RowTask(label, partial(_measure_row, run, model, tokens, layers, checkpointing, peak, backend))


def _measure_row(
    run: Run, model: LoraModel, tokens: int, layers: int | None, checkpointing: bool, peak: float | None,
    backend: str, seconds: float,
) -> dict[str, Any]:  # fmt: skip
    start, device = time.perf_counter(), run.device
    clock = clock_of(device)
    steps = WARMUP + run.rounds + 1  # the last one is profiled
    with contextlib.ExitStack() as stack:
        stack.callback(torch._dynamo.reset)  # the next row's layers are other shapes: their graphs are made anew anyway
        stack.enter_context(torch._dynamo.config.patch(recompile_limit=RECOMPILES))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fastpack-bench-"))
        weights = build(model, layers=layers, positions=tokens, seed=run.seed, device=device)
        vocabulary = int(weights.get_base_model().config.vocab_size)
        tokenizer, documents = definitions(tokens * (steps + SPARE_ROWS + 1), vocabulary, longest=tokens)
        arguments = trainer_arguments(Setting("", True, checkpointing), tokens, steps, device, run.seed, folder)
        arguments |= {"learning_rate": 1e-6}  # the sides train the same weights in turn: their losses stay comparable
        paths: dict[str, str] = {}

        def make(name: str, first: SteppedTrainer | None) -> SteppedTrainer:
            trainer = _trainer(name, shared_copy(weights), arguments, documents, tokenizer)
            if first is not None:
                trainer.optimizer = first.optimizer.optimizer
            paths[name] = stack.enter_context(_installed(name, trainer, backend))
            with compiled_regions(trainer, backend) if name == COMPILED else contextlib.nullcontext():
                return SteppedTrainer(trainer, clock, steps)

        turns = measure_in_turns(
            SIDES, make, weights=weights, device=device, rounds=run.rounds, warmup=WARMUP, least=LEAST_ROUNDS,
            seconds=seconds - (time.perf_counter() - start), clock=clock,
        )  # fmt: skip
        # Stock's batches do not name their documents; those of each round are the same on every side.
        all_steps = turns.found.results.values()
        packed = next(([step for step, _ in steps] for steps in all_steps if steps[0][0].seq_lengths), [])
        figures: dict[str, Any] = {}
        for name in SIDES:
            if name in turns.failed:
                figures[name] = {"failed": turns.failed[name]}
                continue
            launches = count_launches(turns.sides[name].step, device)
            figures[name] = _figures(turns, name, paths[name]) | {"launches": launches}
            if peak is not None and packed:
                lengths = [step.seq_lengths for step in packed]
                figures[name] |= _mfu(model_flops(weights), lengths, turns.found.seconds[name], peak)
        _gate(figures, next((name for name in SIDES if name not in turns.failed), STOCK))
        good = [name for name in SIDES if "failed" not in figures[name]]
        return {
            "base": model.base,
            "attention": "varlen or per_document of fastpack-trl, on every side",
            "documents": document_tokens(packed),
            "sides": figures,
            "ratios": {name: turns.found.ratio(name, OURS) for name in good if name != OURS} if OURS in good else {},
            "order": turns.found.order,
            "other_load": turns.other_load,
        }


def _trainer(name: str, model: Any, arguments: dict[str, Any], documents: Any, tokenizer: Any) -> Any:
    if name in (OURS, PLANNED):
        memory: dict[str, Any] = {"activation_memory": "off"} if name == OURS else {}
        trainer: Any = FastSFTTrainer(
            model,
            args=FastSFTConfig(**arguments, **memory),
            train_dataset=documents,
            processing_class=tokenizer,
        )
    else:
        trainer = SFTTrainer(model, args=SFTConfig(**arguments), train_dataset=documents, processing_class=tokenizer)
        trainer.data_collator = PackingCollator(pad_token_id=PAD)
    trainer.train_dataset = without_emptiest(trainer.train_dataset)
    return trainer


@contextlib.contextmanager
def _installed(name: str, trainer: Any, backend: str = "inductor") -> Iterator[str]:
    """Make a trainer this side; yield the name of its path."""
    if name in (OURS, PLANNED):
        with contextlib.redirect_stdout(io.StringIO()):  # the banner
            features = trainer._fastpack_features(announce=True)
            features.__enter__()
        try:
            yield ""  # what runs is decided in the first step
        finally:
            features.__exit__(None, None, None)
        return
    if name == STOCK:
        with packed_attention(trainer.model, compute_dtype=torch.bfloat16) as attention:
            yield attention.path
        return
    # `auto` goes document by document where they are long: to a compiled layer each number of documents is another
    # graph, and after torch's limit of recompiles it runs eager.
    implementation = "varlen" if trainer.args.device.type == "cuda" else "auto"
    with packed_attention(trainer.model, implementation, compute_dtype=torch.bfloat16) as attention:
        by = "accelerate" if backend == "inductor" else f"accelerate ({backend} backend)"
        yield f"{attention.path}, layers compiled by {by}"


def _figures(turns: SideTurns, name: str, path: str) -> dict[str, Any]:
    side, found = turns.sides[name], turns.found
    steps = [step for step, _ in found.results[name]]
    figures = {
        "path": path,
        **side_figures(found.seconds[name], steps, side.clock),
        "memory": largest_memory(found.results[name]),
        "batch_tokens": [step.input_ids.numel() for step in steps],
        "batch_documents": [step.documents for step in steps],
    }
    if name in (OURS, PLANNED):  # some of what runs is decided in the first step
        report = side.trainer.fastpack_report
        on = [f"{line.feature} {line.path}" for line in report if line.status == "on"]
        figures |= {"path": ", ".join(on), "report": report.to_dict()}
    return figures


def _mfu(
    flops: Any, lengths_of: Sequence[tuple[int, ...]], seconds: Sequence[float], peak: float
) -> dict[str, float | None]:
    """Return the TFLOP/s of the model's own operations, and their share of the data sheet and of a large product."""
    rates = []
    for lengths, taken in zip(lengths_of, seconds, strict=True):
        pairs = {window: attention_pairs(lengths, window) for window in flops.windows}
        rates.append(flops.count(sum(lengths), pairs, sum(lengths)).model / taken / 1e12)
    typical = sorted(rates)[len(rates) // 2]
    data_sheet = PEAK_TFLOPS.get(torch.cuda.get_device_name())
    return {
        "tflops": typical,
        "mfu_of_data_sheet": None if data_sheet is None else typical / data_sheet,
        "mfu_of_measured_matmul": typical / peak,
    }


def _gate(figures: dict[str, Any], first: str) -> None:
    """Turn a side whose losses are not those of the first into a failure with the reason: it is no measurement."""
    if "failed" in figures.get(first, {"failed": ""}):
        return
    expected = figures[first]["losses"]
    for name, side in figures.items():
        if "failed" in side:
            continue
        worst = max(abs(a - b) / abs(b) for a, b in zip(side["losses"], expected, strict=True))
        if not worst <= LOSS_TOLERANCE:
            figures[name] = {"failed": f"its loss is off {first}'s by {worst:.2e}, over {LOSS_TOLERANCE:g}"}


def measured_tflops(size: int = 8192) -> float:
    """Return the TFLOP/s of a square bf16 product on this device: the ceiling that steps are compared with."""
    left = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    return 2 * size**3 / seconds_of(lambda: left @ left, "cuda") / 1e12
