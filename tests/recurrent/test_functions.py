"""What stands for stock's functions: equal to a recurrence token by token, document by document, in value and gradient.

Over lengths that begin and end anywhere in a chunk; errors in fp32 are held against those of stock's own functions,
which run each document by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from hybrid_material import run_inside
from recurrent_reference import by_document, conv_reference, delta_reference, ssd_reference
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.falcon_h1 import modeling_falcon_h1
from transformers.models.qwen3_next import modeling_qwen3_next

from fastpack_trl.errors import PackingError
from fastpack_trl.model.mixers import CONV
from fastpack_trl.packing.chunks import CHUNK, chunks_of
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.recurrent import solve
from fastpack_trl.recurrent.seams import OURS
from fastpack_trl.recurrent.solve import chunk_inverse, merged_inverse

LENGTHS = (
    (1,), (2,), (CHUNK,), (CHUNK, CHUNK), (5, 1, 1, 1, 1, 1), (70, 58), (63, 1, 64, 65, 1), (200, 1, 63, 64, 65, 30),
    (300, 129), (1, 700), (129, 127, 3), (640,),
)  # fmt: skip
KEY_HEADS, HEADS, KEY, VALUE = 2, 4, 16, 8


class Case(NamedTuple):
    """A function of stock, what it computes, and arguments with as many rows as tokens."""

    stock: Callable[..., Tensor]
    ours: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    arguments: Callable[[int], list[Tensor]]


def repeated(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(HEADS // KEY_HEADS, dim=1)


def normalised(tensor: Tensor) -> Tensor:
    return tensor * torch.rsqrt((tensor * tensor).sum(-1, keepdim=True) + 1e-6)


def delta_exact(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    if query.shape[1] != value.shape[1]:
        query, key = repeated(query), repeated(key)
    return delta_reference(normalised(query) * query.shape[-1] ** -0.5, normalised(key), value, g, beta)


def delta(function: Callable[..., Any], *tokens: Tensor) -> Tensor:
    query, key, value, g, beta = (tensor[None] for tensor in tokens)
    out: Tensor = function(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0][0]
    return out


def delta_arguments(tokens: int, *, kimi: bool) -> list[Tensor]:
    key_heads = HEADS if kimi else KEY_HEADS
    # Keys that are alike, and decays from none to all of the state.
    query, key = torch.randn(tokens, key_heads, KEY), torch.randn(tokens, key_heads, KEY) + 1
    decay = -torch.rand(tokens, HEADS, *([KEY] if kimi else [])).pow(8) * 30
    return [query, key, torch.randn(tokens, HEADS, VALUE), decay, torch.rand(tokens, HEADS)]


A = -torch.rand(HEADS, generator=torch.Generator().manual_seed(3)) * 4


def mamba(function: Callable[..., Any], x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
    rows = (tensor[None] for tensor in (x, dt))
    heads = A.to(x)
    skip, bias = heads + 2, heads / 8
    out: Tensor = function(
        *rows, heads, b[None], c[None], chunk_size=32, D=skip, dt_bias=bias, dt_softplus=True, dt_limit=(0.01, 2.0)
    )[0]
    return out


def mamba_exact(x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
    heads = A.to(x)
    step = F.softplus(dt + heads / 8).clamp(0.01, 2.0)
    return ssd_reference(x * step[..., None], heads * step, repeated(b), repeated(c)) + (heads + 2)[:, None] * x


def mamba_arguments(tokens: int) -> list[Tensor]:
    shapes = ((HEADS, VALUE), (HEADS,), (KEY_HEADS, KEY), (KEY_HEADS, KEY))
    return [torch.randn(tokens, *shape) for shape in shapes]


WEIGHT = torch.randn(6, 4, generator=torch.Generator().manual_seed(4))


def conv(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    weight = WEIGHT.to(x)
    return function(x.T[None], weight=weight, bias=weight[:, 0], activation="silu")[0].T


def conv_exact(x: Tensor) -> Tensor:
    weight = WEIGHT.to(x)
    return F.silu(conv_reference(x, weight, weight[:, 0]))


NEXT, FALCON = vars(modeling_qwen3_next), vars(modeling_falcon_h1)
CASES = {
    "torch_chunk_gated_delta_rule": Case(NEXT["torch_chunk_gated_delta_rule"], delta, delta_exact,
                                         partial(delta_arguments, kimi=False)),
    "mamba2_chunk_scan": Case(FALCON["mamba2_chunk_scan"], mamba, mamba_exact, mamba_arguments),
    CONV: Case(NEXT[CONV], conv, conv_exact, lambda tokens: [torch.randn(tokens, 6)]),
}  # fmt: skip


def results(function: Callable[..., Tensor], arguments: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The output and the gradient of each argument."""
    leaves = [argument.to(dtype).requires_grad_() for argument in arguments]
    out = function(*leaves)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [out.detach(), *torch.autograd.grad(out, leaves, direction.to(out))]


def stock_of(name: str, lengths: tuple[int, ...], *tokens: Tensor) -> Tensor:
    """What stock's function returns for the documents one by one."""
    case = CASES[name]
    if name == "torch_chunk_gated_delta_rule":  # transformers 5.17 repeats the heads of the key in the layer
        tokens = (*map(repeated, tokens[:2]), *tokens[2:])
    return by_document(partial(case.ours, case.stock), lengths, *tokens)


def distance(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact).norm() / exact.norm().clamp_min(1e-12))


@pytest.fixture(params=["cpu", "device"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What runs: on a CPU, or on a device, whose form of a delta rule takes other steps to the same."""
    if request.param == "device":
        monkeypatch.setattr(solve, "one_by_one", lambda device: False)
    return str(request.param)


_FORMS = [(name, form) for name in CASES for form in ("cpu", "device") if form == "cpu" or "delta" in name]
FORMS = pytest.mark.parametrize(("name", "form"), _FORMS, indirect=["form"])
SCANS = pytest.mark.parametrize(("name", "form"), [pair for pair in _FORMS if pair[0] != CONV], indirect=["form"])


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@FORMS
def test_packed_equals_separate_documents_token_by_token(name: str, form: str, lengths: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    arguments = case.arguments(sum(lengths))
    ours = partial(case.ours, partial(OURS[name], chunks_of(PackedBatch.from_lengths(lengths))))
    exact = results(partial(by_document, case.reference, lengths), arguments, torch.float64)
    in_double = results(ours, arguments, torch.float64)
    assert max(map(distance, in_double, exact)) <= 1e-11

    stock = results(partial(stock_of, name, lengths), arguments, torch.float32)
    for own, theirs, right in zip(results(ours, arguments, torch.float32), stock, exact, strict=True):
        assert distance(own, right) <= 2 * distance(theirs, right) + 3e-7


@FORMS
def test_no_document_depends_on_another_not_even_by_rounding(name: str, form: str) -> None:
    torch.manual_seed(0)
    case, lengths = CASES[name], (70, 1, 200, 58, 64)
    ours = partial(case.ours, partial(OURS[name], chunks_of(PackedBatch.from_lengths(lengths))))
    leaves = [argument.requires_grad_() for argument in case.arguments(sum(lengths))]
    outs = ours(*leaves).split(lengths)
    for target, out in enumerate(outs):
        for gradient in torch.autograd.grad(out.sum(), leaves, retain_graph=True):
            for source, part in enumerate(gradient.split(lengths)):
                assert target == source or not part.any(), f"{target} depends on {source}"


def test_a_state_across_documents_that_decays_by_a_hundred_orders_stays_finite() -> None:
    """Differences of sums across documents are large and positive: masked after `exp`, they would be NaN."""
    lengths = (40, 50, 38)
    query, key, value, g, beta = delta_arguments(sum(lengths), kimi=False)
    g[:40] = -20.0
    leaves = [tensor.requires_grad_() for tensor in (query, key, value, g, beta)]
    out = delta(partial(OURS["torch_chunk_gated_delta_rule"], chunks_of(PackedBatch.from_lengths(lengths))), *leaves)
    assert all(bool(torch.isfinite(x).all()) for x in (out, *torch.autograd.grad(out.sum(), leaves)))


@pytest.mark.parametrize("size", [8, 16, 64])
def test_merged_blocks_invert_keys_that_are_all_alike(size: int) -> None:
    """The product of powers over a whole chunk is off by eight orders there."""
    torch.manual_seed(0)
    keys = F.normalize(torch.randn(3, 2, size, 16) * 0.1 + 1, dim=-1)
    lower = (keys @ keys.mT).tril(-1)
    exact = torch.linalg.inv(torch.eye(size, dtype=torch.float64) + lower.double())
    solver = distance(chunk_inverse(lower), exact)
    assert distance(merged_inverse(lower), exact) <= 10 * solver + 1e-6
    assert not merged_inverse(lower).triu(1).any()


def test_a_state_or_another_row_is_refused_by_name() -> None:
    chunks = chunks_of(PackedBatch.from_lengths((3, 2)))
    arguments = [tensor[None] for tensor in delta_arguments(5, kimi=False)]
    rule = partial(OURS["torch_chunk_gated_delta_rule"], chunks)
    with pytest.raises(PackingError, match=r"and a state.*use_cache=False"):
        rule(*arguments, output_final_state=True)
    with pytest.raises(PackingError, match=r"1 row\(s\) of 4 tokens"):
        rule(*(tensor[:, :4] for tensor in arguments))


@SCANS
def test_what_is_kept_for_backward_is_what_the_layer_gave(name: str, form: str) -> None:
    """Not a tenth of what autograd would keep: the masks of a row belong to the row, all else is made again."""
    torch.manual_seed(0)
    case, chunks = CASES[name], chunks_of(PackedBatch.from_lengths((200, 56)))
    leaves = [argument.requires_grad_() for argument in case.arguments(chunks.total_tokens)]
    masks, kept = {part.data_ptr() for part in chunks if isinstance(part, Tensor)}, {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in masks:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        case.ours(partial(OURS[name], chunks), *leaves)
    given = sum(leaf.nbytes for leaf in leaves)
    # Time steps go through a bias, a softplus and their bounds, by autograd.
    assert sum(kept.values()) <= given + (5 * leaves[1].nbytes if name == "mamba2_chunk_scan" else 0)


def rounded_to_tf32(tensor: Tensor) -> Tensor:
    bits = tensor.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


class Tf32(TorchDispatchMode):
    """Products of fp32 matrices as on tensor cores, where `tensor_cores` allows them: what they multiply is rounded."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name.startswith("fastpack::"):
            with self:
                return run_inside(func, *args, **(kwargs or {}))
        if torch.backends.cuda.matmul.fp32_precision == "tf32":
            with self:
                if (found := func.decompose(*args, **(kwargs or {}))) is not NotImplemented:
                    return found
            if "mm" in func._schema.name and args[0].dtype == torch.float32:
                first = 1 if "baddbmm" in func._schema.name else 0
                args = (*args[:first], *(rounded_to_tf32(matrix) for matrix in args[first:]))
        return func(*args, **(kwargs or {}))


@SCANS
def test_tf32_in_a_bf16_layer_is_within_twice_stocks_own_error(name: str, form: str) -> None:
    """The device's rounding, simulated; outside of 16-bit layers nothing is rounded."""
    torch.manual_seed(0)
    case, lengths = CASES[name], (70, 1, 200, 58, 64)
    arguments = [argument.bfloat16().float() for argument in case.arguments(sum(lengths))]
    ours = partial(case.ours, partial(OURS[name], chunks_of(PackedBatch.from_lengths(lengths))))
    exact = results(partial(by_document, case.reference, lengths), arguments, torch.float64)
    stock = results(partial(stock_of, name, lengths), arguments, torch.bfloat16)
    plain = results(ours, arguments, torch.bfloat16)
    with Tf32():
        rounded = results(ours, arguments, torch.bfloat16)
        in_fp32 = results(ours, arguments, torch.float32)
    assert any(not torch.equal(one, other) for one, other in zip(plain, rounded, strict=True)), "it rounds"
    assert max(map(distance, in_fp32, exact)) <= 1e-4
    for own, theirs, right in zip(rounded, stock, exact, strict=True):
        assert distance(own, right) <= 2 * distance(theirs, right) + 1e-3
    assert torch.backends.cuda.matmul.fp32_precision == "none"


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", [(1, 700), (63, 1, 64, 65, 1)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_device_is_as_exact_as_stocks_functions(name: str, lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    arguments = [argument.to(dtype).float() for argument in case.arguments(sum(lengths))]
    on_device = [argument.cuda() for argument in arguments]
    chunks = chunks_of(PackedBatch.from_lengths(lengths).to("cuda"))
    exact = results(partial(by_document, case.reference, lengths), arguments, torch.float64)
    stock = results(partial(stock_of, name, lengths), on_device, dtype)
    ours = results(partial(case.ours, partial(OURS[name], chunks)), on_device, dtype)
    floor = 1e-6 if dtype == torch.float32 else 1e-3
    for own, theirs, right in zip(ours, stock, exact, strict=True):
        assert distance(own.cpu(), right) <= 2 * distance(theirs.cpu(), right) + floor


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [*CASES, "no skip and no bias"])
def test_the_operators_pass_torchs_own_checks(name: str, dtype: torch.dtype) -> None:
    """Also that shapes, dtypes and strides are those of the fake kernels: a compiled layer is generated for them."""
    torch.manual_seed(0)
    chunks, ops = chunks_of(PackedBatch.from_lengths((70, 1, 30))), torch.ops.fastpack
    tokens = chunks.total_tokens
    rest: tuple[Any, ...] = tuple(chunks)
    if name == CONV:
        x, weight = torch.randn(tokens, 6, dtype=dtype), WEIGHT.to(dtype)
        checked = [(ops.short_conv, (x, weight, weight[:, 0].clone(), chunks.positions, True))]
        checked.append((ops.short_conv_backward, (torch.randn_like(x), *checked[0][1])))
    elif name in ("mamba2_chunk_scan", "no skip and no bias"):
        x, step, b, c = (argument.to(dtype) for argument in mamba_arguments(tokens))
        skip = A.clone() if name == "mamba2_chunk_scan" else None
        checked = [(ops.mamba2_forward, (x, step.abs(), A, b, c, skip, *rest))]
        checked.append((ops.mamba2_backward, (torch.randn(x.shape), *checked[0][1])))
    else:
        row = [argument.to(dtype) for argument in delta_arguments(tokens, kimi="kimi" in name)]
        checked = [(ops.delta_rule_forward, (*row, True, *rest))]
        checked.append((ops.delta_rule_backward, (torch.randn_like(row[2]), *checked[0][1])))
    for operator, arguments in checked:
        torch.library.opcheck(operator.default, arguments)
