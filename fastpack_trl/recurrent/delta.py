"""The gated delta rule (Qwen3-Next, Qwen3.5, OLMo hybrid): the products of a chunk, and their gradients."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from fastpack_trl.packing.chunks import Chunks
from fastpack_trl.recurrent.decay import differences, log_decay, log_decay_gradient, masked_exp
from fastpack_trl.recurrent.precision import tensor_cores
from fastpack_trl.recurrent.products import Products


class Tokens(NamedTuple):
    """What a delta rule is given, or the gradients of that.

    Attributes:
        query, key: (chunks, key heads, CHUNK, key size), normalised and scaled; fp32 or wider.
        value: (chunks, heads, CHUNK, value size); a key head serves ``heads / key heads`` heads in a row.
        g: (total_tokens, heads), the logarithm of the decay; with a decay per channel (total_tokens, heads, key size).
        beta: (chunks, heads, CHUNK, 1).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    g: Tensor
    beta: Tensor


class ScalarDecay:
    """The products of a rule with one decay per head.

    Attributes:
        products: see `Products`.
    """

    def __init__(self, tokens: Tokens, chunks: Chunks, tf32: bool) -> None:
        self._chunks, self._tf32 = chunks, tf32
        dtype, groups = tokens.query.dtype, tokens.key.shape[1]
        # (chunks, key heads, 1 or heads per key head, CHUNK, size)
        self._q, self._k = tokens.query[:, :, None], tokens.key[:, :, None]
        self._v, self._beta = tokens.value, tokens.beta.unflatten(1, (groups, -1))
        sums = log_decay(tokens.g, chunks).unflatten(1, (groups, -1))
        self._between = differences(sums, chunks.causal[:, None, None], dtype)
        self._to_end = masked_exp(sums[..., -1:] - sums, chunks.to_end[:, None, None], dtype)[..., None]
        self._carried = masked_exp(sums, chunks.carry_in[:, None, None], dtype)[..., None]
        self._erasing = self._carried * -self._beta
        with tensor_cores(tf32):
            self._like, self._asked = self._k @ self._k.mT, self._q @ self._k.mT
        self.products = Products(
            weights=(self._like * self._between).mul_(self._beta).flatten(1, 2),
            scores=(self._asked * self._between).flatten(1, 2),
            erase=(self._k * self._erasing).flatten(1, 2), write=self._v * tokens.beta,
            read=(self._q * self._carried).flatten(1, 2), kept=(self._k * self._to_end).flatten(1, 2),
            # Of the last token: what is carried in and reaches the end.
            through=self._carried[..., -1:, :].flatten(1, 2),
        )  # fmt: skip

    def gradients(self, grad: Products) -> Tokens:
        """Return the gradients of the tokens."""
        groups = self._q.shape[1]
        weights, scores, erase, read, kept = (
            part.unflatten(1, (groups, -1)) for part in (grad.weights, grad.scores, grad.erase, grad.read, grad.kept)
        )
        # Logarithms of decays: what a product has as value times its gradient, plus at i and minus at j.
        of_scores = self._asked * scores.mul_(self._between)
        of_weights = self._like * weights.mul_(self._between)
        beta = of_weights.sum(-1, keepdim=True)
        of_both = of_scores.addcmul_(of_weights, self._beta)
        of_both.diagonal(dim1=-2, dim2=-1).zero_()  # it would cancel, but for rounding
        logs = of_both.sum(-1) - of_both.sum(-2)
        erased = (erase * self._k).sum(-1, keepdim=True).mul_(self._carried)
        beta -= erased
        ended = (kept * self._k).sum(-1, keepdim=True).mul_(self._to_end)[..., 0]
        logs -= ended
        read_out = (read * self._q).sum(-1, keepdim=True).mul_(self._carried)
        logs += read_out.addcmul_(erased, self._beta, value=-1)[..., 0]
        through = grad.through.sum(-2).unflatten(1, (groups, -1)) * self._carried[..., -1, :]
        logs[..., -1] += ended.sum(-1) + through[..., 0]
        with tensor_cores(self._tf32):
            to_scores, to_weights = scores.sum(2), weights.mul_(self._beta).sum(2)
            q, k = self._q[:, :, 0], self._k[:, :, 0]
            query = (to_scores @ k).add_(read.mul_(self._carried).sum(2))
            key = (to_scores.mT @ q).add_((to_weights + to_weights.mT) @ k)
            key += kept.mul_(self._to_end).addcmul_(erase, self._erasing).sum(2)
        beta = beta.flatten(1, 2).add_((grad.write * self._v).sum(-1, keepdim=True))
        value = grad.write * self._beta.flatten(1, 2)
        return Tokens(query, key, value, log_decay_gradient(logs.flatten(1, 2), self._chunks), beta)
