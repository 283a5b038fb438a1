"""Matrices in FP8 with one scale, or one per block of 128 x 128: what `fp8_products` times beside scales per row."""

from __future__ import annotations

from torch import Tensor

from fastpack_trl.kernels.fp8 import Quantised, cast, magnitudes, scales_of

BLOCK = 128


def quantise_tensor(x: Tensor) -> Quantised:
    """Quantise a matrix with one scale."""
    scales, inverse = scales_of(magnitudes(x.float()).amax())
    return Quantised(cast(x.float() * inverse), scales)


def quantise_blocks(x: Tensor) -> Quantised:
    """Quantise a matrix, of multiples of 128, with a scale per block of 128 x 128."""
    blocks = x.float().view(x.shape[0] // BLOCK, BLOCK, -1, BLOCK)
    scales, inverse = scales_of(magnitudes(blocks).amax((1, 3)))
    return Quantised(cast(blocks * inverse[:, None, :, None]).view(x.shape), scales)
