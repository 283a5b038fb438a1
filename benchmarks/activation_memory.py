"""Layer inputs in host memory beside checkpointing without, upstream's offloads, and our own without prefetch.

All sides train one set of weights on the same packed row, in turns.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from trl.models.activation_offloading import get_act_offloading_ctx_manager

from benchmarks.case_tables import table
from benchmarks.cases import PeakMemory, Run, add_sizes
from benchmarks.command import CaseCommand, known
from benchmarks.lora_models import LoraModel, build, shared_copy
from benchmarks.model_shapes import shape_of
from fastpack_trl.attention.install import packed_attention
from fastpack_trl.bench.result_file import RowTask
from fastpack_trl.checkpointing.offload import Offload, offload_checkpoints
from fastpack_trl.checkpointing.plan import checkpointable_layers, layer_functions
from fastpack_trl.checkpointing.streams import CudaStreams, HostStreams
from fastpack_trl.errors import UserError
from fastpack_trl.measure.device_memory import free_memory
from fastpack_trl.measure.failures import attempt
from fastpack_trl.measure.intervals import median_interval, summary
from fastpack_trl.measure.timing import clock_of
from fastpack_trl.model.facts import backbones, text_model
from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs

CHECKPOINT, TRANSFORMERS, SINGLE, TRL, OURS = (
    "checkpoint", "transformers_offload", "single_buffer", "trl_offload", "double_buffer",
)  # fmt: skip
SIDES = (CHECKPOINT, TRANSFORMERS, SINGLE, TRL, OURS)
Workload = tuple[LoraModel, int, int]
"""Model, decoder layers, tokens of the row."""

DEFAULTS = Run(rounds=7)
WORKLOADS: dict[str, Workload] = {
    "qwen3-8b": (LoraModel("qwen3-8b", "bf16"), 12, 49_152),
    "qwen3-14b": (LoraModel("qwen3-14b", "nf4"), 10, 49_152),
    "qwen3-32b": (LoraModel("qwen3-32b", "nf4"), 8, 24_576),
    "small": (LoraModel("small", "fp32"), 4, 256),
}
"""By the name that ``--model`` takes."""
DOCUMENT, WARMUP = 4096, 2
GRADIENT_TOLERANCE = 1e-3
"""Relative, of the norm: a flash backward adds up in no fixed order. Losses must be equal."""


class TimedCudaStreams(CudaStreams):
    """`CudaStreams` that also times copies and the stalls of the compute stream.

    A stall is the time between two events on the compute stream with nothing but a wait between them.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._copies: list[tuple[Any, Any]] = []
        self._stalls: list[tuple[Any, Any]] = []

    def _mark(self, stream: Any) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    def wait(self, stream: Any, event: Any) -> None:
        if stream == self.copier:
            super().wait(stream, event)
            return
        before = self._mark(stream)
        super().wait(stream, event)
        self._stalls.append((before, self._mark(stream)))

    def copy(self, target: Tensor, source: Tensor) -> None:
        before = self._mark(self.copier)
        super().copy(target, source)
        self._copies.append((before, self._mark(self.copier)))

    def take(self) -> tuple[float, float]:
        """Return the seconds of copies, and those for which compute stood still for them, since the last call.

        Waits for the device. A wait that finds its event done costs a few microseconds, counted as a stall too.
        """
        torch.cuda.synchronize(self.device)
        copies, stalls = (
            sum(before.elapsed_time(after) for before, after in pairs) / 1e3 for pairs in (self._copies, self._stalls)
        )
        self._copies, self._stalls = [], []
        return copies, stalls


@dataclass(frozen=True, slots=True)
class Batch:
    """One packed row on the device: token ids ``(1, tokens)`` and its documents."""

    ids: Tensor
    packed: PackedBatch

    @classmethod
    def of(cls, tokens: int, document: int, vocabulary: int, device: str, seed: int) -> Batch:
        """Return `tokens` random tokens in documents of `document` tokens, the last one shorter."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(vocabulary, (1, tokens), generator=generator)
        lengths = [document] * (tokens // document) + ([tokens % document] if tokens % document else [])
        return cls(ids.to(device), PackedBatch.from_lengths(lengths).to(torch.device(device)))


@dataclass
class DecoderSide:
    """A copy of the model's modules around the shared parameters, with one way to keep layer inputs installed.

    The head is left out: with fewer layers than the public model it would weigh more than it does there. The loss is
    the mean square of the last hidden states.
    """

    name: str
    model: Any
    device: str
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    offload: Offload | None = None
    timed: list[TimedCudaStreams] = field(default_factory=list)

    def step(self, batch: Batch, between: Callable[[], None] = lambda: None) -> tuple[Tensor, dict[str, int] | None]:
        """Run forward, call `between`, run backward; return the loss and the memory of the step."""
        memory = PeakMemory(self.device)
        self.model.zero_grad()
        decoder = backbones(self.model)[0]
        kwargs = to_transformers_kwargs(batch.packed) | {"packed_batch": batch.packed}
        with self.around():
            with torch.autocast(self.device, dtype=torch.bfloat16):
                hidden = decoder(batch.ids, use_cache=False, **kwargs)[0]
            loss = hidden.float().square().mean()
            between()
            loss.backward()
        batch.packed.clear_derived()
        return loss.detach(), memory.read()

    def gradient_norm(self) -> float:
        """Return the norm of all gradients, after a step."""
        norms = [p.grad.float().norm() for p in self.model.parameters() if p.grad is not None]
        return float(torch.stack(norms).norm())


@contextlib.contextmanager
def side(name: str, weights: Any, device: str, *, timed: bool = False) -> Iterator[DecoderSide]:
    """Make and install a side.

    Args:
        weights: the model whose parameters all sides share.
        timed: read copy times and stalls from events (`TimedCudaStreams`); CUDA, our sides.
    """
    model = shared_copy(weights).train()
    model.enable_input_require_grads()
    made = DecoderSide(name, model, device)
    layers = checkpointable_layers(model)

    def streams(of: torch.device) -> HostStreams:
        if of.type != "cuda":
            return HostStreams(of)
        if not timed:
            return CudaStreams(of)
        made.timed.append(TimedCudaStreams(of))
        return made.timed[-1]

    plain = partial(checkpoint, use_reentrant=False)
    function = plain if name != TRANSFORMERS else _transformers_function(model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(packed_attention(model, compute_dtype=torch.bfloat16))
        stack.enter_context(layer_functions(layers, [(function, True)] * len(layers)))
        if name in (SINGLE, OURS):
            mode: Any = name
            least = 2**20 if device == "cuda" else 1
            made.offload = stack.enter_context(offload_checkpoints(layers, mode, min_bytes=least, streams=streams))
        if name == TRL:
            PartialState()  # TRL logs through accelerate, which wants its state first; a trainer has made it
            offloading = get_act_offloading_ctx_manager(model=text_model(model))
            made.around = lambda: offloading
        yield made


def _transformers_function(model: Any) -> Callable[..., Any]:
    """Return transformers' own offloading checkpoint, by its public switch.

    Raises:
        TypeError: a version without it.
    """
    base = text_model(model)
    new = hasattr(base, "activation_checkpointing_enable")
    enable = base.activation_checkpointing_enable if new else base.gradient_checkpointing_enable
    enable(**{f"{'activation' if new else 'gradient'}_checkpointing_kwargs": {"use_reentrant": False}, "offload": True})
    function: Callable[..., Any] = checkpointable_layers(model)[0]._gradient_checkpointing_func
    return function


def measure(
    run: Run = DEFAULTS, *, rows: Sequence[str] | None = None, tokens: Sequence[int] | None = None,
    layers: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Time forward and backward of decoders under each way to keep layer inputs.

    ``checkpoint``: on the device. ``transformers_offload``: ``{"offload": True}``, on the compute stream.
    ``single_buffer``: ours without prefetch. ``trl_offload``: ``activation_offloading=True``. ``double_buffer``: ours.

    Returns:
        A record. A row has ``sides`` (seconds, memory, loss), ``ratios`` (seconds of each other side / ours) and
        ``copies`` (from events).

    Raises:
        UserError: an unknown name; more than one row length.
    """
    if tokens is not None and len(tokens) > 1:
        raise UserError("the case 'activation_memory' takes one row length: --tokens N")
    names = rows or (["qwen3-8b", "qwen3-14b", "qwen3-32b"] if run.device == "cuda" else ["small"])
    tasks = []
    for name in known("workload", names, list(WORKLOADS)):
        model, default_layers, default_tokens = WORKLOADS[name]
        count = layers or default_layers
        shape = shape_of(model.shape).cut_to(count)
        length = tokens[0] if tokens else default_tokens
        label = {
            "setting": f"{model.name}, {shape.layers} of {shape.published_layers} layers, decoder, bf16 autocast",
            "model": name, "tokens": length, "layers": shape.layers,
        }  # fmt: skip
        tasks.append(RowTask(label, partial(_measure_row, run, model, count, length)))
    settings = {
        "document_tokens": DOCUMENT,
        "loss": "mean square of the last hidden states; the head is left out",
        "warmup_steps": WARMUP,
        "gate": f"losses equal, norm of the gradients within {GRADIENT_TOLERANCE:g}",
    }
    return run.record("activation_memory", tasks, settings)


def _measure_row(run: Run, model: LoraModel, layers: int, tokens: int, seconds: float) -> dict[str, Any]:
    end_at, device = time.perf_counter() + seconds, run.device
    weights = build(model, layers=layers, positions=tokens, seed=run.seed, device=device)
    vocabulary = int(weights.get_base_model().config.vocab_size)
    batch = Batch.of(tokens, min(DOCUMENT, tokens), vocabulary, device, run.seed)
    failed: dict[str, str | None] = {}
    gates: dict[str, tuple[float, float]] = {}
    sides: dict[str, DecoderSide] = {}
    with contextlib.ExitStack() as stack:
        for label in SIDES:
            made, failed[label] = attempt(partial(_enter, stack, label, weights, device))
            if made is None:
                continue
            found, failed[label] = attempt(partial(_gate, made, batch))
            if found is None:
                attempt(partial(free_memory, device))
                continue
            sides[label], gates[label] = made, found
        failed |= different(gates)
        calls = {label: partial(made.step, batch) for label, made in sides.items() if failed[label] is None}
        turns, other_load = run.turns(calls, warmup=WARMUP, end_at=end_at, clock=clock_of(device))
        failed |= turns.failed
        use = {label: str(made.offload.use) for label, made in sides.items() if made.offload is not None}
        said = {label: made.offload.said for label, made in sides.items() if made.offload is not None}
    free_memory(device)
    return {
        "sides": {
            label: _figures(turns.seconds[label], turns.results[label], tokens, [label, *said.get(label, [])])
            if label in turns.seconds
            else {"failed": failed[label]}
            for label in SIDES
        },
        "ratios": {label: turns.ratio(label, OURS) for label in turns.seconds if label != OURS}
        if OURS in turns.seconds
        else {},
        "copies": {
            "events": {label: _hidden(label, weights, batch, device) for label in (SINGLE, OURS)},
            "host_memory": use,
        },
        "order": turns.order,
        "other_load": other_load,
    }


def _enter(stack: contextlib.ExitStack, label: str, weights: Any, device: str) -> DecoderSide:
    return stack.enter_context(side(label, weights, device))


def _gate(made: DecoderSide, batch: Batch) -> tuple[float, float]:
    loss, _ = made.step(batch)
    return float(loss), made.gradient_norm()


def different(gates: Mapping[str, tuple[float, float]]) -> dict[str, str]:
    """Return the sides whose loss or norm of gradients is not that of `CHECKPOINT`, with the reason."""
    if CHECKPOINT not in gates:
        return {}
    loss, norm = gates[CHECKPOINT]
    return {
        label: f"its loss is {mine:.8g}, not {loss:.8g}, or its gradients are {size:.6g}, not {norm:.6g}"
        for label, (mine, size) in gates.items()
        if mine != loss or not abs(size - norm) <= GRADIENT_TOLERANCE * norm
    }


def _hidden(label: str, weights: Any, batch: Batch, device: str) -> dict[str, Any] | None:
    """Return the copy time and stalls of one step, from events on the streams, and the share of copy time that hid."""
    if device != "cuda":
        return None
    with side(label, weights, device, timed=True) as made:
        for _ in range(WARMUP):
            made.step(batch)
        if not made.timed:
            return None
        made.timed[0].take()
        made.step(batch)
        copies, stalls = made.timed[0].take()
    free_memory(device)
    return {"copy_seconds": copies, "stall_seconds": stalls, "hidden": 1 - stalls / copies if copies else None}


def _figures(seconds: Sequence[float], steps: Sequence[Any], tokens: int, said: Sequence[str]) -> dict[str, Any]:
    return {
        "path": "; ".join(said),
        "seconds": summary(seconds),
        "tokens_per_second": median_interval([tokens / value for value in seconds]).to_dict(),
        "losses": [float(loss) for loss, _ in steps],
        "memory": max((used for _, used in steps if used), key=lambda used: used["peak_bytes"], default=None),
    }


COMMAND = CaseCommand(
    case="activation_memory", help=__doc__, rows=WORKLOADS, default_rows=(), rounds=DEFAULTS.rounds,
    seconds=DEFAULTS.seconds, table=table,
    record=lambda args, file: measure(Run.of(args, file), rows=args.rows, tokens=args.tokens, layers=args.layers),
    more=partial(add_sizes, layers=True),
)  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(COMMAND.start())
