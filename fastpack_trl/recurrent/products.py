"""What a delta rule does with the products of its chunks, and the gradient of that: one for every form of decay."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastpack_trl.kernels.inverse import chunk_inverse
from fastpack_trl.kernels.state_pass import state_doubling, state_pass
from fastpack_trl.recurrent.precision import tensor_cores


class Products(NamedTuple):
    """What the delta rule needs of each chunk, (chunks, heads, CHUNK, ...), contiguous.

    Attributes:
        weights: ``beta_i k_i k_j`` with the decay from j to i, in (CHUNK, CHUNK); read below the diagonal.
        scores: ``q_i k_j`` with the decay from j to i, 0 above the diagonal.
        erase: ``-beta k`` with the decay since the chunk began, of the document carried in.
        write: ``beta v``.
        read: ``q`` with the decay since the chunk began, of the document carried in.
        kept: ``k`` with the decay up to the end of the chunk, of the document that it ends with.
        through: (chunks, heads, 1 or key size, 1): the decay over the chunk of a document that goes on through it.
    """

    weights: Tensor
    scores: Tensor
    erase: Tensor
    write: Tensor
    read: Tensor
    kept: Tensor
    through: Tensor


def output(products: Products, reach: int, tf32: bool) -> Tensor:
    """Return the output, (chunks, heads, CHUNK, value size).

    With ``T = (I + weights below the diagonal)^-1``, what the tokens of a chunk write into a state S that enters is
    ``fresh = T write + T erase S``; they read ``read S + scores fresh``, and ``through S + kept^T fresh`` leaves.

    Args:
        products: of the row.
        reach: `Chunks.reach`.
        tf32: products may round what they multiply to TF32.
    """
    _, erased, written = _solved(products, tf32)
    with tensor_cores(tf32):
        states, fresh, *_ = _passes(products, erased, written, None, reach)
        return _sum(products.scores @ fresh, products.read, states)


def gradients(products: Products, grad: Tensor, reach: int, tf32: bool) -> Products:
    """Return the gradients of `output`, that of ``through`` for each channel of the key."""
    inverse, erased, written = _solved(products, tf32)
    with tensor_cores(tf32):
        states, fresh, leaving, to_fresh = _passes(products, erased, written, grad, reach)
        write = inverse.mT @ to_fresh
        return Products(
            # dT^-1 = -T^T dT T^T, with dT = dfresh (write + erase S)^T
            weights=(write @ fresh.mT).tril_(-1).neg_(), scores=grad @ fresh.mT, erase=write @ states.mT, write=write,
            read=grad @ states.mT, kept=fresh @ leaving.mT, through=(leaving * states).sum(-1, keepdim=True),
        )  # fmt: skip


def _solved(products: Products, tf32: bool) -> tuple[Tensor, Tensor, Tensor]:
    inverse = chunk_inverse(products.weights.tril(-1))
    with tensor_cores(tf32):
        return inverse, inverse @ products.erase, inverse @ products.write


def one_by_one(device: torch.device) -> bool:
    """Return whether chunks go one by one, which is the least arithmetic: not where each operation is a launch."""
    return device.type == "cpu"


def _passes(
    products: Products, erased: Tensor, written: Tensor, grad: Tensor | None, reach: int
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the state that enters each chunk, and ``fresh``; with `grad` the gradients of what leaves, and of it."""
    if not one_by_one(erased.device):
        return _doubled(products, erased, written, grad, reach)
    forth = state_pass(written, erased, products.kept, products.through)
    if grad is None:
        return forth
    # What leaves a chunk is what enters the next: the same pass from the other end.
    ends, added = (products.kept, erased, products.through), products.read.mT @ grad
    return (*forth, *state_pass(products.scores.mT @ grad, *ends, added, reverse=True))


def _doubled(
    products: Products, erased: Tensor, written: Tensor, grad: Tensor | None, reach: int
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return what `_passes` says, of ``S_(n+1) = step_n S_n + kept_n^T written_n``."""
    kept, step = products.kept, products.kept.mT @ erased
    step.diagonal(dim1=-2, dim2=-1).add_(products.through[..., 0])
    states = written.new_zeros(*step.shape[:3], written.shape[-1])
    torch.bmm(*(part[:-1].flatten(0, 1) for part in (kept.mT, written)), out=states[1:].flatten(0, 1))
    if grad is None:
        state_doubling(step, states, None, reach)
        return states, _sum(written, erased, states)
    to_written, leaving = products.scores.mT @ grad, torch.zeros_like(states)
    added = (products.read.mT @ grad, erased.mT, to_written)
    torch.baddbmm(*(part[1:].flatten(0, 1) for part in added), out=leaving[:-1].flatten(0, 1))
    state_doubling(step, states, leaving, reach)
    return states, _sum(written, erased, states), leaving, _sum(to_written, kept, leaving)


def _sum(base: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Return ``base + left @ right``."""
    return torch.baddbmm(*(part.flatten(0, 1) for part in (base, left, right))).view_as(base)
