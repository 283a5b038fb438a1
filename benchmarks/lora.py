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

from benchmarks.launches import Launches, count_launches
from benchmarks.liger_side import liger_kernels
from benchmarks.lora_models import ALPHA, PROJECTIONS, RANK, LoraModel, build, definitions
from benchmarks.model_shapes import PAD, shape_of
from benchmarks.model_steps import shared_copy
from benchmarks.side_turns import largest_memory, measure_in_turns
from benchmarks.steps import Step, SteppedTrainer, document_tokens, side_figures
from benchmarks.workload import OURS, SPARE_ROWS, STOCK, Setting, trainer_arguments, without_emptiest
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.bench.baselines import (
    RECOMPILES,
    compiled_path,
    compiled_regions,
    whole_row_attention,
)
from fastpack_trl.bench.environment import limited_threads, quiet
from fastpack_trl.bench.result_file import ResultFile, RowTask, run_rows
from fastpack_trl.config import FastSFTConfig
from fastpack_trl.errors import UserError
from fastpack_trl.measure.flops import attention_pairs, model_flops
from fastpack_trl.measure.rounds import Rounds
from fastpack_trl.measure.timing import Clock, CudaClock, clock_of
from fastpack_trl.packing.collator import PackingCollator
from fastpack_trl.trainer import FastSFTTrainer

COMPILED, LIGER, PLANNED = "tuned", "tuned_liger", "fastpack_plan"
SIDES, LIGER_SIDES = (STOCK, COMPILED, OURS, PLANNED), (STOCK, LIGER, OURS, PLANNED)
DEFAULT_TOKENS, DEFAULT_ROUNDS, DEFAULT_SECONDS = (2048, 4096, 8192), 9, 480.0
WARMUP, LEAST_ROUNDS = 5, 3
LOSS_TOLERANCE = 0.01
"""Relative: a side whose loss is further from stock's on the same row is no measurement."""
PEAK_TFLOPS = {"NVIDIA H200": 989.0, "NVIDIA H100 80GB HBM3": 989.0, "NVIDIA A100-SXM4-80GB": 312.0}
"""Dense bf16, of the vendors' data sheets."""


def measure(
    models: dict[str, LoraModel],
    *,
    tokens: Sequence[int] = DEFAULT_TOKENS,
    layers: int | None = None,
    rounds: int = DEFAULT_ROUNDS,
    seconds: float = DEFAULT_SECONDS,
    checkpointing: bool = True,
    threads: int = 2,
    device: str = "cpu",
    seed: int = 0,
    sides: Sequence[str] = SIDES,
    progress: bool = False,
    file: ResultFile | None = None,
) -> dict[str, Any]:
    """Time whole training steps of each side in turn.

    ``stock``: `trl.SFTTrainer` with PEFT as installed, but with the packed attention of this package, so that the
    attention is no difference. ``tuned``: the same, its decoder layers compiled by accelerate (``torch_compile=True``,
    ``ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION=1``), which fuses what Liger's kernels fuse. ``tuned_liger``, in its
    place with `LIGER_SIDES`: both, Liger's RMSNorm, rotary embedding and SwiGLU in the compiled layers, as
    ``use_liger_kernel=True`` gives them. Not beside ``tuned``, which then launches as many kernels as stock (torch
    2.11): both share their functions, and a function whose tracing failed once is not compiled again.
    ``fastpack``: `FastSFTTrainer` with ``activation_memory="off"``, so that what is recomputed is no difference either.
    ``fastpack_plan``: `FastSFTTrainer`, every field at its default: recompute only where the memory asks for it.
    On request also ``stock_sdpa``: stock with its own attention and collator, as installed, and ``rebuild``: the same
    with mask and metadata made again in each layer (`rebuild_per_layer`).

    Args:
        models: by name.
        tokens: row lengths; one row per step.
        layers: only so many decoder layers; stated in the row.
        rounds: timed steps per side at most; 6 or more give an interval of 95 %.
        seconds: for the whole call; row by row an equal share of what is left.
        checkpointing: TRL's gradient checkpointing, on every side or on none.
        threads: torch's intra-op threads.
        device: ``cpu`` or ``cuda``.
        seed: of weights and order.
        sides: `SIDES` or `LIGER_SIDES`; the first one that runs says what the losses are.
        progress: show a progress bar (on a terminal).
        file: written after every row; what it has of this very run is taken over (`run_rows`).

    Returns:
        A record (`make_record`); a row has ``sides`` with seconds, phases, losses, memory, launches and MFU, and
        ``ratios``: seconds of each other side / seconds of fastpack, round by round.

    Raises:
        UserError: `rounds`, `threads` or `seconds` is not above 0.
    """
    if rounds < 1 or threads < 1 or seconds <= 0:
        raise UserError(f"rounds={rounds}, threads={threads}, seconds={seconds:g}: each must be above 0")
    peak = measured_tflops() if device == "cuda" else None
    tasks = [
        row_task(model, length, layers, rounds, checkpointing, device, seed, tuple(sides), peak)
        for model in models.values()
        for length in tokens
    ]
    with limited_threads(threads), quiet():
        return run_rows(
            tasks,
            case="lora",
            settings={
                "documents": "top-level functions and classes of the standard library, packed best-fit decreasing",
                "lora": {"rank": RANK, "alpha": ALPHA, "dropout": 0.0, "target_modules": list(PROJECTIONS)},
                "rounds": rounds,
                "warmup_steps": WARMUP,
                "recompile_limit": RECOMPILES,
                "sides": list(sides),
                "checkpointing": checkpointing,
                "loss_tolerance": LOSS_TOLERANCE,
                "interval": "order statistics of the median; `coverage` is the least probability that they cover it",
            },
            apart={"seconds": seconds, "measured_matmul_tflops": peak},
            seconds=seconds,
            device=device,
            threads=threads,
            seed=seed,
            file=file,
            alike=True,
            progress=progress,
        )


def row_task(
    model: LoraModel, tokens: int, layers: int | None, rounds: int, checkpointing: bool, device: str, seed: int,
    sides: tuple[str, ...] = SIDES, peak: float | None = None, backend: str = "inductor",
) -> RowTask:  # fmt: skip
    """Return the row of a model and a length; `peak` in TFLOP/s, `backend` of the compiled side, else as `measure`."""
    shape = shape_of(model.shape).cut_to(layers)
    policy = "checkpointing" if checkpointing else "no checkpointing"
    title = f"{model.name}, {shape.layers} of {shape.published_layers} layers, bf16 autocast, {policy}"
    label = {"setting": title, "model": model.shape, "tokens": tokens, "layers": shape.layers}
    measure_row = partial(
        _measure_row, model, tokens, layers, rounds, checkpointing, device, seed, sides, peak=peak, backend=backend
    )
    return RowTask(label, measure_row)


def _measure_row(
    model: LoraModel, tokens: int, layers: int | None, rounds: int, checkpointing: bool, device: str, seed: int,
    names: tuple[str, ...], seconds: float, *, peak: float | None, backend: str,
) -> dict[str, Any]:  # fmt: skip
    start = time.perf_counter()
    clock = clock_of(device)
    steps = WARMUP + rounds + 1  # the last one is profiled
    with contextlib.ExitStack() as stack:
        stack.callback(torch._dynamo.reset)  # the next row's layers are other shapes: their graphs are made anew anyway
        stack.enter_context(torch._dynamo.config.patch(recompile_limit=RECOMPILES))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fastpack-bench-"))
        weights = build(model, layers=layers, positions=tokens, seed=seed, device=device)
        vocabulary = int(weights.get_base_model().config.vocab_size)
        tokenizer, documents = definitions(tokens * (steps + SPARE_ROWS + 1), vocabulary, longest=tokens)
        arguments = trainer_arguments(Setting("", True, checkpointing), tokens, steps, device, seed, folder)
        arguments |= {"learning_rate": 1e-6}  # the sides train the same weights in turn: their losses stay comparable
        paths: dict[str, str] = {}

        def make(name: str, first: SteppedTrainer | None) -> SteppedTrainer:
            trainer = _trainer(name, shared_copy(weights), arguments, documents, tokenizer)
            if first is not None:
                trainer.optimizer = first.optimizer.optimizer
            paths[name] = stack.enter_context(_installed(name, trainer, backend))
            with compiled_regions(trainer, backend) if name in (COMPILED, LIGER) else contextlib.nullcontext():
                return SteppedTrainer(trainer, clock, steps)

        turns = measure_in_turns(
            names, make, weights=weights, device=device, rounds=rounds, warmup=WARMUP, least=LEAST_ROUNDS,
            seconds=seconds - (time.perf_counter() - start), clock=clock,
        )  # fmt: skip
        sides, found, failed = turns.sides, turns.found, turns.failed
        flops = model_flops(weights)
        # Stock's batches do not name their documents; those of each round are the same on every side.
        packed = next((steps for steps in found.results.values() if steps[0][0].seq_lengths), [])
        lengths = [step.seq_lengths for step, _ in packed]
        figures = {}
        for name in names:
            if name in failed:
                figures[name] = {"failed": failed[name]}
                continue
            launches = count_launches(sides[name].step, device)
            figures[name] = _figures(found, name, clock, paths[name], launches, flops, peak, lengths)
            if name in (OURS, PLANNED):
                report = sides[name].trainer.fastpack_report
                figures[name]["path"] = ", ".join(
                    f"{line.feature} {line.path}" for line in report if line.status == "on"
                )
                figures[name]["report"] = report.to_dict()
        _gate(figures, next((name for name in names if name not in failed), STOCK))
        good = [name for name in names if "failed" not in figures[name]]
        return {
            "base": model.base,
            "attention": "varlen or per_document of fastpack-trl, on every side",
            "documents": document_tokens([step for step, _ in packed]),
            "sides": figures,
            "ratios": {name: found.ratio(name, OURS) for name in good if name != OURS} if OURS in good else {},
            "order": found.order,
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
    with whole_row_attention(trainer.model, trainer.args.device.type) as attention:
        if name == COMPILED:
            yield compiled_path(attention.path, backend)
            return
        with liger_kernels(trainer) as replaced:
            yield compiled_path(f"{attention.path}, Liger ({', '.join(replaced)})", backend)


def _figures(
    found: Rounds[tuple[Step, Any]], name: str, clock: Clock, path: str, launches: Launches | None, flops: Any,
    peak: float | None, lengths_of: Sequence[tuple[int, ...]],
) -> dict[str, Any]:  # fmt: skip
    steps = [step for step, _ in found.results[name]]
    figures = {
        "path": path,
        **side_figures(found.seconds[name], steps, clock),
        "memory": largest_memory(found.results[name]),
        "batch_tokens": [step.input_ids.numel() for step in steps],
        "batch_documents": [step.documents for step in steps],
        "launches": None if launches is None else launches.to_dict(),
    }
    if peak is not None and lengths_of:
        rates = []
        for lengths, seconds in zip(lengths_of, found.seconds[name], strict=True):
            pairs = {window: attention_pairs(lengths, window) for window in flops.windows}
            rates.append(flops.count(sum(lengths), pairs, sum(lengths)).model / seconds / 1e12)
        typical = sorted(rates)[len(rates) // 2]
        data_sheet = PEAK_TFLOPS.get(torch.cuda.get_device_name())
        figures["tflops"] = typical
        figures["mfu_of_data_sheet"] = None if data_sheet is None else typical / data_sheet
        figures["mfu_of_measured_matmul"] = typical / peak
    return figures


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


def measured_tflops(size: int = 8192, rounds: int = 10) -> float:
    """Measure the TFLOP/s of a square bf16 product on this device: the ceiling that steps are compared with."""
    left = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    clock = CudaClock()
    best = 0.0
    for _ in range(rounds):
        clock.synchronise()
        start = clock.mark()
        left @ left
        end = clock.mark()
        clock.synchronise()
        best = max(best, 2 * size**3 / clock.seconds(start, end) / 1e12)
    return best
