"""Kimi's delta rule (Kimi Linear, Bailing hybrid), with a decay for each channel of the key: products and gradients."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fastpack_trl.packing.chunks import CHUNK, Chunks
from fastpack_trl.recurrent.decay import log_decay, log_decay_gradient, masked_exp
from fastpack_trl.recurrent.delta import Tokens
from fastpack_trl.recurrent.precision import tensor_cores
from fastpack_trl.recurrent.products import Products

_BLOCK = 16
"""Tokens of a sub-block. Between two, decays are split about the token before the later one, so that scores are
products of matrices; inside of one they are made channel by channel."""


class ChannelDecay:
    """The products of a rule with a decay per channel.

    Attributes:
        products: see `Products`.
    """

    def __init__(self, tokens: Tokens, chunks: Chunks, tf32: bool) -> None:
        self._tokens, self._chunks, self._tf32 = tokens, chunks, tf32
        q, k, v, g, beta = tokens
        self._sums = log_decay(g, chunks)
        self._carried = masked_exp(self._sums, chunks.carry_in[:, None, :, None], q.dtype)
        self._to_end = masked_exp(self._sums[..., -1:, :] - self._sums, chunks.to_end[:, None, :, None], q.dtype)
        self._left = torch.stack([k * beta, q])
        weights, scores = self._scores()
        self.products = Products(
            weights=weights, scores=scores, erase=-(self._left[0] * self._carried), write=v * beta,
            read=q * self._carried, kept=k * self._to_end, through=self._carried[..., -1:, :].mT.contiguous(),
        )  # fmt: skip

    def gradients(self, grad: Products) -> Tokens:
        """Return the gradients of the tokens."""
        q, k, v, _, beta = self._tokens
        both = torch.stack([grad.weights, grad.scores])
        diagonal = both[1].diagonal(dim1=-2, dim2=-1)
        own = diagonal[..., None].clone()
        diagonal.zero_()  # of the logarithms it would cancel, but for rounding
        left, key = self._scores_gradients(both)
        # Logarithms of decays: what a product has as value times its gradient, plus at i and minus at j.
        logs = (self._left * left).sum(0) - k * key
        left[1] += own * k
        key += own * q
        logs += self.products.read * grad.read + self.products.erase * grad.erase
        ended = self.products.kept * grad.kept
        logs -= ended
        logs[..., -1, :] += ended.sum(-2) + (self.products.through * grad.through)[..., 0]
        written = left[0].addcmul_(grad.erase, self._carried, value=-1)
        key += torch.addcmul(written * beta, grad.kept, self._to_end)
        return Tokens(
            query=left[1].addcmul_(grad.read, self._carried), key=key, value=grad.write * beta,
            g=log_decay_gradient(logs, self._chunks),
            beta=(written * k).sum(-1, keepdim=True) + (grad.write * v).sum(-1, keepdim=True),
        )  # fmt: skip

    def _scores(self) -> Tensor:
        """Return ``left_i key_j`` with the decays from j to i, 0 above the diagonal, in (CHUNK, CHUNK)."""
        left, key = self._left, self._tokens.key
        scores = left.new_zeros(*left.shape[:-1], CHUNK)
        for own, decays, since, until in self._blocks():
            # By element: both exponents about a token between the two could be positive.
            decayed = key[..., own, :].unsqueeze(-3) * decays  # (chunks, heads, i, j, size)
            scores[..., own, own] = (decayed @ left[..., own, :].movedim(0, -1)).movedim(-1, 0)
            if since is not None and until is not None:
                before = slice(0, own.start)
                with tensor_cores(self._tf32):
                    scores[..., own, before] = (left[..., own, :] * since) @ (key[..., before, :] * until).mT
        return scores

    def _scores_gradients(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of `left` and of the key."""
        left, key = self._left, self._tokens.key
        to_left, to_key = torch.empty_like(left), torch.zeros_like(key)
        for own, decays, since, until in self._blocks():
            weights = grad[..., own, own].movedim(0, -1)  # (chunks, heads, i, j, 2)
            decayed = key[..., own, :].unsqueeze(-3) * decays
            to_left[..., own, :] = (decayed.mT @ weights).movedim(-1, 0)
            to_key[..., own, :] += ((weights @ left[..., own, :].movedim(0, -2)) * decays).sum(-3)
            if since is not None and until is not None:
                before = slice(0, own.start)
                with tensor_cores(self._tf32):
                    to_left[..., own, :] += (grad[..., own, before] @ (key[..., before, :] * until)) * since
                    products = grad[..., own, before].mT @ (left[..., own, :] * since)
                to_key[..., before, :] += products.sum(0).mul_(until)
        return to_left, to_key

    def _blocks(self) -> Iterator[tuple[slice, Tensor, Tensor | None, Tensor | None]]:
        """Yield each sub-block with its own decays, those since the token before it, and those up to that token."""
        sums, causal, dtype = self._sums, self._chunks.causal, self._left.dtype
        for start in range(0, CHUNK, _BLOCK):
            own = slice(start, start + _BLOCK)
            inside = sums[..., own, :]
            decays = masked_exp(
                inside.unsqueeze(-2) - inside.unsqueeze(-3), causal[:, own, own][:, None, :, :, None], dtype
            )
            if not start:
                yield own, decays, None, None
                continue
            # Of the document of the token before: later ones of the block, and earlier ones of the row before it.
            pivot, seen = sums[..., start - 1 : start, :], causal[:, None, :, start - 1, None]
            since = masked_exp(inside - pivot, seen[:, :, own], dtype)
            until = masked_exp(pivot - sums[..., :start, :], causal[:, None, start - 1, :start, None], dtype)
            yield own, decays, since, until
