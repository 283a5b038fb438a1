"""The proof that a fused function computes what a class's own forward computes, on a few random numbers.

Forward and gradients are compared with the fused form in float64. The own forward must be near it, which proves the
formula, and the fused function must have at most twice the error of the own one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

SCALES = (1.0, 1e-4, 100.0)
"""Of the inputs: small ones show an eps, large ones a clamp. The first one sorts candidates out."""
_LIMIT = {torch.float32: 16.0, torch.float64: 2.0**31}
"""Units of rounding that an own forward may be off; library code computes float64 inputs in fp32."""
_NONE = "no fused form equals its forward"
_RAISES = "the fused form raises"
_Form = TypeVar("_Form")


class Case(NamedTuple):
    """Inputs of a comparison: those with a gradient, those without, and the context that both functions run in."""

    tensors: list[Tensor]
    constants: list[Tensor]
    context: Callable[[], AbstractContextManager[Any]]


class _Results(NamedTuple):
    outputs: list[Tensor]
    grads: list[Tensor]


def prove(
    own: Callable[..., Any],
    groups: Iterable[Sequence[_Form]],
    fused: Callable[[Any], Callable[..., Any]],
    cases: list[Case],
) -> tuple[_Form | None, str, list[Case]]:
    """Return the first form that equals `own` in all cases, else None and a reason, and the cases.

    Among forms of one group the one that is nearest to `own` is returned. Cases are left out if `own` raises or
    overflows on them.
    """
    theirs, reason = list[tuple[Case, _Results]](), _NONE
    for case in cases:
        try:
            with case.context():
                results = _results(own, case)
            if all(bool(each.cpu().isfinite().all()) for each in (*results.outputs, *results.grads)):
                theirs.append((case, results))
            else:
                raised = "its forward overflows on a trial"
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever code of others raises
            raised = f"its forward raises {type(error).__name__} on a trial: {error}".partition("\n")[0]
    if not theirs:
        return None, raised, []
    reached = -1
    for group in groups:
        proven = []
        for form in group:
            wrong, apart = "", 0.0
            for index, (case, results) in enumerate(theirs):
                wrong, more = _compare(fused(form), case, results)
                if wrong:
                    raises = wrong.startswith(_RAISES)  # each form does if a compiler is missing
                    progress = 2 * index + (not raises)  # the reason of the form that comes furthest is told
                    if progress > reached:
                        reached, reason = progress, wrong if index or raises else _NONE
                    break
                apart += more
            proven += [] if wrong else [(apart, form)]
        if proven:
            return min(proven, key=lambda pair: pair[0])[1], "", [case for case, _ in theirs]
    return None, reason, []


def _compare(fused: Callable[..., Any], case: Case, theirs: _Results) -> tuple[str, float]:
    """Return how a fused function differs from the own results, and its distance from them."""
    try:
        with case.context():
            mine = _results(fused, case, theirs)
        if mine is None:
            return "no fused form returns its dtype and strides", 0.0
        # On the CPU: a device would load each kernel in float64, which no step runs.
        wide = Case([t.cpu().double() for t in case.tensors], [t.cpu().double() for t in case.constants], case.context)
        exact = _results(fused, wide)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - a form that does not fit, a compiler that is missing
        return f"{_RAISES} {type(error).__name__}: {error}".partition("\n")[0], 0.0
    dtypes = {t.dtype for t in (*case.tensors, *case.constants, *theirs.outputs)}
    coarsest = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
    numbers, rows = torch.finfo(coarsest), list[Tensor]()
    sides = ([t.cpu() for t in each.outputs + each.grads] for each in (mine, theirs, exact))
    for ours, other, right in zip(*sides, strict=True):
        size = right.norm().clamp_min(1e-30)
        errors = [(a - b).double().norm() / size for a, b in ((ours, right), (other, right), (ours, other))]
        # Next to zero, numbers of a dtype have an equal distance: much of small values in fp16.
        rows.append(torch.stack([*errors, numbers.eps + 4 * numbers.tiny * numbers.eps * right.numel() ** 0.5 / size]))
    values = torch.stack(rows).tolist()
    for index, (off, own_off, apart, eps) in enumerate(values):
        # Sums of gradients in half precision have more roundings than outputs.
        limit = _LIMIT.get(coarsest, 1.0 if index < len(mine.outputs) else 3.0)
        few = 4 if coarsest == torch.float32 else 0.5  # of their units: formulas of one function round differently
        if not (own_off <= limit * eps and off <= 2 * own_off + few * eps):  # NaN too
            return f"the nearest fused form is {apart:.1e} away from its forward in {str(coarsest)[6:]}", 0.0
    return "", sum(row[2] for row in values)


def _results(function: Callable[..., Any], case: Case, like: _Results | None = None) -> Any:
    """Call a function and differentiate it; None if its outputs have other layouts than those of `like`."""
    leaves = [tensor.detach().requires_grad_() for tensor in case.tensors]
    outputs = function(*leaves, *case.constants)
    outputs = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
    if like is not None and list(map(_layout, outputs)) != list(map(_layout, like.outputs)):
        return None
    draw = torch.Generator().manual_seed(68)  # not that of the inputs: norms have no gradient along them
    # Rounded to the coarsest dtype, so that float64 differentiates the same numbers.
    upstream = [torch.randn(o.shape, generator=draw).bfloat16().to(o) for o in outputs]
    grads = torch.autograd.grad(outputs, leaves, upstream, allow_unused=True)
    known = [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(grads, leaves, strict=True)]
    return _Results([o.detach() for o in outputs], known)


def _layout(x: Tensor) -> tuple[Any, ...]:
    """Return dtype, shape, and strides where they matter."""
    return x.dtype, tuple(x.shape), tuple(s for s, size in zip(x.stride(), x.shape, strict=True) if size > 1)
