"""The decoder of a model with towers from CUDA graphs: the towers run eagerly, and it gets their rows as embeddings.

Features of images that a decoder adds between its layers (DeepStack) are rows too: zeros where there is no image. They
reach a graph beside the embeddings, in one tensor of several widths, and their places are not read from the device.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast

from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.facts import backbones
from fastpack_trl.run import Run

_OURS = weakref.WeakSet[Any]()
"""Functions that ask for a replay; copies of a model share them."""
_SIZES = "the work of a tower depends on the sizes of its images"
_FEATURES, _PLACES, _ADD = "deepstack_visual_embeds", "visual_pos_masks", "_deepstack_process"


def refusals(run: Run) -> Iterator[object]:
    """Yield why the decoder of a run on images is not recorded apart from the towers."""
    decoder = backbones(run.model)[-1]
    forward = inspect.signature(decoder.forward).parameters
    yield "forward" in vars(decoder) and not _is_ours(decoder) and "the forward of the decoder was replaced"
    yield not run.packs and f"{_SIZES}, and padded batches are not recorded"
    adds = _FEATURES not in forward or (_adds(decoder) and (_ADD not in vars(decoder) or _is_ours(decoder, _ADD)))
    yield not adds and f"{_SIZES}, and the decoder puts its features between layers in another way than by adding them"
    several = run.ranks.count > 1 and not run.is_sharded
    yield several and "several processes: a step of one may have no image, and no gradient for the tower"


@contextmanager
def replayed_decoder(run: Run) -> Iterator[None]:
    """Let the decoder inside of the backbone be replayed, as the whole backbone is on text."""
    decoder, call, runs = backbones(run.model)[-1], run.backbone, weakref.ref(run)

    @functools.wraps(type(decoder).forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs, adds = None, _adds(self)
        kwargs = _as_rows(kwargs) if adds else kwargs
        if _is_ours(self):
            outputs = None if args else call.replay_decoder(self, _joined(kwargs) if adds else kwargs)
        elif (now := runs()) is not None and now.graphs is not None and not now.graphs.has_ended:
            now.graphs.disable("the forward of the decoder was replaced")  # a recording would run it twice
        # Also in a deep copy of the model, which has this forward too.
        if outputs is None:
            kwargs = _parted(kwargs, self.config.get_text_config().hidden_size) if adds else kwargs
            return type(self).forward(self, *args, **kwargs)
        return BaseModelOutputWithPast(last_hidden_state=outputs.last_hidden_state)

    @functools.wraps(getattr(type(decoder), _ADD, forward))
    def add(self: Any, hidden: Tensor, places: Tensor | None, features: Tensor) -> Any:
        own = getattr(type(self), _ADD)
        return hidden + features.to(hidden) if places is None else own(self, hidden, places, features)

    _OURS.update((forward, add))
    with ExitStack() as stack:
        ours: dict[str, Callable[..., Any]] = {"forward": forward} | ({_ADD: add} if _adds(decoder) else {})
        for name, method in ours.items():
            stack.enter_context(patch_attribute(decoder, name, types.MethodType(method, decoder)))
        yield


def _is_ours(decoder: Any, name: str = "forward") -> bool:
    return getattr(vars(decoder).get(name), "__func__", None) in _OURS


def _as_rows(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keywords of a decoder with the features of images, (tokens of images, hidden), as (1, tokens, hidden)."""
    row, places, features = (kwargs.get(name) for name in ("inputs_embeds", _PLACES, _FEATURES))
    if not isinstance(row, Tensor) or len(row) != 1 or places is None or not features or not len(features[0]):
        return kwargs
    return kwargs | {_PLACES: None, _FEATURES: [_row_of(each.to(row), places) for each in features]}


def _row_of(features: Tensor, places: Tensor) -> Tensor:
    index = places[0].cumsum(0).sub(1).clamp(min=0)
    return torch.where(places[..., None], features.index_select(0, index), 0)


def _joined(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keywords with rows of features beside the embeddings."""
    if kwargs.get(_PLACES) is not None or not kwargs.get(_FEATURES):
        return kwargs
    others = {name: value for name, value in kwargs.items() if name not in (_PLACES, _FEATURES)}
    return others | {"inputs_embeds": torch.cat([kwargs["inputs_embeds"], *kwargs[_FEATURES]], -1)}


def _parted(kwargs: dict[str, Any], width: int) -> dict[str, Any]:
    """Return keywords with embeddings, and rows of features if there are some beside them."""
    row = kwargs.get("inputs_embeds")
    if not isinstance(row, Tensor) or row.shape[-1] == width:
        return kwargs
    row, *features = row.split(width, -1)
    return kwargs | {"inputs_embeds": row.contiguous(), _PLACES: None, _FEATURES: features}


def _adds(decoder: Any) -> bool:
    return _is_addition(getattr(type(decoder), _ADD, None))


@functools.cache
def _is_addition(own: Any) -> bool:
    """Return whether a method adds features to the hidden states of their tokens, and does nothing else."""
    hidden, places = torch.arange(20.0).view(1, 5, 4), torch.tensor([[False, True, False, False, True]])
    features = torch.arange(8.0).view(2, 4)
    try:
        return torch.equal(own(None, hidden, places, features), hidden + _row_of(features, places))
    except Exception:  # noqa: BLE001 - whatever code of others raises
        return False
