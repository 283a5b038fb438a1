"""The published table in one run: every row that others have published, beside stock, stock tuned and their "before".

It measures nothing itself: each row is one of the cases `lora`, `packed_attention` (whole models), `activation_memory`
or `moe`, with the sides that its published figure asks for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import activation_memory, lora, model_steps, moe
from benchmarks.activation_memory import WORKLOADS, Workload
from benchmarks.activation_sides import SINGLE
from benchmarks.lora_models import ALPHA, MODELS, PROJECTIONS, RANK, LoraModel
from benchmarks.model_shapes import shape_of
from benchmarks.moe_sides import LOOP
from benchmarks.row_loop import RowTask, run_rows
from benchmarks.workload import OURS, STOCK
from fastpack_trl.bench.environment import limited_threads, quiet
from fastpack_trl.bench.result_file import ResultFile
from fastpack_trl.bench.views import NAMES_OF_OURS
from fastpack_trl.errors import UserError
from fastpack_trl.measure.intervals import ratio_summary

CASE = "headline"
SCALES = ("tiny", "full")
DEFAULT_SECONDS = 480.0
STEP_SIDES = (STOCK, model_steps.REBUILD, model_steps.TUNED, OURS)
PARTS = ("forward", "backward", "seconds")


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the table.

    Attributes:
        row: its name; the key of `PUBLISHED`, where something is published about it.
        before: the side that the published figure is measured against.
        part: what runs: `LoraModel` trains with LoRA or QLoRA, ``str`` (a shape) trains whole, a `Workload` reloads
            checkpointed layer inputs, a `moe.Row` runs decoders with experts.
        tokens: of a packed row.
    """

    row: str
    before: str
    part: LoraModel | str | Workload | moe.Row
    tokens: int


FULL = (
    Entry("qwen3-14b-qlora", lora.REBUILD, MODELS["qwen3-14b"], 8192),
    Entry("llama-3.2-1b", model_steps.REBUILD, "llama-3.2-1b", 2048),
    Entry("qwen3-0.6b", model_steps.REBUILD, "qwen3-0.6b", 2048),
    Entry("qwen3-8b-reload", SINGLE, WORKLOADS["qwen3-8b"], WORKLOADS["qwen3-8b"][2]),
    Entry("qwen3-14b-reload", SINGLE, WORKLOADS["qwen3-14b"], WORKLOADS["qwen3-14b"][2]),
    Entry("qwen3-32b-reload", SINGLE, WORKLOADS["qwen3-32b"], WORKLOADS["qwen3-32b"][2]),
    Entry("gpt-oss-20b", model_steps.REBUILD, "gpt-oss-20b", 8192),
    Entry("gpt-oss-20b-experts", LOOP, moe.Row("decoder", "gpt-oss-20b", 24, "lora", 8192, checkpointing=True), 8192),
)
"""Public shapes, for one large GPU."""

_TINY_NF4, _TINY_TOKENS = LoraModel("tiny-qwen3", "nf4"), 512
_TINY_RELOAD: Workload = (LoraModel("tiny-qwen3", "bf16"), 3, _TINY_TOKENS)
_TINY_RELOAD_NF4: Workload = (_TINY_NF4, 3, _TINY_TOKENS)
TINY = (
    Entry("qwen3-14b-qlora", lora.REBUILD, _TINY_NF4, _TINY_TOKENS),
    Entry("llama-3.2-1b", model_steps.REBUILD, "tiny-llama", _TINY_TOKENS),
    Entry("qwen3-0.6b", model_steps.REBUILD, "tiny-qwen3", _TINY_TOKENS),
    Entry("qwen3-8b-reload", SINGLE, _TINY_RELOAD, _TINY_TOKENS),
    Entry("qwen3-14b-reload", SINGLE, _TINY_RELOAD_NF4, _TINY_TOKENS),
    Entry("qwen3-32b-reload", SINGLE, _TINY_RELOAD_NF4, _TINY_TOKENS),
    Entry("gpt-oss-20b", model_steps.REBUILD, "tiny-gpt-oss", _TINY_TOKENS),
    Entry(
        "gpt-oss-20b-experts", LOOP, moe.Row("decoder", "tiny-gpt-oss", 2, "lora", _TINY_TOKENS, checkpointing=True),
        _TINY_TOKENS,
    ),
)  # fmt: skip
"""The same rows with models of the same families that a CPU runs in milliseconds: it shows that all of them run."""
ENTRIES = {"tiny": TINY, "full": FULL}


def measure(
    *,
    scale: str = "tiny",
    rows: tuple[str, ...] | None = None,
    rounds: int | None = None,
    seconds: float = DEFAULT_SECONDS,
    threads: int = 2,
    device: str = "cpu",
    seed: int = 0,
    backend: str | None = None,
    progress: bool = False,
    file: ResultFile | None = None,
) -> dict[str, Any]:
    """Measure every row of the published table, with random weights on packed documents.

    Args:
        scale: ``full``: public shapes; ``tiny``: the same rows with tiny models of the same families.
        rows: only these rows.
        rounds: timed steps per side and row; by default 3 (tiny) or 7 (full). 6 or more give an interval of 95 %.
        seconds: for the whole call, row by row an equal share of what is left.
        threads: torch's intra-op threads.
        device: ``cpu`` or ``cuda``.
        seed: of weights, data and order.
        backend: of `torch.compile`, for the side that is stock tuned; ``inductor`` by default, and ``eager`` at the
            scale ``tiny``: layers are captured, but no kernels are made, which would take longer than all the rest.
        progress: show a progress bar (on a terminal).
        file: written after every row; what it has of this very run is taken over (`run_rows`).

    Returns:
        A record (`make_record`). A row has what its own case gives it, and ``row``, ``before``, ``compares`` (the
        case), ``ratios`` (seconds of each other side / ours) and ``gains``: the same for forward, backward and step.

    Raises:
        UserError: an unknown scale or row; no round, no time; more than one CUDA device.
    """
    if scale not in ENTRIES:
        raise UserError(f"there is no scale {scale!r} (scales: {', '.join(SCALES)})")
    known = [entry.row for entry in ENTRIES[scale]]
    for row in rows or ():
        if row not in known:
            raise UserError(f"there is no row {row!r} in the headline table (rows: {', '.join(known)})")
    rounds = rounds if rounds is not None else 7 if scale == "full" else 3
    if rounds < 1 or threads < 1 or seconds <= 0:
        raise UserError(f"rounds={rounds}, threads={threads}, seconds={seconds:g}: each must be above 0")
    backend = backend or ("inductor" if scale == "full" else "eager")
    model_steps.check_one_device(device)
    chosen = [entry for entry in ENTRIES[scale] if rows is None or entry.row in rows]
    peak = lora.measured_tflops() if device == "cuda" else None
    tasks = [_wrapped(entry, _task(entry, rounds, device, seed, peak, backend)) for entry in chosen]
    with limited_threads(threads), quiet():
        return run_rows(
            tasks,
            case=CASE,
            settings={
                "scale": scale,
                "rounds": rounds,
                "lora": {"rank": RANK, "alpha": ALPHA, "dropout": 0.0, "target_modules": list(PROJECTIONS)},
                "documents": "lora and whole models: functions and classes of the standard library, packed; reload: "
                f"documents of {activation_memory.DOCUMENT} tokens; experts: around {moe.MEAN_DOCUMENT} tokens",
                "compiler": backend,
                "interval": "order statistics of the median; `coverage` is the least probability that they cover it",
            },
            apart={"seconds": seconds, "measured_matmul_tflops": peak},
            seconds=seconds,
            device=device,
            threads=threads,
            seed=seed,
            file=file,
            progress=progress,
        )


def _task(entry: Entry, rounds: int, device: str, seed: int, peak: float | None, backend: str) -> RowTask:
    """Return the row of the case that measures this part."""
    part = entry.part
    if isinstance(part, LoraModel):
        return lora.row_task(
            part, entry.tokens, None, rounds, True, device, seed, lora.HEADLINE_SIDES, peak=peak, backend=backend
        )
    if isinstance(part, str):
        run = model_steps.Run(rounds, True, device, seed, documents=None, sides=STEP_SIDES, backend=backend)
        return model_steps.row_task(part, shape_of(part).cut_to(None), entry.tokens, run)
    if isinstance(part, moe.Row):
        return moe.row_task(part, rounds, device, seed, loop=True)
    model, layers, tokens = part
    return activation_memory.row_task(model.shape, part, False, tokens, layers, rounds, (), device, seed)


def _wrapped(entry: Entry, task: RowTask) -> RowTask:
    case = {LoraModel: lora, str: model_steps, moe.Row: moe}.get(type(entry.part), activation_memory)
    label = {
        "row": entry.row, "before": entry.before, "compares": case.__name__.rpartition(".")[2], **task.label,
        "setting": f"{entry.row}: {task.label['setting']}",
    }  # fmt: skip
    return RowTask(label, partial(_measured, task), {"sides": {}, "ratios": {}, "gains": {}})


def _measured(task: RowTask, seconds: float) -> dict[str, Any]:
    """Measure a row of a case; add the names and the ratios that all rows of this table have."""
    found = task.measure(seconds)
    names = {lora.AS_INSTALLED: STOCK}
    sides = {names.get(name, name): {"path": name, **side} for name, side in found["sides"].items()}
    gains = _gains(sides)
    ratios = {name: parts["seconds"] for name, parts in gains.items()}
    return {**found, "sides": sides, "ratios": ratios, "gains": gains}


def _gains(sides: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return, per other side and part of the step, its seconds / ours, round by round."""
    ours = next((sides[name] for name in NAMES_OF_OURS if "failed" not in sides.get(name, {"failed": ""})), None)
    out: dict[str, dict[str, Any]] = {}
    for name, side in sides.items():
        if ours is None or side is ours or "failed" in side:
            continue
        out[name] = {}
        for part in PARTS:
            theirs, mine = _values(side, part), _values(ours, part)
            if theirs and mine:
                out[name][part] = ratio_summary(theirs, mine)
    return out


def _values(side: Mapping[str, Any], part: str) -> list[float]:
    values = side.get("phase_values", {}).get(part) or side.get(part, {}).get("values")
    return list(values or ())
