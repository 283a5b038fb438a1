"""Attention alone: forward and backward of every backend that loads, on packed rows of real document lengths.

Each backend first passes the trial in which a run tries it too, against plain torch on a small row. Rates are counted
by two conventions, named in the record. ``causal_half``: half of all pairs of tokens of a document, as flash-attention
papers count; ``attended``: the pairs that the mask lets through, the window included. A pair costs ``4 * head_dim``
operations per head forward (two products) and ``10 * head_dim`` backward (five).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.cases import PeakMemory, Run, row_lengths, seconds_of
from benchmarks.command import known
from fastpack_trl.attention.backends import BACKENDS, failure
from fastpack_trl.attention.interface import AttentionCall
from fastpack_trl.bench.result_file import RowTask
from fastpack_trl.measure.failures import attempt
from fastpack_trl.measure.flops import attention_pairs
from fastpack_trl.measure.intervals import median_interval, summary
from fastpack_trl.model.facts import ModelFeatures
from fastpack_trl.packing.packed_batch import PackedBatch

DEFAULTS = Run(rounds=9)
FORWARD_PER_PAIR, BACKWARD_PER_PAIR = 4, 10  # operations per head and per unit of head_dim
DOCUMENTS: dict[str, int | None] = {"short": 150, "medium": 1500, "row": None}
"""Mean tokens per document; None: one document as long as the row."""
NAMES = tuple(BACKENDS)

Attend = Callable[[list[Tensor]], Tensor]
"""From query, key, value and, where there are any, sinks to (1, total_tokens, heads, head_dim)."""

_SPREAD = 0.5  # lengths are uniform within this share of the mean on both sides
_COMPILED_SHAPES = 64  # flex compiles once per kind of layer, more often than torch allows by default


@dataclass(frozen=True, slots=True)
class Heads:
    """The heads of one attention layer, e.g. ``Heads(32, 8, 128)``."""

    heads: int
    kv_heads: int
    head_dim: int
    sinks: bool = False

    def __str__(self) -> str:
        return f"{self.heads}/{self.kv_heads} heads x {self.head_dim}{', sinks' * self.sinks}"


@dataclass(frozen=True, slots=True)
class Layer:
    """One attention layer on one device: everything but the row."""

    heads: Heads
    window: int | None
    dtype: torch.dtype
    device: str

    @property
    def features(self) -> ModelFeatures:
        """Return the facts that a chooser would read from a model with this layer."""
        return ModelFeatures(
            model_type="bench", implementation="eager" if self.heads.sinks else "sdpa",  # stock sdpa knows no sinks
            device_type=self.device, windows=frozenset(() if self.window is None else (self.window,)),
            sinks=self.heads.sinks, softcap=False, dropout=0.0, num_heads=self.heads.heads,
            head_dim=self.heads.head_dim, compute_dtype=self.dtype, gap="",
            capability=torch.cuda.get_device_capability() if self.device == "cuda" else None,
        )  # fmt: skip

    @property
    def scale(self) -> float:
        return float(self.heads.head_dim**-0.5)

    def inputs(self, total_tokens: int, seed: int) -> list[Tensor]:
        """Return random query, key, value and sinks, laid out as by projections: (1, tokens, heads, head_dim)."""
        generator = torch.Generator(self.device).manual_seed(seed)
        make = partial(torch.randn, generator=generator, device=self.device)
        heads = self.heads
        tensors = [
            make(1, total_tokens, count, heads.head_dim).to(self.dtype).transpose(1, 2)
            for count in (heads.heads, heads.kv_heads, heads.kv_heads)
        ]
        tensors += [make(heads.heads).to(self.dtype)] if heads.sinks else []
        return [tensor.requires_grad_() for tensor in tensors]

    def upstream(self, total_tokens: int, seed: int) -> Tensor:
        """Return a random gradient of the output in fp32, (1, tokens, heads, head_dim)."""
        generator = torch.Generator(self.device).manual_seed(seed)
        shape = (1, total_tokens, self.heads.heads, self.heads.head_dim)
        return torch.randn(shape, generator=generator, device=self.device)


@dataclass(frozen=True, slots=True)
class Grid:
    """The rows of a device: every row length with every kind of layer."""

    tokens: tuple[int, ...]
    layers: tuple[Heads, ...]
    windows: tuple[int | None, ...]
    dtypes: tuple[torch.dtype, ...]


CUDA = Grid(
    (8192, 2048, 32768),
    (Heads(32, 8, 128), Heads(16, 8, 128), Heads(64, 8, 64, sinks=True)),
    (None, 128, 4096),
    (torch.bfloat16,),
)
CPU = Grid((512, 2048), (Heads(4, 2, 32), Heads(4, 2, 32, sinks=True)), (None, 128), (torch.float32, torch.bfloat16))


@dataclass(frozen=True, slots=True)
class Configuration:
    """One row of the result."""

    layer: Layer
    tokens: int
    documents: str
    lengths: tuple[int, ...]

    def pairs(self) -> dict[str, float]:
        """Return the pairs of tokens by convention."""
        window = self.layer.window
        diagonal = sum(min(length, window or length) for length in self.lengths) / 2
        return {
            "causal_half": attention_pairs(self.lengths),
            "attended": attention_pairs(self.lengths, window) + diagonal,
        }

    def describe(self) -> dict[str, Any]:
        heads, dtype = self.layer.heads, str(self.layer.dtype).removeprefix("torch.")
        return {
            "setting": f"{self.tokens:,} tokens, {heads}, {dtype}", "tokens": self.tokens, **asdict(heads),
            "dtype": dtype, "window": self.layer.window, "documents": self.documents, "lengths": list(self.lengths),
            "pairs": self.pairs(),
        }  # fmt: skip


def configurations(plan: Grid, device: str, seed: int) -> list[Configuration]:
    """Return all rows of a plan in the order in which they are measured, without windows that no document exceeds."""
    found = []
    for tokens, heads, dtype in product(plan.tokens, plan.layers, plan.dtypes):
        for documents, mean in DOCUMENTS.items():
            lengths = document_lengths(tokens, mean, seed)
            if documents != "row" and len(lengths) == 1:
                continue  # the same as the row itself
            found += [
                Configuration(Layer(heads, window, dtype, device), tokens, documents, lengths)
                for window in plan.windows if window is None or window < max(lengths)
            ]  # fmt: skip
    return found


def document_lengths(tokens: int, mean: int | None, seed: int) -> tuple[int, ...]:
    """Draw lengths around `mean` (None: one document) that fill a row of `tokens`; the last one is cut."""
    if mean is None:
        return (tokens,)
    random = np.random.default_rng(seed)
    low, high = int(mean * (1 - _SPREAD)), int(mean * (1 + _SPREAD))
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, int(random.integers(low, high + 1))))
    return tuple(lengths)


def measure(
    run: Run = DEFAULTS, *, tokens: Sequence[int] | None = None, backends: Sequence[str] = NAMES,
    plan: Grid | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Time every backend in turn, forward and backward, after each has passed its trial.

    Args:
        run: on CUDA the cache is cold; what launches slowly is timed with the host's gaps.
        backends: only these. flex compiles for each kind of layer, which can take most of the seconds.

    Returns:
        A record. A row has ``backends``: per name seconds, rates in TFLOP/s by convention for forward and backward,
        and bytes of memory; or the reason under ``refused`` (not tried), ``wrong`` (its trial failed) or ``failed`` (it
        raised).

    Raises:
        UserError: a row length below 1, a backend that does not exist.
    """
    chosen = known("backend", backends, NAMES)
    plan = plan or (CUDA if run.device == "cuda" else CPU)
    plan = replace(plan, tokens=row_lengths(tokens, plan.tokens))
    tasks = [
        RowTask(each.describe(), partial(_measure_row, run, each, chosen), empty={"backends": {}})
        for each in configurations(plan, run.device, run.seed)
    ]
    settings = {
        "backends": list(chosen),
        "documents": {name: mean or "one per row" for name, mean in DOCUMENTS.items()},
        "flops": {
            "forward": f"{FORWARD_PER_PAIR} * heads * head_dim * pairs",
            "backward": f"{BACKWARD_PER_PAIR} * heads * head_dim * pairs",
            "causal_half": "pairs: half of the sum of squared document lengths",
            "attended": "pairs: those that mask and window let through",
        },
        "gate": "the trial of a run, against plain torch on a small row",
    }
    with _compiling():
        return run.record("attention", tasks, settings)


def _measure_row(run: Run, configuration: Configuration, names: Sequence[str], seconds: float) -> dict[str, Any]:
    layer, device = configuration.layer, run.device
    end_at = time.perf_counter() + seconds
    batch = PackedBatch.from_lengths(configuration.lengths).to(device)
    inputs = layer.inputs(configuration.tokens, run.seed)
    upstream = layer.upstream(configuration.tokens, run.seed + 1).to(layer.dtype)
    backends: dict[str, dict[str, Any]] = {}
    sides = {}
    for name in names:
        asked = (("refused", BACKENDS[name].refuses), ("wrong", partial(failure, BACKENDS[name])))
        found = backends[name] = {key: reason for key, ask in asked if (reason := ask(layer.features))}
        if found:
            continue
        attend, why = attempt(partial(prepare, name, layer, batch))
        if attend is None:
            found["failed"] = str(why)
        else:
            sides[name] = partial(_times, attend, inputs, upstream, device)
    turns, other_load = run.turns(sides, warmup=1, end_at=end_at)
    for name in sides:
        if name in turns.failed:
            backends[name]["failed"] = turns.failed[name]
            continue
        forward, backward, memory = zip(*turns.results[name], strict=True)
        backends[name] |= {
            "forward": _rates(configuration, FORWARD_PER_PAIR, forward),
            "backward": _rates(configuration, BACKWARD_PER_PAIR, backward),
            "memory": memory[-1],
        }
    return {"backends": backends, "order": turns.order, "other_load": other_load}


def _times(
    attend: Attend, inputs: list[Tensor], upstream: Tensor, device: str
) -> tuple[float, float, dict[str, int] | None]:
    """Return the seconds of forward and of backward, and the memory of both."""
    memory = PeakMemory(device)
    out = attend(inputs)
    torch.autograd.grad(out, inputs, upstream, retain_graph=True)
    used = memory.read()
    forward = seconds_of(lambda: attend(inputs), device)
    return forward, seconds_of(lambda: torch.autograd.grad(out, inputs, upstream, retain_graph=True), device), used


def _rates(configuration: Configuration, per_pair: int, seconds: Sequence[float]) -> dict[str, Any]:
    heads = configuration.layer.heads
    taken = median_interval(seconds)
    rates = {}
    for convention, pairs in configuration.pairs().items():
        operations = per_pair * heads.heads * heads.head_dim * pairs / 1e12
        ends = {"median": taken.median, "low": taken.high, "high": taken.low}
        rates[convention] = {end: operations / value for end, value in ends.items()}
    return {"seconds": summary(seconds), "tflops": rates}


@contextmanager
def _compiling() -> Iterator[None]:
    """Leave room for one compiled flex per kind of layer, with a backward that runs more than once; none uncompiled."""
    import torch._dynamo.config as dynamo
    import torch._functorch.config as functorch

    with (
        dynamo.patch(recompile_limit=_COMPILED_SHAPES, fail_on_recompile_limit_hit=True),
        functorch.patch(donated_buffer=False),
    ):
        yield


def prepare(name: str, layer: Layer, batch: PackedBatch) -> Attend:
    """Return the call that runs per layer and step; masks and metadata are made here, once, as in training."""
    prepared = BACKENDS[name].prepare(batch, layer.features, torch.device(layer.device))
    module = _stock_module(layer) if name == "sdpa" else None

    def attend(inputs: list[Tensor]) -> Tensor:
        query, key, value, *sinks = inputs
        if module is not None and sinks:
            module.sinks = sinks[0]  # stock's eager function reads them from the module
        return prepared.attend(
            AttentionCall(query, key, value, layer.scale, layer.window, sinks[0] if sinks else None, module=module)
        )

    return attend


def _stock_module(layer: Layer) -> Any:
    """Return an attention module for stock's function to read: gpt-oss's with sinks, Llama's without."""
    from transformers import LlamaConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention
    from transformers.models.llama.modeling_llama import LlamaAttention

    heads = layer.heads
    fields = {
        "num_attention_heads": heads.heads, "num_key_value_heads": heads.kv_heads, "head_dim": heads.head_dim,
        "hidden_size": heads.heads, "num_hidden_layers": 1, "attention_dropout": 0.0,  # no projection of it is used
    }  # fmt: skip
    if not heads.sinks:
        return LlamaAttention(LlamaConfig(**fields), 0)

    class Module(GptOssAttention):
        sinks: Any = None

        def __init__(self) -> None:
            nn.Module.__init__(self)  # none of its projections is used
            self.num_key_value_groups = heads.heads // heads.kv_heads

    return Module()
