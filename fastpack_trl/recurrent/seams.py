"""The seam into transformers' recurrent layers: their functions take one keyword more, and are stock's without it.

The functions are names of the family's file, so that they are replaced for the whole process. Without the keyword,
which only a packed batch brings, they hand everything on: `generate`, caches and padded batches stay as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial, update_wrapper
from types import ModuleType
from typing import Any

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fastpack_trl.errors import PackingError
from fastpack_trl.model.facts import text_model
from fastpack_trl.model.mixers import CONV, FUNCTIONS, FUSED, mixers
from fastpack_trl.model.patches import patch_attribute, shared
from fastpack_trl.packing.chunks import Chunks
from fastpack_trl.recurrent.conv import packed_conv
from fastpack_trl.recurrent.fla import FlaRow, fla_delta
from fastpack_trl.recurrent.rules import packed_delta
from fastpack_trl.recurrent.ssd import packed_ssd

KEYWORD = "packed_chunks"
"""Of the model's forward, with the `Chunks` of its row."""


@contextlib.contextmanager
def recurrent_layers(model: nn.Module) -> Iterator[None]:
    """Make the recurrent layers of a model stop at documents, in forwards with the keyword `KEYWORD`."""
    homes = {mixer.home for mixer in mixers(text_model(model)).values()}
    with contextlib.ExitStack() as stack:
        for home in sorted(homes, key=lambda home: home.__name__):
            stack.enter_context(shared(home, "_fastpack_recurrent", partial(replaced, home)))
        yield


@contextlib.contextmanager
def replaced(home: ModuleType) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in FUNCTIONS:
            if (stock := vars(home).get(name)) is not None:
                stack.enter_context(patch_attribute(home, name, _knowing(stock, OURS[name])))
        yield


def _knowing(stock: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs `ours` with the keyword, and `stock` without."""

    def either(*args: Any, packed_chunks: Chunks | None = None, **kwargs: Any) -> Any:
        if packed_chunks is None:
            return stock(*args, **kwargs)
        return ours(packed_chunks, *args, **kwargs)

    return update_wrapper(either, stock, updated=())  # a module of `kernels` has its state there


def _conv(
    chunks: Chunks, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
    **_ignored: Any,
) -> Tensor:  # fmt: skip
    _check(hidden_states.shape[0], hidden_states.shape[2], chunks)
    silu = activation in ("silu", "swish")
    out = packed_conv(hidden_states, weight, bias, chunks, silu=silu)
    if silu or activation is None:
        return out
    from transformers.activations import ACT2FN

    activated: Tensor = ACT2FN[activation](out)
    return activated


def _delta_rule(
    chunks: Chunks, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    packed_fla: FlaRow | None = None, **_ignored: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Run the delta rule of a family; as stock's function in all that it takes and returns but a state."""
    _check(query.shape[0], query.shape[1], chunks, initial_state is not None or output_final_state)
    row = (query[0], key[0], value[0], g[0], beta[0])
    if packed_fla is not None:
        return fla_delta(*row, packed_fla, normalise=use_qk_l2norm_in_kernel)[None], None
    return packed_delta(*row, chunks, normalise=use_qk_l2norm_in_kernel)[None], None


def _mamba2(
    chunks: Chunks, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int = 0,  # noqa: N803
    D: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None,  # noqa: N803
    dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False,
    **_ignored: Any,
) -> Tensor:  # fmt: skip
    """Run the scan of Mamba-2; as stock's function in all that it takes and returns but a state."""
    _check(hidden_states.shape[0], hidden_states.shape[1], chunks, initial_states is not None or return_final_states)
    step = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)
    return packed_ssd(hidden_states[0], step[0], A, B[0], C[0], chunks, skip=D)[None]


def _not_fused(_chunks: Chunks, *_args: Any, **_kwargs: Any) -> None:
    """Return None, upon which a layer takes the two functions above and calls its own `out_proj`, with any LoRA."""


def _check(rows: int, tokens: int, chunks: Chunks, has_state: bool = False) -> None:
    if has_state or rows != 1 or tokens != chunks.total_tokens:
        state = " and a state" if has_state else ""
        raise PackingError(
            f"a recurrent layer was given {rows} row(s) of {tokens} tokens{state} with the "
            f"documents of one row of {chunks.total_tokens} tokens: give packed rows without a cache (use_cache=False)"
        )


OURS: dict[str, Callable[..., Any]] = {
    CONV: _conv,
    "torch_chunk_gated_delta_rule": _delta_rule,
    "chunk_kimi_delta_attention": _delta_rule,
    "mamba2_chunk_scan": _mamba2,
    FUSED: _not_fused,
}
"""What stands for each of `FUNCTIONS`."""
