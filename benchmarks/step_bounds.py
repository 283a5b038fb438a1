"""The least time that each kind of kernels of a step can take on a device: its roofline.

Products: of each one, the larger of ``2 m k n / peak`` and ``2 bytes x elements / bandwidth``, as they were run:
recomputation is in them. Everything else: the bytes that have to move, each read and written once, in bf16.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks import kernel_kinds as kinds
from benchmarks.kernel_kinds import Launch

TFLOPS = 790.0
"""Of a large bf16 product, as measured on an H200 and an H100."""
TERABYTES = {"NVIDIA H200": 4.8, "NVIDIA H100 80GB HBM3": 3.35}
"""Per second of memory, of the data sheets."""
_BF16 = 2


@dataclass(frozen=True, slots=True)
class Device:
    """Operations and bytes per second."""

    flops: float = TFLOPS * 1e12
    bandwidth: float = TERABYTES["NVIDIA H200"] * 1e12


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One optimizer step in numbers.

    Attributes:
        tokens: of the step, without padding.
        layers, hidden: of the decoder.
        rotated: heads x width of queries and keys together.
        inner: width of the dense feed-forward; 0 with experts.
        slots: tokens times experts of each; 0 without.
        expert_inner: width of one expert.
        vocabulary: of the head.
        attention_flops: of both passes over the query-key pairs of the documents, nothing twice.
        trained_bytes: of the parameters that train.
        packed_elements: weights in four bits.
    """

    tokens: float
    layers: int
    hidden: int
    rotated: int
    inner: int
    slots: float
    expert_inner: int
    vocabulary: int
    attention_flops: float
    trained_bytes: int
    packed_elements: int


def products_seconds(launches: Iterable[Launch], device: Device) -> float:
    """Return the least seconds of some products, each by itself against operations and bytes."""
    seconds = 0.0
    for launch in launches:
        size = launch.product
        if size is not None and launch.first:
            batch, rows, inner, columns = size
            flops = 2 * batch * rows * inner * columns / device.flops
            seconds += max(flops, _BF16 * launch.operands / device.bandwidth)
    return seconds


def glue_bytes(work: Work) -> float:
    """Return the bytes of norms with their residual sums, rotations and gates, forward and backward.

    Elements per token and layer. Two norms: forward reads input and residual and writes both (4 h each), backward reads
    the gradient, the input and the gradient of the residual and writes one (4 h each): 16 h. Rotation: read and write
    of queries and keys in both passes: 4 r. Gate: forward reads two and writes one, backward reads three and writes
    two: 8 i.
    """
    return _BF16 * work.tokens * work.layers * (16 * work.hidden + 4 * work.rotated + 8 * work.inner)


def routing_bytes(work: Work) -> float:
    """Return the bytes of dispatch, gate and combination of the experts, forward and backward.

    Elements per slot and layer: rows are read and written for the dispatch and for the sum, in both passes: 8 h; gate:
    8 i.
    """
    return _BF16 * work.slots * work.layers * (8 * work.hidden + 8 * work.expert_inner)


def bound_seconds(kind: str, launches: Iterable[Launch], steps: int, work: Work, device: Device) -> float:
    """Return the least seconds of one kind of kernels in one step.

    Args:
        kind: of `benchmarks.kernel_kinds.KINDS`; of copies, and of what is not classified, it is 0.
        launches: the kernels of that kind in so many `steps`: products are counted from their shapes.
    """
    if kind in (kinds.BASE, kinds.THIN, kinds.EXPERTS):
        return products_seconds(launches, device) / steps
    logits = 2 * _BF16 * work.tokens * work.vocabulary
    """Read for the loss, and written as its gradient."""
    moved = {
        kinds.GLUE: glue_bytes(work),
        kinds.ROUTING: routing_bytes(work),
        kinds.HEAD: logits,
        kinds.OPTIMIZER: 8.0 * work.trained_bytes,  # weight and two moments read and written; the gradient read, twice
        kinds.DEQUANTISE: 2 * (0.5 + _BF16) * work.packed_elements,  # once for each pass
    }
    if kind == kinds.ATTENTION:
        return work.attention_flops / device.flops
    products = products_seconds(launches, device) / steps if kind == kinds.HEAD else 0.0
    return products + moved.get(kind, 0.0) / device.bandwidth


def work_of(model: Any, tokens: float, documents: Iterable[int]) -> Work:
    """Read the numbers of a step from a model as it trains.

    Args:
        model: transformers, plain or with adapters.
        tokens: of a step.
        documents: lengths of all documents of the data; a step has its share of their pairs.
    """
    from fastpack_trl.measure.flops import attention_pairs, model_flops

    config = model.config.get_text_config()
    head = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    top_k = int(getattr(config, "num_experts_per_tok", 0) or 0)
    inner = int(config.intermediate_size)
    lengths = list(documents)
    share = tokens / max(1, sum(lengths))
    windows = model_flops(model).pairs
    attention = sum(
        (cost.forward + cost.backward) * attention_pairs(lengths, window) * share for window, cost in windows.items()
    )
    parameters = list(model.parameters())
    return Work(
        tokens=tokens, layers=int(config.num_hidden_layers), hidden=int(config.hidden_size),
        rotated=head * int(config.num_attention_heads + config.num_key_value_heads), inner=0 if top_k else inner,
        slots=tokens * top_k, expert_inner=int(getattr(config, "moe_intermediate_size", None) or inner) if top_k else 0,
        vocabulary=int(config.vocab_size), attention_flops=attention,
        trained_bytes=sum(p.numel() * p.element_size() for p in parameters if p.requires_grad),
        packed_elements=sum(2 * p.numel() for p in parameters if getattr(p, "quant_state", None) is not None),
    )  # fmt: skip
