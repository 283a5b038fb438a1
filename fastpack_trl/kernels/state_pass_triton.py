# mypy: disable-error-code="no-untyped-def"
"""A Triton kernel of `fastpack_trl.kernels.state_pass`: a program per head and block of values, the state in registers.

Launched once for all chunks: a launch per product would take a device longer than its work.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastpack_trl.kernels._triton import on_device_of

_VALUES = 32
"""Columns of the state that a program has: with 32 heads of 128, as many programs as an H200 has processors."""
_LEAST = 16  # rows and columns of a product


@triton.jit
def _kernel(
    base, left, right, through, added, entering, inner, chunks, heads, key, value, through_step, through_channel,
    has_added: tl.constexpr, reverse: tl.constexpr, precision: tl.constexpr, tokens: tl.constexpr,
    keys: tl.constexpr, values: tl.constexpr,
):  # fmt: skip
    head, token, channel = tl.program_id(0), tl.arange(0, tokens), tl.arange(0, keys)
    column = tl.program_id(1) * values + tl.arange(0, values)
    in_key, in_value = channel < key, column < value
    state = tl.zeros((keys, values), dtype=tl.float32)
    for step in range(chunks):
        chunk = chunks - 1 - step if reverse else step
        place = (chunk * heads + head).to(tl.int64)
        of_state = place * key * value + channel[:, None] * value + column[None, :]
        of_value = place * tokens * value + token[:, None] * value + column[None, :]
        mask_state, mask_value = in_key[:, None] & in_value[None, :], (token[:, None] >= 0) & in_value[None, :]
        tl.store(entering + of_state, state, mask=mask_state)
        of_key = place * tokens * key + token[:, None] * key + channel[None, :]
        before = tl.load(left + of_key, mask=(token[:, None] >= 0) & in_key[None, :], other=0.0)
        here = tl.load(base + of_value, mask=mask_value, other=0.0)
        here = tl.dot(before, state, here, input_precision=precision)
        tl.store(inner + of_value, here, mask=mask_value)
        of_key = place * tokens * key + token[None, :] * key + channel[:, None]
        after = tl.load(right + of_key, mask=(token[None, :] >= 0) & in_key[:, None], other=0.0)
        decay = tl.load(through + place * through_step + channel * through_channel, mask=in_key, other=0.0)
        state = tl.dot(after, here, state * decay[:, None], input_precision=precision)
        if has_added:
            state += tl.load(added + of_state, mask=mask_state, other=0.0)


def stages(shape: Sequence[int], device: torch.device) -> int:
    """Return how many chunks a program may have under way in shared memory; 0 where not one fits."""
    tokens, key = shape[-2], max(_LEAST, triton.next_power_of_2(shape[-1]))
    room = torch.cuda.get_device_properties(device).shared_memory_per_block_optin * 0.9
    state = 4 * _VALUES * (key + 2 * tokens)
    return min(2, max(0, int((room - state) // (4 * 2 * tokens * key))))


def state_pass_triton(
    base: Tensor, left: Tensor, right: Tensor, through: Tensor, added: Tensor | None, *, reverse: bool, tf32: bool
) -> tuple[Tensor, Tensor]:
    """Compute `state_pass` of fp32 tensors in one kernel."""
    chunks, heads, tokens, key = left.shape
    value = base.shape[-1]
    entering, inner = base.new_empty(chunks, heads, key, value), torch.empty_like(base)
    with on_device_of(base):
        _kernel[(heads, triton.cdiv(value, _VALUES))](
            base, left, right, through, base if added is None else added, entering, inner, chunks, heads, key, value,
            through.shape[2], int(through.shape[2] > 1), has_added=added is not None, reverse=reverse,
            precision="tf32" if tf32 else "ieee", tokens=tokens, keys=max(_LEAST, triton.next_power_of_2(key)),
            values=_VALUES, num_warps=4, num_stages=stages(left.shape, base.device) if base.is_cuda else 1,
        )  # fmt: skip
    return entering, inner
