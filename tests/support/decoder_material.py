"""A decoder alone, run as the plan of activation memory runs it, with what the trainer has in place by then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fastpack_trl import apply_lora, apply_moe, packed_attention
from fastpack_trl.model.facts import text_model
from fastpack_trl.packing.packed_batch import PackedBatch, to_transformers_kwargs


def run_decoder(model: Any, documents: int, tokens: int, *, packed: bool = True) -> None:
    """Run the decoder on `documents` documents of `tokens` tokens each."""
    ids = torch.arange(tokens * documents)[None] % 90
    base = text_model(model)
    leaf = base.get_input_embeddings()(ids).detach().requires_grad_()
    batch = PackedBatch.from_lengths((tokens,) * documents)
    kwargs = to_transformers_kwargs(batch) | ({"packed_batch": batch} if packed else {})
    base.base_model(inputs_embeds=leaf.clone(), use_cache=False, **kwargs)


@contextlib.contextmanager
def installed(model: Any, *, ours: bool = True) -> Iterator[None]:
    """Put in place what the trainer has when it plans."""
    with contextlib.ExitStack() as stack:
        if ours:
            stack.enter_context(packed_attention(model, "per_document"))
            stack.enter_context(apply_moe(model))
            stack.callback(apply_lora(model).revert)
        yield
