"""What a delta rule does with the products of its chunks, and the gradient of that: one for every form of decay."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fastpack_trl.kernels.inverse import chunk_inverse
from fastpack_trl.kernels.state_pass import state_pass
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


def output(products: Products, tf32: bool) -> Tensor:
    """Return the output, (chunks, heads, CHUNK, value size).

    With ``T = (I + weights below the diagonal)^-1``, what the tokens of a chunk write into a state S that enters is
    ``fresh = T write + T erase S``; they read ``read S + scores fresh``, and ``through S + kept^T fresh`` leaves.

    Args:
        products: of the row.
        tf32: products may round what they multiply to TF32.
    """
    states, fresh = _solved(products, tf32)[2:]
    with tensor_cores(tf32):
        inside = products.scores @ fresh
        return torch.baddbmm(*(part.flatten(0, 1) for part in (inside, products.read, states))).view_as(inside)


def gradients(products: Products, grad: Tensor, tf32: bool) -> Products:
    """Return the gradients of `output`, that of ``through`` for each channel of the key."""
    inverse, erased, states, fresh = _solved(products, tf32)
    with tensor_cores(tf32):
        # What leaves a chunk is what enters the next: the same pass from the other end.
        leaving, to_fresh = state_pass(
            products.scores.mT @ grad, products.kept, erased, products.through, products.read.mT @ grad,
            reverse=True,
        )  # fmt: skip
        write = inverse.mT @ to_fresh
        return Products(
            # dT^-1 = -T^T dT T^T, with dT = dfresh (write + erase S)^T
            weights=(write @ fresh.mT).tril_(-1).neg_(), scores=grad @ fresh.mT, erase=write @ states.mT, write=write,
            read=grad @ states.mT, kept=fresh @ leaving.mT, through=(leaving * states).sum(-1, keepdim=True),
        )  # fmt: skip


def _solved(products: Products, tf32: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inverse = chunk_inverse(products.weights.tril(-1))
    with tensor_cores(tf32):
        erased, written = inverse @ products.erase, inverse @ products.write
        return inverse, erased, *state_pass(written, erased, products.kept, products.through)
