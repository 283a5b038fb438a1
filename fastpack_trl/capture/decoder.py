"""The decoder of a model with towers from CUDA graphs: the towers run eagerly, and it gets their rows as embeddings."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.modeling_outputs import BaseModelOutputWithPast

from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.facts import backbones, masks_by_kind
from fastpack_trl.run import Run

_SIZES = "the work of a tower depends on the sizes of its images"


def refusals(run: Run) -> Iterator[object]:
    """Yield why the decoder of a run on images is not recorded apart from the towers."""
    forward = inspect.signature(backbones(run.model)[-1].forward).parameters
    yield not run.packs and f"{_SIZES}, and padded batches are not recorded"
    yield "deepstack_visual_embeds" in forward and f"{_SIZES}, and the decoder adds its features between layers"
    yield masks_by_kind(run.model) and f"{_SIZES}, and so does the attention of the decoder to them"
    several = run.ranks.count > 1 and not run.is_sharded
    yield several and "several processes: a step of one may have no image, and no gradient for the tower"


@contextmanager
def replayed_decoder(run: Run) -> Iterator[None]:
    """Let the decoder inside of the backbone be replayed, as the whole backbone is on text."""
    decoder, call = backbones(run.model)[-1], run.backbone

    @functools.wraps(type(decoder).forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = None if args else call.replay_decoder(self, kwargs)
        if outputs is None:  # also of a deep copy of the model, which has this forward too
            return type(self).forward(self, *args, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=outputs.last_hidden_state)

    with patch_attribute(decoder, "forward", types.MethodType(forward, decoder)):
        yield
