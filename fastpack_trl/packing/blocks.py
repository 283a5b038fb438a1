"""`Blocks`: the images of a row whose tokens attend to each other. Made once per batch, on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fastpack_trl.packing.shared_keys import Ints, TensorFields


@dataclass(frozen=True, slots=True, eq=False)
class Blocks(TensorFields):
    """The tokens of images, and the keys of each image: from the start of its document to the end of the image.

    A document ``a b I I c`` whose tokens 2 and 3 are an image: ``key_ends=[1, 2, 4, 4, 5]``, ``tokens=[2, 3]``,
    ``key_index=[0, 1, 2, 3]``, ``cu_seqlens=[0, 2]``, ``cu_seqlens_k=[0, 4]``.

    Attributes:
        key_ends: (total_tokens,) int64, the end of the keys that a token sees: of its image, else itself.
        tokens: (image_tokens,) int64, the tokens of all images.
        key_index: (block_keys,) int64, the keys of each image, one after the other.
        cu_seqlens, cu_seqlens_k: (images + 1,) int32, in image tokens and in keys.
        lengths: tokens and keys of each image, on the host; None of a static batch.
        longest: most tokens and keys of an image, on the host; at least, in a static batch.
    """

    key_ends: Tensor
    tokens: Tensor
    key_index: Tensor
    cu_seqlens: Tensor
    cu_seqlens_k: Tensor
    lengths: tuple[tuple[int, int], ...]
    longest: tuple[int, int]

    @classmethod
    def of(cls, is_image: NDArray[np.bool_], lengths: Ints) -> Blocks | None:
        """Return the images of documents of these `lengths`, runs of (total_tokens,) `is_image`; None without any."""
        places = np.arange(len(is_image))
        starts = (lengths.cumsum() - lengths).repeat(lengths)  # of the document of each token
        goes_on = is_image & np.append(is_image[1:] & (starts[1:] != places[1:]), False)
        ends: Ints = np.minimum.accumulate(np.where(goes_on, len(places), places + 1)[::-1])[::-1].copy()
        tokens = is_image.nonzero()[0]
        if not tokens.size:
            return None
        last, counts = np.unique(ends[tokens], return_counts=True)
        keys = last - starts[last - 1]
        sums = keys.cumsum()
        index = np.arange(sums[-1]) - (sums - keys - starts[last - 1]).repeat(keys)
        cu, cu_k = (torch.from_numpy(np.append(0, each.cumsum()).astype(np.int32)) for each in (counts, keys))
        both, longest = tuple(zip(counts.tolist(), keys.tolist(), strict=True)), (int(counts.max()), int(keys.max()))
        key_ends, image_tokens, key_index = map(torch.from_numpy, (ends, tokens, index))
        return cls(key_ends, image_tokens, key_index, cu, cu_k, both, longest)
