"""What the kernels of a training step are for, from their names and the shapes of the operators that launch them.

Products are told apart by shape: cuBLAS gives a base projection, a LoRA factor and the head kernels of the same name.
What no shape is known of is told by name; what no rule names is `UNKNOWN`, and is listed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

BASE, THIN, HEAD = "base products", "thin products", "head and loss"
ATTENTION, GLUE = "attention", "norms and glue"
EXPERTS, ROUTING = "experts' products", "routing and experts' glue"
DEQUANTISE, OPTIMIZER, COPIES = "dequantisation", "optimizer", "casts and copies"
UNKNOWN = "not classified"
KINDS = (BASE, THIN, ATTENTION, GLUE, HEAD, EXPERTS, ROUTING, DEQUANTISE, OPTIMIZER, COPIES, UNKNOWN)

THINNEST = 64
"""A product with a side of at most so many is thin: factors of LoRA of rank 16, up to four of them side by side."""
_NEAR = 0.1
"""A side is the slots of a step where it is off the mean of the steps by at most this share."""

_OPERATOR = re.compile(r"(?!autograd::)\w+::")
_PROFILERS = ("Activity Buffer Request",)
"""The profiler's own work, inside of the operator whose kernels are said to be its."""
_PRODUCTS = re.compile(r"aten::(mm|addmm|bmm|baddbmm|_scaled_mm|addbmm)_?$")
_SUMMED = re.compile(r"aten::b?addb?mm")
"""Products whose factors come after another input."""
_GROUPED = re.compile(r"(_grouped_mm|_scaled_grouped_mm)$|GroupProblemShape|grouped_gemm|prepare_grouped|_grouped_")
_LOOKED_UP = re.compile(r"aten::(embedding|index_select|embedding_dense_backward)")
"""Operators one of whose sides is the vocabulary, though they are no part of the head."""

OPERATORS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (ATTENTION, re.compile(r"fastpack::(varlen|per_document)_attention|scaled_dot_product|_flash_attention|flex_att")),
    (ROUTING, re.compile(r"fastpack::\w*experts|fastpack::\w*(combine|gate|rout)|moe", re.IGNORECASE)),
    (DEQUANTISE, re.compile(r"dequanti[sz]e|bitsandbytes::")),
    (OPTIMIZER, re.compile(r"_fused_adam|aten::_foreach_|Optimizer\.|aten::linalg_vector_norm|aten::lerp|addcdiv")),
)
"""What a kernel is for by the operators around its launch, the innermost first; products are decided before."""

KERNELS: tuple[tuple[str, re.Pattern[str]], ...] = (
    (COPIES, re.compile(r"^Mem(cpy|set)|copy_kernel|CatArrayBatchedCopy|FillFunctor|^aten::("
                        r"copy_|clone|cat|zero_|fill_|_to_copy|contiguous)$")),
    (ATTENTION, re.compile(r"flash_(fwd|bwd)|flash::|fmha_|AttentionKernel|sdpa|flex_attention|_attn_(fwd|bwd)|"
                           r"FlashAttn|aten::_?scaled_dot_product|triton_tem_fused.*flex")),
    (DEQUANTISE, re.compile(r"kDequantize|_dequantise_kernel|kgemm_4bit|kQuantize|dequantize")),
    (OPTIMIZER, re.compile(r"multi_tensor_apply|FusedAdam|lpnorm_cleanup|aten::_(fused_adam|foreach)|LpNorm|"
                           r"aten::linalg_vector_norm")),
    (HEAD, re.compile(r"nll_loss|cross_entropy|SoftMax(Forward|Backward)|log_?softmax|logsumexp", re.IGNORECASE)),
    (EXPERTS, _GROUPED),
    (ROUTING, re.compile(r"_combine_kernel|_bias_weight_kernel|^_(forward|backward)_kernel$|RadixSort|radixSort|"
                         r"bitonicSort|gatherTopK|topk|searchsorted|bincount|histogram|cub::|indexing_backward|"
                         r"aten::(sort|argsort|topk|searchsorted|bincount|histc|cumsum|nonzero|one_hot|index_put)",
                         re.IGNORECASE)),
    (BASE, re.compile(r"nvjet|gemm|cutlass::Kernel|cutlass.*tensorop|xmma|cublas|splitK|gemv|dot_kernel|aten::(mm|addmm"
                      r"|bmm|baddbmm|dot|mv)_?$", re.IGNORECASE)),
    (GLUE, re.compile(r"^triton_|elementwise|reduce_kernel|layer_norm|rms_norm|RMSNorm|rope|swiglu|geglu|gather|"
                      r"index_kernel|indexSelect|embedding|softmax_warp|triu_tril|distribution_|arange|cat_kernel|"
                      r"where_kernel|element_mul|scan|compute_cuda_kernel|^aten::", re.IGNORECASE)),
)  # fmt: skip
"""What a kernel is for by its own name, the first that matches; on a CPU the name is the operator's."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What shapes are told apart by.

    Attributes:
        vocabulary: tokens that the head tells apart.
        slots: tokens of a step times the experts of each; 0 without experts.
    """

    vocabulary: int
    slots: int = 0


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel, or all of the same operator: ``Launch("nvjet_tst_128x256", 1e-4, "aten::mm", ((4, 8), (8, 2)))``.

    Attributes:
        name: of the kernel; on a CPU of the operator.
        seconds: of the device.
        operator: that launched it; empty where none is known, as in a replayed graph.
        shapes: of its inputs.
        around: the operators around that one, from the inside to the outside.
        first: whether it is the first of its operator: a product may take two.
    """

    name: str
    seconds: float
    operator: str = ""
    shapes: tuple[tuple[int, ...], ...] = ()
    around: tuple[str, ...] = ()
    first: bool = True

    @property
    def product(self) -> tuple[int, int, int, int] | None:
        """Return batch, m, k and n of a product; None of anything else. A grouped one has all its rows in m or k."""
        if not (_PRODUCTS.search(self.operator) or _GROUPED.search(self.operator)):
            return None
        left, right = self._factors()
        if len(left) < 2 or len(right) < 2:
            return None
        if _GROUPED.search(self.operator):
            return 1, left[-2], left[-1], right[-1]
        return (left[0] if len(left) == 3 else 1), left[-2], left[-1], right[-1]

    @property
    def operands(self) -> int:
        """Return the elements that a product reads and writes, each once."""
        size = self.product
        if size is None:
            return 0
        batch, rows, _, columns = size
        left, right = self._factors()
        return prod(left) + prod(right) + batch * rows * columns

    def _factors(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        # An output that is given comes last: factors are counted from the front.
        first = 1 if _SUMMED.search(self.operator) else 0
        left, right = (*self.shapes[first : first + 2], (), ())[:2]
        return left, right


def kind_of(launch: Launch, facts: Facts) -> str:
    """Return one of `KINDS`."""
    if (size := launch.product) is not None:
        return _product_kind(launch, size, facts)
    sides = {side for shape in launch.shapes for side in shape}
    if facts.vocabulary in sides and not _LOOKED_UP.search(launch.operator) and "fused_adam" not in launch.operator:
        return HEAD
    for operator in (launch.operator, *launch.around):
        for kind, pattern in OPERATORS:
            if pattern.search(operator) and (kind != ROUTING or facts.slots):
                return kind
    kind = next((kind for kind, pattern in KERNELS if pattern.search(launch.name)), UNKNOWN)
    if facts.slots and kind in (GLUE, COPIES) and any(abs(side - facts.slots) <= _NEAR * facts.slots for side in sides):
        return ROUTING
    return GLUE if kind == ROUTING and not facts.slots else kind


def _product_kind(launch: Launch, size: tuple[int, int, int, int], facts: Facts) -> str:
    batch, rows, inner, columns = size
    if _GROUPED.search(launch.operator):
        return EXPERTS
    if facts.vocabulary in (rows, inner, columns):
        return HEAD
    if batch > 1:
        return EXPERTS if facts.slots else ATTENTION
    return THIN if min(rows, inner, columns) <= THINNEST else BASE


def launches_of(events: Iterable[Any], device: str) -> Iterator[Launch]:
    """Yield the kernels of a profile made with ``record_shapes``; on a CPU its operators.

    Args:
        events: of `torch.profiler.profile.events`.
    """
    from torch.autograd import DeviceType

    events = list(events)
    host = [event for event in events if event.device_type == DeviceType.CPU]
    if device != "cuda":
        for event in host:
            if event.self_cpu_time_total > 0 and _OPERATOR.match(event.name):
                yield Launch(event.name, event.self_cpu_time_total / 1e6, event.name, _shapes(event), _around(event))
        return
    left: dict[str, float] = {}
    for event in events:
        if event.device_type == DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
            left[event.name] = left.get(event.name, 0.0) + event.time_range.elapsed_us()
    begun: set[int] = set()
    for event in host:
        kernels = event.kernels
        while event.name in _PROFILERS and event.cpu_parent is not None:
            event = event.cpu_parent
        for kernel in kernels:
            if kernel.name in left:
                left[kernel.name] -= kernel.duration
                # By the operator: what the profiler adds below it (a module that is loaded) has kernels of its own.
                first = id(event) not in begun
                begun.add(id(event))
                yield Launch(kernel.name, kernel.duration / 1e6, event.name, _shapes(event), _around(event), first)
    for name, microseconds in left.items():  # launched by no operator: in a graph, or by a library itself
        if microseconds > 1e-3:
            yield Launch(name, microseconds / 1e6)


def _shapes(event: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(shape) for shape in event.input_shapes or () if _is_shape(shape))


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, Sequence) and all(isinstance(side, int) for side in shape)


def _around(event: Any) -> tuple[str, ...]:
    names = []
    while (event := event.cpu_parent) is not None:
        names.append(str(event.name))
    return tuple(names)


def largest(launches: Iterable[Launch], count: int) -> list[list[Any]]:
    """Return the names that took longest, with their seconds and launches."""
    totals: dict[str, list[Any]] = {}
    for launch in launches:
        entry = totals.setdefault(launch.name, [launch.name, 0.0, 0])
        entry[1] += launch.seconds
        entry[2] += 1
    return sorted(totals.values(), key=lambda entry: -entry[1])[:count]


def by_kind(launches: Iterable[Launch], facts: Facts) -> Mapping[str, list[Launch]]:
    """Return the launches of each kind that has any, in the order of `KINDS`."""
    found: dict[str, list[Launch]] = {kind: [] for kind in KINDS}
    for launch in launches:
        found[kind_of(launch, facts)].append(launch)
    return {kind: members for kind, members in found.items() if members}
