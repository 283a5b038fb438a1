"""A packed row as right-padded rows under stock's attention: right in every family, at the price of the padding.

For models whose documents the attention interface cannot keep apart: state-space and linear-attention layers, chunked
attention that exists only in a mask, families that drop keywords, prompt and prefix tuning. Every document becomes a
row with a two-dimensional mask, which is what such models were written for.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from fastpack_trl.attention.batch_check import BatchCheck
from fastpack_trl.model.facts import KINDS, backbones, is_prompt_learning, text_model
from fastpack_trl.packing.packed_batch import IGNORE_INDEX, PackedBatch, to_transformers_kwargs

DEFAULT_LIMIT = 4.0


@dataclass(frozen=True, slots=True)
class _Rows:
    """The place of each token: token t of the row is token ``flat_index[t]`` of the flattened (rows, width) batch."""

    rows: int
    width: int
    flat_index: Tensor
    """(documents' tokens,) int64, on the batch's device."""
    attention_mask: Tensor
    """(rows, width) int64."""

    def unpack(self, row: Tensor, fill: float) -> Tensor:
        """Turn (1, total_tokens, ...) into (rows, width, ...)."""
        out = row.new_full((self.rows * self.width, *row.shape[2:]), fill)
        tokens = row[0, : self.flat_index.numel()]
        return out.index_copy(0, self.flat_index, tokens).unflatten(0, (self.rows, self.width))

    def pack(self, rows: Tensor, total_tokens: int) -> Tensor:
        """Turn (rows, width, ...) into (1, total_tokens, ...), zeros in the tail."""
        flat = rows.flatten(0, 1).index_select(0, self.flat_index)
        tail = total_tokens - flat.shape[0]
        return torch.cat([flat, flat.new_zeros(tail, *flat.shape[1:])])[None] if tail else flat[None]


def padding_cost(seq_lengths: tuple[int, ...]) -> float:
    """Return padded tokens per real token when these documents become rows: (4, 2) -> (4 + 4) / 6."""
    return max(seq_lengths) * len(seq_lengths) / sum(seq_lengths)


@contextlib.contextmanager
def padded_rows(model: nn.Module, limit: float, batch_check: BatchCheck) -> Iterator[None]:
    """Unpack a batch with the keyword `packed_batch` before the model, and pack its output after it, by hooks.

    The backbone is wrapped, so that everything above it (head, loss) sees the packed row. Prompt learning is unpacked
    before PEFT, which prepends its virtual tokens to every row.

    Raises:
        ValueError: in a forward, when a batch would cost more than `limit` padded tokens per real token.
    """
    kind = _PromptHooks if is_prompt_learning(model) else _BackboneHooks
    handles = kind(limit, batch_check).register(model)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        batch_check.close()


class _BackboneHooks:
    def __init__(self, limit: float, batch_check: BatchCheck) -> None:
        self.limit = limit
        self.batch_check = batch_check
        self.batch: PackedBatch | None = None
        self.inside: nn.Module | None = None
        """The backbone that runs on rows at the moment."""

    def register(self, model: nn.Module) -> list[Any]:
        base = text_model(model)
        # Taken off at the outside: not every family hands unknown keywords to its backbone.
        handles = [
            base.register_forward_pre_hook(self.take, with_kwargs=True),
            base.register_forward_hook(self.forget, always_call=True),
        ]
        for backbone in backbones(model):
            handles.append(backbone.register_forward_pre_hook(self.unpack, with_kwargs=True))
            handles.append(backbone.register_forward_hook(self.pack))
        return handles

    def take(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch = kwargs.pop("packed_batch", None)
        # Here, where the row still has the positions that it came with.
        self.batch = self.batch_check.accept(batch, args, kwargs) if batch is not None else None
        if self.batch is not None:
            kwargs = _without_packed_keywords(kwargs, self.batch)
        return args, kwargs

    def forget(self, *_args: Any) -> None:
        self.batch = self.inside = None

    def unpack(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch = kwargs.pop("packed_batch", None) or self.batch
        if batch is None or self.inside is not None:
            return args, kwargs
        self.batch = batch = self.batch_check.accept(batch, args, kwargs)
        if batch is None:
            return args, kwargs
        self.inside = module
        if batch.shared is not None:
            raise ValueError(
                "padded_rows has no form for rows that hold a shared prefix once: set share_prefixes='off'"
            )
        cost = padding_cost(batch.seq_lengths)
        if cost > self.limit:
            raise ValueError(
                f"padded_rows would compute {cost:.1f} padded tokens per real token, over padded_rows_limit="
                f"{self.limit:g}: train with packing=False, pack documents of similar length, or raise "
                "padded_rows_limit"
            )
        rows = _rows(batch)
        if args and args[0] is not None:  # falcon and bloom give their tokens by position
            args = (rows.unpack(args[0], 0), *args[1:])
        kwargs = _without_packed_keywords(kwargs, batch)
        # No padding is a vector of zeros: some norms (gemma3n) have no gradient there, and NaN goes past every mask.
        for name in ("input_ids", "inputs_embeds", "per_layer_inputs", *KINDS):
            if kwargs.get(name) is not None:
                kwargs[name] = rows.unpack(kwargs[name], fill=int(name == "inputs_embeds"))
        kwargs["attention_mask"] = rows.attention_mask
        return args, kwargs

    def pack(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        if self.batch is None or module is not self.inside:
            return output
        self.inside = None
        rows, total = _rows(self.batch), self.batch.total_tokens

        def convert(tensor: Tensor) -> Tensor:
            if tensor.shape[:2] == (rows.rows, rows.width):
                return rows.pack(tensor, total)
            if tensor.shape[:1] == (rows.rows * rows.width,):  # router logits: one row per token
                return rows.pack(tensor.unflatten(0, (rows.rows, rows.width)), total)[0]
            return tensor

        return _map_tensors(output, convert)


class _PromptHooks(_BackboneHooks):
    """Hooks of PEFT's model, which prepends its virtual tokens to every row; the output gets them once, as stock's."""

    virtual_tokens = 0

    def register(self, model: nn.Module) -> list[Any]:
        config: Any = model.active_peft_config
        # Prefix tuning gives keys and values, not tokens: nothing is in front of its outputs.
        if config.peft_type != "PREFIX_TUNING":
            self.virtual_tokens = int(config.num_virtual_tokens)
        return [
            model.register_forward_pre_hook(self.unpack, with_kwargs=True),
            model.register_forward_hook(self.pack),
            model.register_forward_hook(self.forget, always_call=True),
        ]

    def unpack(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.forget()
        args, kwargs = super().unpack(module, args, kwargs)
        if self.batch is not None and kwargs.get("labels") is not None:
            kwargs["labels"] = _rows(self.batch).unpack(kwargs["labels"], IGNORE_INDEX)
        return args, kwargs

    def pack(self, module: nn.Module, _args: tuple[Any, ...], output: Any) -> Any:
        if self.batch is None:
            return output
        rows, total, virtual = _rows(self.batch), self.batch.total_tokens, self.virtual_tokens

        def convert(tensor: Tensor) -> Tensor:
            missing = virtual + rows.width - tensor.shape[1] if tensor.dim() > 1 and len(tensor) == rows.rows else -1
            if missing not in (0, 1):
                return tensor
            # Figures of the *next* token have one position less: the last of the longest document predicts nothing.
            full = torch.cat([tensor, tensor.new_zeros(len(tensor), missing, *tensor.shape[2:])], dim=1)
            packed = torch.cat([full[:1, :virtual], rows.pack(full[:, virtual:], total)], dim=1)
            return packed[:, : packed.shape[1] - missing]

        return _map_tensors(output, convert)


def _rows(batch: PackedBatch) -> _Rows:
    def build() -> _Rows:
        mask = torch.arange(max(batch.seq_lengths)) < torch.tensor(batch.seq_lengths)[:, None]
        flat_index = mask.flatten().nonzero().flatten()
        return _Rows(len(mask), mask.shape[1], flat_index.to(batch.device), mask.long().to(batch.device))

    return batch.derive(("padded_rows", batch.device), build)


def _without_packed_keywords(kwargs: dict[str, Any], batch: PackedBatch) -> dict[str, Any]:
    # Rows start at position 0: the model's own positions are right, those of the packed row are not.
    return {name: value for name, value in kwargs.items() if name not in to_transformers_kwargs(batch)}


def _map_tensors(value: Any, convert: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return convert(value)
    if isinstance(value, ModelOutput):
        for name, item in list(value.items()):
            value[name] = _map_tensors(item, convert)
        return value
    if isinstance(value, tuple | list):
        return type(value)(_map_tensors(item, convert) for item in value)
    return value
