"""The seam into transformers: one attention name for packed and ordinary batches, a pre-hook that skips mask creation.

Ordinary batches (left-padded `generate`, padded evaluation) keep transformers' mask and function, so results are equal
bit for bit while the seam is installed.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from fastpack_trl.attention.backends import BACKENDS, choose, failure
from fastpack_trl.attention.interface import AttentionCall, Backend, PackedLayer, shared_refusal
from fastpack_trl.errors import PackingError
from fastpack_trl.model import facts
from fastpack_trl.model.changes import patch_attribute, shared
from fastpack_trl.model.facts import ModelFeatures
from fastpack_trl.packing.buckets import Bucket
from fastpack_trl.packing.chunks import chunks_of
from fastpack_trl.packing.documents import PADDED_DOCUMENTS
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.recurrent import fla
from fastpack_trl.recurrent.seams import KEYWORD, recurrent_layers
from fastpack_trl.run import Choice
from fastpack_trl.vision.tower import one_call_towers

logger = logging.getLogger(__name__)

EDITED = "position_ids were edited after collation: such rows run the attention of the model"


@dataclass(eq=False, repr=False)
class PackedAttention:
    """The attention that `packed_attention` has installed.

    Attributes:
        choice: the path and its reason.
        features: facts read from the model.
        remark: called once, if the rows of a batch cannot run on the path.
    """

    choice: Choice
    features: ModelFeatures
    remark: Callable[[str], object] = field(default=partial(logger.warning, "packed_attention: %s"))

    @property
    def path(self) -> str:
        """The path's name, e.g. ``per_document``."""
        return self.choice.path

    def __repr__(self) -> str:
        return f"PackedAttention(path={self.path!r}, reason={self.choice.reason!r})"


@contextlib.contextmanager
def packed_attention(
    model: nn.Module,
    implementation: str = "auto",
    *,
    stock_requested: str | None = None,
    compute_dtype: torch.dtype | None = None,
    device: torch.device | None = None,
    vision_tower: bool = True,
) -> Iterator[PackedAttention]:
    """Keep packed documents apart in `model`, also with TRL's `SFTTrainer`; the model is restored on exit.

    Inside the context a forward that gets the keyword ``packed_batch`` (from `PackingCollator`) runs the chosen path;
    every other forward runs transformers' attention.

    ```python
    trainer = SFTTrainer(model, args=SFTConfig(packing=True), train_dataset=dataset)
    trainer.data_collator = PackingCollator(pad_token_id=tokenizer.pad_token_id)
    with packed_attention(trainer.model) as attention:
        print(attention.path, attention.choice.reason)
        trainer.train()
    ```

    Args:
        model: a transformers causal language model, plain or inside PEFT.
        implementation: a value of `FastSFTConfig.packed_attention`: ``auto``, ``varlen``, ``per_document``, ...
        stock_requested: the `attn_implementation` that the user set, which ``auto`` respects.
        compute_dtype: the autocast dtype of the run (``torch.bfloat16`` under ``bf16=True``); default: the weights'.
        device: on which the model will run; default: where it is.
        vision_tower: towers of images attend in one call per layer, as by the option of that name.

    Raises:
        ValueError: the implementation does not exist or would be wrong for this model, or the model's attention cannot
            be switched; names the remedy.
    """
    features = facts.read_features(model, compute_dtype, device)
    choice = choose(implementation, features, stock_requested=stock_requested, attempt=failure)
    handle = PackedAttention(choice, features)
    if handle.path == PADDED_DOCUMENTS:
        raise ValueError(
            f"no packed attention keeps the documents of this {features.model_type} apart: {choice.reason}; train with "
            "packing=False, or with FastSFTTrainer, which pads each document by itself"
        )
    tower = one_call_towers(model, dtype=compute_dtype) if vision_tower else contextlib.nullcontext()
    with tower, backend_installed(model, handle) if handle.path in BACKENDS else contextlib.nullcontext():
        yield handle


@contextlib.contextmanager
def backend_installed(model: nn.Module, handle: PackedAttention) -> Iterator[None]:
    """Run packed rows of `model` on the backend that a handle names, for the features that it has."""
    prepare = _Prepare(BACKENDS[handle.path], handle, model)
    with contextlib.ExitStack() as stack:
        base = facts.text_model(model)
        stack.enter_context(shared(base, "_fastpack_switched", lambda: _switched(base, handle.features)))
        stack.enter_context(recurrent_layers(model))
        stack.callback(prepare.clear_last)
        # On the backbone, not on the whole model: TRL reads the outer attention_mask for the auxiliary loss of experts.
        # First: of several on one model (a trainer made during the run of another) the latest prepares.
        for module in facts.backbones(model):
            hook = module.register_forward_pre_hook(prepare, with_kwargs=True, prepend=True)
            stack.callback(hook.remove)
        yield


@contextlib.contextmanager
def _switched(base: Any, features: ModelFeatures) -> Iterator[None]:
    """Switch the text config to our name over its own implementation, give each layer its window; restored on exit.

    The name remains registered: without `packed_layer` it is transformers' function, and a copy of the model that a
    callback made during training (such as an average of weights) keeps working.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

    stock = features.implementation
    if stock not in facts.OVER:
        raise ValueError(
            f"attn_implementation={stock!r} cannot be replaced: load the model with attn_implementation='sdpa', or "
            "set packed_attention='off'"
        )
    AttentionInterface.register(facts.OVER[stock], partial(_attention, stock))
    # With attention alone, transformers would skip masks, and a left-padded batch would be wrong.
    AttentionMaskInterface.register(facts.OVER[stock], ALL_MASK_ATTENTION_FUNCTIONS[stock])
    with contextlib.ExitStack() as stack:
        for module in facts.attention_modules(base):
            stack.enter_context(patch_attribute(module, "_fastpack_window", facts.window_of(module)))
        # Set directly, because the public setter would check and load kernels again. A vision tower keeps its own.
        text = base.config.get_text_config()
        stack.enter_context(patch_attribute(text, "_attn_implementation_internal", facts.OVER[stock]))
        yield


class _Prepare:
    """The forward pre-hook that converts the keyword `packed_batch` for the layers; a model can be copied with it."""

    def __init__(self, backend: Backend, handle: PackedAttention, model: nn.Module) -> None:
        self.backend, self.handle, self.features = backend, handle, handle.features
        self.config = facts.text_model(model).config.get_text_config()
        self.by_fla, self.by_kind = fla.is_chosen(handle.features), facts.masks_by_kind(model)
        self.last: weakref.ref[PackedBatch] | None = None

    def __getstate__(self) -> dict[str, Any]:  # a copy of the model has seen no batch, and belongs to no run
        return vars(self) | {"handle": PackedAttention(self.handle.choice, self.features), "last": None}

    def clear_last(self) -> None:
        """Drop the tensors derived from the last batch; TRL's trainer would keep those of a whole accumulation."""
        if self.last is not None and (last := self.last()) is not None:
            last.clear_derived()
        self.last = None

    def _is_as_collated(self, batch: PackedBatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether the documents of a batch are those of its row; without the device if nobody replaced them.

        Raises:
            ValueError: the row does not have the tokens of `batch`, or shares prefixes and has edited position ids.
        """
        rows = (kwargs.get("inputs_embeds"), kwargs.get("input_ids"), *args[:1])
        row = next((given for given in rows if given is not None), None)
        positions: Any = kwargs.get("position_ids")
        positions = batch.position_ids if positions is None else positions  # not every backbone gets them
        if row is None or batch.describes(row, positions):
            return True
        if not row.shape[:2] == positions.shape[-2:] == (1, batch.total_tokens):
            raise ValueError(
                f"packed_batch has documents of {batch.total_tokens} tokens for a row of {row.shape[1]} (batch of "
                f"{row.shape[0]}, position_ids of shape {tuple(positions.shape)}): give one row, uncut, and the "
                "PackedBatch that was collated with it"
            )
        # Position ids of several sections locate tokens in an image too; others may be an equal copy (synchronizes).
        made = batch.position_ids
        if positions.dim() > 2 or (batch.describes(row, made) and torch.equal(positions, made)):
            return True
        if batch.shared is not None or self.features.mixers or batch.blocks is not None:
            message = "position_ids were edited after collation, and {} cannot tell documents by them: {}"
            if batch.shared is not None:
                raise ValueError(message.format("shared prefixes", "set share_prefixes='off'"))
            who = "recurrent layers" if self.features.mixers else "blocks of images"
            fix = "edit them when you prepare the data set, or set packing=False and vision_rows='off'"
            raise PackingError(message.format(f"{who} of {self.features.model_type}", fix))
        self.handle.remark(EDITED)
        self.handle.remark = str  # once
        return False

    def __call__(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch: PackedBatch | None = kwargs.pop("packed_batch", None)
        if batch is None or not self._is_as_collated(batch, args, kwargs):
            return args, kwargs
        if self.last is None or self.last() is not batch:
            self.clear_last()
            self.last = weakref.ref(batch)
        if self.config._attn_implementation != facts.OVER[self.features.implementation]:
            # Another attention would read the mask below as full attention.
            raise PackingError(
                f"attn_implementation was set to {self.config._attn_implementation!r} in the middle of a run whose "
                "rows hold several documents, with and without packing=True: set it before the run, or set "
                "packed_attention='off'"
            )
        refused = self.backend.refuses_static(Bucket.of(batch), self.features) if batch.is_static else ""
        refused = refused or (shared_refusal(self.backend, self.features) if batch.shared is not None else "")
        blocks = batch.blocks is not None and not self.backend.sees_blocks
        refused = refused or (f"{self.backend.name} does not support blocks of images" if blocks else "")
        if refused:
            raise PackingError(f"a row cannot run: {refused}; pass the model the plain batch, without shared prefixes")
        for name in facts.KINDS if self.by_kind else ():
            if isinstance(kwargs.get(name), Tensor) and (kwargs[name] > 0).any():  # synchronizes in rows with such ids
                raise PackingError(
                    f"{name} of {self.features.model_type} says which tokens see each other in both directions (those "
                    f"of an image), and packed_attention={self.backend.name!r} would make them causal: train such data "
                    "with packing=False and packed_attention='off'"
                )
        device = batch.device  # where the data loader put the batch; parameters may be offloaded
        kwargs["packed_layer"] = batch.derive(
            (self.backend.name, device), lambda: self.backend.prepare(batch, self.features, device)
        )
        kwargs["packed_tokens"] = batch.total_tokens
        if self.features.mixers:
            kwargs[KEYWORD] = chunks_of(batch)
            if self.by_fla and not batch.is_static:
                kwargs[fla.KEYWORD] = fla.fla_row(batch)
            kwargs["use_cache"] = False  # the document of the last state would be unknown
        # transformers returns a 4-D mask unchanged: no mask is made, and nothing synchronizes.
        kwargs["attention_mask"] = batch.derive(
            ("bypass", device), lambda: torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
        )
        return args, kwargs


def _attention(
    stock: str, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    *args: Any, packed_layer: PackedLayer | None = None, packed_tokens: int | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Run the packed path with `packed_layer`, the family's own function without: registered under our name."""
    if packed_layer is None:
        if attention_mask is not None and attention_mask.shape == (1, 1, 1, 1) and query.shape[2] > 1:
            raise PackingError(
                f"{type(module).__name__} was not given the packed metadata: its layers drop keywords; set "
                "packing=False and packed_attention='off'"
            )
        return facts.stock_attention(module, stock)(module, query, key, value, attention_mask, *args, **kwargs)
    if attention_mask is not None and attention_mask.shape != (1, 1, 1, 1):
        raise PackingError(
            f"{type(module).__name__} makes an attention mask of its own, which packed attention would ignore; set "
            "packing=False and packed_attention='off'"
        )
    expected = query.shape[2] if packed_tokens is None else packed_tokens
    # A kernel would read past the end of the shorter ones.
    if not (query.shape[2] == key.shape[2] == value.shape[2] == expected):
        raise PackingError(
            f"{type(module).__name__} attends with {query.shape[2]} queries over {key.shape[2]} keys and "
            f"{value.shape[2]} values, but the documents of its row (cu_seqlens) end at {expected}: every layer needs "
            "every token; remove what cuts rows inside the model (logits_to_keep, if layers share keys), or set "
            "packing=False and packed_attention='off'"
        )
    # The autocast dtype, else that of the value projection, which is the weights'. Never the query's: rotary embeddings
    # and norms return it in fp32 while the run computes in bf16.
    device, sinks, scale = value.device.type, kwargs.get("s_aux"), kwargs.get("scaling")
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else value.dtype
    call = AttentionCall(
        query.to(dtype), key.to(dtype), value.to(dtype), float(query.shape[-1] ** -0.5 if scale is None else scale),
        module._fastpack_window, None if sinks is None else sinks.to(dtype), kwargs.get("softcap"),
        kwargs.get("dropout", 0.0), module,
    )  # fmt: skip
    out: Tensor = packed_layer.attend(call)
    return out, None
