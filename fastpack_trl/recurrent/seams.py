"""The seam into transformers' recurrent layers: their functions take one more keyword, and are unchanged without it.

They are module globals of the family, so they are replaced for the whole process. Only a packed batch passes the
keyword: `generate`, caches and padded batches run as before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial, update_wrapper
from types import ModuleType
from typing import Any, cast

import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from fastpack_trl.errors import PackingError
from fastpack_trl.model.changes import patch_attribute, shared
from fastpack_trl.model.facts import CONV, mixers, text_model
from fastpack_trl.packing.chunks import Chunks
from fastpack_trl.recurrent.conv import packed_conv
from fastpack_trl.recurrent.delta import packed_delta
from fastpack_trl.recurrent.fla import FlaRow, fla_delta
from fastpack_trl.recurrent.ssd import packed_ssd

KEYWORD = "packed_chunks"
"""Keyword of the model's forward for the `Chunks` of its row."""


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
    """Replace the functions of one family's file."""
    with contextlib.ExitStack() as stack:
        for name, ours in OURS.items():
            if (stock := vars(home).get(name)) is not None:
                stack.enter_context(patch_attribute(home, name, _either(stock, ours)))
        yield


def _either(stock: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    def either(*args: Any, packed_chunks: Chunks | None = None, **kwargs: Any) -> Any:
        return stock(*args, **kwargs) if packed_chunks is None else ours(packed_chunks, *args, **kwargs)

    return update_wrapper(either, stock, updated=())  # a module of the package `kernels` keeps its state there


def _conv(
    chunks: Chunks, hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None,
    **_ignored: Any,
) -> Tensor:  # fmt: skip
    from transformers.activations import ACT2FN

    _check(hidden_states.mT, chunks)
    silu = activation in ("silu", "swish")
    out = packed_conv(hidden_states, weight, bias, chunks, silu=silu)
    return out if silu or activation is None else cast("Tensor", ACT2FN[activation](out))


def _delta_rule(
    chunks: Chunks, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    initial_state: Tensor | None = None, output_final_state: bool = False, use_qk_l2norm_in_kernel: bool = False,
    packed_fla: FlaRow | None = None, **_ignored: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    _check(query, chunks, initial_state is not None or output_final_state)
    row, normalise = (query[0], key[0], value[0], g[0], beta[0]), use_qk_l2norm_in_kernel
    if packed_fla is not None:
        return fla_delta(*row, packed_fla, normalise=normalise)[None], None
    return packed_delta(*row, chunks, normalise=normalise)[None], None


def _mamba2(
    chunks: Chunks, hidden_states: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, chunk_size: int = 0,  # noqa: N803
    D: Tensor | None = None, dt_bias: Tensor | None = None, initial_states: Tensor | None = None,  # noqa: N803
    dt_softplus: bool = False, dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False,
    **_ignored: Any,
) -> Tensor:  # fmt: skip
    _check(hidden_states, chunks, initial_states is not None or return_final_states)
    step = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    step = (F.softplus(step) if dt_softplus else step).clamp(*dt_limit)
    return packed_ssd(hidden_states[0], step[0], A, B[0], C[0], chunks, skip=D)[None]


def _not_fused(_chunks: Chunks, *_args: Any, **_kwargs: Any) -> None:
    """Return None in place of mamba_ssm's one kernel: the layer calls the functions above, and `out_proj` with LoRA."""


def _check(tokens: Tensor, chunks: Chunks, has_state: bool = False) -> None:
    rows, length = tokens.shape[:2]
    if has_state or rows != 1 or length != chunks.total_tokens:
        given = f"{rows} row(s) of {length} tokens{' and a state' * has_state}"
        fix = "give packed rows without a cache (use_cache=False)"
        raise PackingError(f"a recurrent layer got {given}, expected one row of {chunks.total_tokens}: {fix}")


OURS: dict[str, Callable[..., Any]] = {
    CONV: _conv, "torch_chunk_gated_delta_rule": _delta_rule, "mamba2_chunk_scan": _mamba2,
    "mamba2_split_conv1d_scan_combined": _not_fused,
}  # fmt: skip
"""Functions of the families -> ours, with the same arguments and results, except for the state."""
