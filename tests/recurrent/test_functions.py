"""Replacements of transformers' functions equal a recurrence token by token, document by document, and its gradient.

Errors in fp32 are held against those of transformers' own functions, which run each document by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from model_material import Inside
from moe_material import distance
from torch import Tensor
from transformers.models.falcon_h1 import modeling_falcon_h1
from transformers.models.qwen3_next import modeling_qwen3_next

from fastpack_trl.errors import PackingError
from fastpack_trl.model.facts import CONV
from fastpack_trl.packing.chunks import CHUNK, chunks_of
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.recurrent import solve
from fastpack_trl.recurrent.seams import OURS

LENGTHS = ((1,), (CHUNK, CHUNK), (5, 1, 1, 1), (63, 1, 64, 65, 1), (200, 1, 63, 64, 65, 30), (129, 127, 3), (1, 700))
MIXED = (70, 1, 200, 58, 64)
KEY_HEADS, HEADS, KEY, VALUE = 2, 4, 16, 8
DELTA, MAMBA = "torch_chunk_gated_delta_rule", "mamba2_chunk_scan"
A = -torch.rand(HEADS, generator=torch.Generator().manual_seed(3)) * 4
WEIGHT = torch.randn(6, 4, generator=torch.Generator().manual_seed(4))


def by_document(function: Callable[..., Tensor], lengths: tuple[int, ...], *tokens: Tensor) -> Tensor:
    """Return ``function(*tokens)`` of each document by itself, joined; `tokens` have (total_tokens, ...)."""
    parts = zip(*(tensor.split(lengths) for tensor in tokens), strict=True)
    return torch.cat([function(*part) for part in parts])


def conv_reference(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the causal convolution of one document, (tokens, channels); the last column of `weight` is the token's."""
    padded = F.pad(x.T[None], (weight.shape[1] - 1, 0))
    return F.conv1d(padded, weight[:, None], bias, groups=weight.shape[0])[0].T


def delta_reference(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Return ``o_t = q_t S_t`` with ``S_t = decay_t S_(t-1) + beta_t k_t (v_t - k_t decay_t S_(t-1))`` of one document.

    All have (tokens, heads, ...); `query` and `key` are neither normalised nor scaled here, `g` is log decay.
    """
    state, decay, outs = key.new_zeros(*key.shape[1:], value.shape[-1]), g.exp()[..., None, None], []
    for q, k, v, d, b in zip(query, key, value, decay, beta, strict=True):
        state = state * d
        correction = b[:, None] * (v - torch.einsum("hk,hkv->hv", k, state))
        state = state + k[..., None] * correction[:, None]
        outs.append(torch.einsum("hk,hkv->hv", q, state))
    return torch.stack(outs)


def ssd_reference(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return ``y_t = c_t S_t`` with ``S_t = exp(a_t) S_(t-1) + b_t x_t`` of one document (Mamba-2 without ``D x``).

    All have (tokens, heads, ...); `x` is multiplied by its time step, `a` is the logarithm of the decay.
    """
    state, outs = x.new_zeros(x.shape[1], b.shape[-1], x.shape[-1]), []
    for token, log_decay, into, out_of in zip(x, a, b, c, strict=True):
        state = state * log_decay.exp()[:, None, None] + into[..., None] * token[:, None]
        outs.append(torch.einsum("hn,hnp->hp", out_of, state))
    return torch.stack(outs)


class Case(NamedTuple):
    """A function of transformers, how it is called, what it computes, and arguments with as many rows as tokens."""

    stock: Callable[..., Tensor]
    call: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]

    def arguments(self, tokens: int) -> list[Tensor]:
        arguments = [torch.randn(tokens, *shape) for shape in self.shapes]
        if self.call is delta:  # keys that are alike, and decays from none to all of the state
            arguments[1] += 1
            arguments[3:] = -torch.rand(tokens, HEADS).pow(8) * 30, torch.rand(tokens, HEADS)
        return arguments


def delta(function: Callable[..., Any], *tokens: Tensor) -> Tensor:
    query, key, value, g, beta = (tensor[None] for tensor in tokens)
    out: Tensor = function(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0][0]
    return out


def delta_exact(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    query, key = (repeated(x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)) for x in (query, key))
    return delta_reference(query * query.shape[-1] ** -0.5, key, value, g, beta)


def repeated(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(HEADS // KEY_HEADS, dim=1)


def mamba(function: Callable[..., Any], x: Tensor, dt: Tensor, b: Tensor, c: Tensor, *, bare: bool = False) -> Tensor:
    heads = A.to(x)
    more = {} if bare else {"D": heads + 2, "dt_bias": heads / 8, "dt_softplus": True, "dt_limit": (0.01, 2.0)}
    out: Tensor = function(x[None], dt[None], heads, b[None], c[None], chunk_size=32, **more)[0]
    return out


def mamba_exact(x: Tensor, dt: Tensor, b: Tensor, c: Tensor) -> Tensor:
    heads = A.to(x)
    step = F.softplus(dt + heads / 8).clamp(0.01, 2.0)
    return ssd_reference(x * step[..., None], heads * step, repeated(b), repeated(c)) + (heads + 2)[:, None] * x


def conv(function: Callable[..., Tensor], x: Tensor, *, bare: bool = False) -> Tensor:
    weight = WEIGHT.to(x).requires_grad_()
    more = {} if bare else {"bias": weight[:, 0], "activation": "silu"}
    return function(x.T[None], weight=weight, **more)[0].T


def conv_exact(x: Tensor) -> Tensor:
    return F.silu(conv_reference(x, WEIGHT.to(x), WEIGHT.to(x)[:, 0]))


NEXT, FALCON = vars(modeling_qwen3_next), vars(modeling_falcon_h1)
QUERY, WIDE = (KEY_HEADS, KEY), (HEADS, VALUE)
CASES = {
    DELTA: Case(NEXT[DELTA], delta, delta_exact, (QUERY, QUERY, WIDE)),
    MAMBA: Case(FALCON[MAMBA], mamba, mamba_exact, (WIDE, (HEADS,), QUERY, QUERY)),
    CONV: Case(NEXT[CONV], conv, conv_exact, ((6,),)),
}


def ours(name: str, lengths: tuple[int, ...], device: str = "cpu", **more: Any) -> Callable[..., Tensor]:
    chunks = chunks_of(PackedBatch.from_lengths(lengths).to(device))
    return partial(CASES[name].call, partial(OURS[name], chunks), **more)


def exact(name: str, lengths: tuple[int, ...], arguments: list[Tensor]) -> list[Tensor]:
    return results(partial(by_document, CASES[name].reference, lengths), arguments, torch.float64)


def stock(name: str, lengths: tuple[int, ...], arguments: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Run the documents one by one; transformers 5.17 repeats the heads of the key in the layer."""

    def run(*tokens: Tensor) -> Tensor:
        tokens = (*map(repeated, tokens[:2]), *tokens[2:]) if name == DELTA else tokens
        return by_document(partial(CASES[name].call, CASES[name].stock), lengths, *tokens)

    return results(run, arguments, dtype)


def results(function: Callable[..., Tensor], arguments: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The output and the gradient of each argument."""
    leaves = [argument.to(dtype).requires_grad_() for argument in arguments]
    out = function(*leaves)
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [value.detach().cpu() for value in (out, *torch.autograd.grad(out, leaves, direction.to(out)))]


def assert_as_exact(actual: list[Tensor], stocks: list[Tensor], right: list[Tensor], floor: float) -> None:
    """Each result is at most twice as far from the true one as that of transformers."""
    for own, theirs, true in zip(actual, stocks, right, strict=True):
        assert distance(own, true) <= 2 * distance(theirs, true) + floor


@pytest.fixture(autouse=True)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a delta rule: chunk by chunk, or as on a GPU."""
    torch.manual_seed(0)
    if getattr(request, "param", "cpu") == "device":
        monkeypatch.setattr(solve, "one_by_one", lambda device: False)


_FORMS = [(DELTA, "cpu"), (DELTA, "device"), (MAMBA, "cpu"), (CONV, "cpu")]
FORMS = pytest.mark.parametrize(("name", "form"), _FORMS, indirect=["form"])
SCANS = pytest.mark.parametrize(("name", "form"), _FORMS[:3], indirect=["form"])


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@FORMS
def test_packed_equals_separate_documents_token_by_token(name: str, form: None, lengths: tuple[int, ...]) -> None:
    arguments = CASES[name].arguments(sum(lengths))
    right, packed = exact(name, lengths, arguments), ours(name, lengths)
    assert max(map(distance, results(packed, arguments, torch.float64), right)) <= 1e-11
    stocks, actual = stock(name, lengths, arguments, torch.float32), results(packed, arguments, torch.float32)
    assert_as_exact(actual, stocks, right, 3e-7)
    with torch.autocast("cpu", torch.bfloat16):  # which scans do not follow
        assert name == CONV or all(map(torch.equal, results(packed, arguments, torch.float32), actual))


@FORMS
def test_no_document_depends_on_another_not_even_by_rounding(name: str, form: None) -> None:
    """Also if one is infinite, and if another's state decays by a hundred orders: `exp` of a difference overflows."""
    arguments = CASES[name].arguments(sum(MIXED))
    if name == DELTA:
        arguments[3][:70] = -20.0
    leaves = [argument.requires_grad_() for argument in arguments]
    outs = ours(name, MIXED)(*leaves).split(MIXED)
    for target, out in enumerate(outs):
        for gradient in torch.autograd.grad(out.sum(), leaves, retain_graph=True):
            assert gradient.isfinite().all()
            for source, part in enumerate(gradient.split(MIXED)):
                assert target == source or not part.any(), f"{target} depends on {source}"
    if name == CONV:
        poisoned = arguments[0].detach().clone()
        poisoned[71:271] = torch.inf
        assert torch.equal(torch.cat(outs)[271:], ours(name, MIXED)(poisoned)[271:])


@pytest.mark.parametrize("count", [2, 4, 7, 10])
def test_states_by_doubling_equal_those_chunk_by_chunk(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without decays, which would hide a level that is missing."""
    shapes = (8, 3), (8, 5), (8, 5), (1, 1), (5, 3)
    *chunks, added = (torch.randn(count, 2, *shape, dtype=torch.float64) / 2 for shape in shapes)
    expected = [solve.recurrence(*chunks, more, count) for more in (None, added)]
    monkeypatch.setattr(solve, "one_by_one", lambda device: False)
    actual = [solve.recurrence(*chunks, more, count) for more in (None, added)]
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("name", "state"), [(DELTA, "output_final_state"), (MAMBA, "return_final_states"), (CONV, "")])
def test_a_state_or_another_row_is_refused_by_name(name: str, state: str) -> None:
    rule, arguments = partial(OURS[name], chunks_of(PackedBatch.from_lengths((3, 2)))), CASES[name].arguments(5)
    with pytest.raises(PackingError, match=r"1 row\(s\) of 4 tokens, expected.*use_cache=False"):
        CASES[name].call(rule, *(tensor[:4] for tensor in arguments))
    with pytest.raises(PackingError, match=r"2 row\(s\)"):
        CASES[name].call(lambda x, *rest, **keywords: rule(x.expand(2, *x.shape[1:]), *rest, **keywords), *arguments)
    for more in ({state: True}, {state.replace("output_final", "initial").replace("return_final", "initial"): 0}):
        if name != CONV:
            with pytest.raises(PackingError, match="and a state"):
                CASES[name].call(partial(rule, **more), *arguments)


@SCANS
def test_scans_save_what_the_layer_gave_them(name: str, form: None) -> None:
    """Not the tenfold that autograd would save: the masks belong to the row, all else is computed again."""
    chunks = chunks_of(PackedBatch.from_lengths((200, 56)))
    leaves = [argument.requires_grad_() for argument in CASES[name].arguments(chunks.total_tokens)]
    masks, saved = {part.data_ptr() for part in chunks if isinstance(part, Tensor)}, dict[int, int]()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.update({x.data_ptr(): x.nbytes}) or x, lambda x: x):
        CASES[name].call(partial(OURS[name], chunks), *leaves)
    # Time steps go through a bias, a softplus and their bounds, by autograd.
    given = sum(leaf.nbytes for leaf in leaves) + (5 * leaves[1].nbytes if name == MAMBA else 0)
    assert sum(nbytes for pointer, nbytes in saved.items() if pointer not in masks) <= given


class Matmuls(Inside):
    """Records how matmuls in fp32 may run."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if "mm" in func._schema.name and args[0].dtype == torch.float32:
            vars(self).setdefault("seen", set()).add(torch.backends.cuda.matmul.fp32_precision)
        return func(*args, **kwargs)


@SCANS
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.bfloat16, "tf32"), (torch.float32, "none")])
def test_fp32_matmuls_of_a_16_bit_layer_may_round(name: str, form: None, dtype: torch.dtype, allowed: str) -> None:
    with Matmuls() as matmuls:
        results(ours(name, MIXED), CASES[name].arguments(sum(MIXED)), dtype)
    inverts = name == DELTA and not solve.one_by_one(torch.device("cpu"))
    assert matmuls.seen == {allowed} | ({"ieee"} if inverts else set())
    assert torch.backends.cuda.matmul.fp32_precision == "none"


@pytest.mark.parametrize(("own", "whole"), [("none", "none"), ("none", "tf32"), ("tf32", "none"), ("ieee", "tf32")])
def test_the_precision_of_matmuls_is_the_users_again(own: str, whole: str) -> None:
    """Also that of matmuls follows the setting for all of torch, if it did before."""
    matmul, other = torch.backends.cuda.matmul, "none" if whole == "tf32" else "tf32"
    try:
        torch.backends.fp32_precision, matmul.fp32_precision = whole, own
        results(ours(DELTA, (9, 3)), CASES[DELTA].arguments(12), torch.bfloat16)
        assert matmul.fp32_precision == (whole if own == "none" else own)
        torch.backends.fp32_precision = other
        assert matmul.fp32_precision == (other if own == "none" else own)
    finally:
        torch.backends.fp32_precision = matmul.fp32_precision = "none"


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", [(1, 700), (63, 1, 64, 65, 1)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_device_is_as_exact_as_stocks_functions(name: str, lengths: tuple[int, ...], dtype: torch.dtype) -> None:
    arguments = [argument.to(dtype).float() for argument in CASES[name].arguments(sum(lengths))]
    on_device = [argument.cuda() for argument in arguments]
    actual, stocks = results(ours(name, lengths, "cuda"), on_device, dtype), stock(name, lengths, on_device, dtype)
    assert_as_exact(actual, stocks, exact(name, lengths, arguments), 1e-6 if dtype == torch.float32 else 1e-3)


class Calls(Inside):
    def enter(self, operator: Any, args: tuple[Any, ...]) -> None:
        vars(self).setdefault("calls", []).append((operator, args))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "bare"), [(DELTA, False), (MAMBA, False), (MAMBA, True), (CONV, False), (CONV, True)])
def test_the_operators_pass_torchs_own_checks(name: str, bare: bool, dtype: torch.dtype) -> None:
    """Also that shapes, dtypes and strides are those of the fake kernels: a compiled layer is generated for them."""
    arguments = [x.abs() if x.dim() == 2 and bare else x for x in CASES[name].arguments(101)]
    with Calls() as seen:
        results(ours(name, (70, 1, 30), **({"bare": True} if bare else {})), arguments, dtype)
    assert len(seen.calls) == 2  # forward and backward
    for operator, given in seen.calls:
        tensors = [x.detach() if isinstance(x, Tensor) else x for x in given]
        torch.library.opcheck(operator, tensors)
        torch.library.opcheck(operator, [tensors[0].mT.contiguous().mT, *tensors[1:]])
