"""The decoder of a model with towers from CUDA graphs: the towers run eagerly, and it gets their rows as embeddings."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.modeling_outputs import BaseModelOutputWithPast

from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.facts import backbones
from fastpack_trl.run import Run

_OURS = weakref.WeakSet[Any]()
"""Functions that ask for a replay; copies of a model share them."""
_SIZES = "the work of a tower depends on the sizes of its images"


def refusals(run: Run) -> Iterator[object]:
    """Yield why the decoder of a run on images is not recorded apart from the towers."""
    decoder = backbones(run.model)[-1]
    forward = inspect.signature(decoder.forward).parameters
    yield "forward" in vars(decoder) and not _is_ours(decoder) and "the forward of the decoder was replaced"
    yield not run.packs and f"{_SIZES}, and padded batches are not recorded"
    yield "deepstack_visual_embeds" in forward and f"{_SIZES}, and the decoder adds its features between layers"
    several = run.ranks.count > 1 and not run.is_sharded
    yield several and "several processes: a step of one may have no image, and no gradient for the tower"


@contextmanager
def replayed_decoder(run: Run) -> Iterator[None]:
    """Let the decoder inside of the backbone be replayed, as the whole backbone is on text."""
    decoder, call, runs = backbones(run.model)[-1], run.backbone, weakref.ref(run)

    @functools.wraps(type(decoder).forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = None
        if _is_ours(self):
            outputs = None if args else call.replay_decoder(self, kwargs)
        elif (now := runs()) is not None and now.graphs is not None and not now.graphs.has_ended:
            now.graphs.disable("the forward of the decoder was replaced")  # a recording would run it twice
        # Also in a deep copy of the model, which has this forward too.
        if outputs is None:
            return type(self).forward(self, *args, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=outputs.last_hidden_state)

    _OURS.add(forward)
    with patch_attribute(decoder, "forward", types.MethodType(forward, decoder)):
        yield


def _is_ours(decoder: Any) -> bool:
    return getattr(vars(decoder).get("forward"), "__func__", None) in _OURS
