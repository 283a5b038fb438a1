"""Bytes that the towers of a model keep for backward, counted on one example, and the sizes of a step's images."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastpack_trl.checkpointing.plan import layer_functions
from fastpack_trl.checkpointing.trace import storage_of, storages_saved
from fastpack_trl.model import facts
from fastpack_trl.model.changes import isolated_run
from fastpack_trl.model.upstream import GradientCheckpointingLayer
from fastpack_trl.packing.batching import has_images
from fastpack_trl.run import Run
from fastpack_trl.vision.rows import OF_IMAGES, PIXELS, collated, is_vision_collator

_EXAMPLES, _WITH_IMAGES = 64, 4
"""Examples that are looked at, drawn from all of the data, and how many of them with images are enough."""


class Size(NamedTuple):
    """Tokens of a row and of its longest document, and numbers in its `pixel_values`."""

    tokens: int
    longest: int
    numbers: int = 0

    @classmethod
    def of(cls, batches: Iterable[Any]) -> Size:
        """Return the most of each in the micro-batches of a step, read from shapes."""
        found = [(0, 0, 0)]
        for batch in batches:
            packed, ids = batch.get("packed_batch"), batch["input_ids"]
            row = (ids.numel(), ids.shape[-1]) if packed is None else (packed.total_tokens, packed.max_seqlen)
            found.append((*row, batch[PIXELS].numel() if PIXELS in batch else 0))
        return cls(*map(max, zip(*found, strict=True)))


class TowerCost(NamedTuple):
    """Bytes that towers keep for backward: ``linear * n + square * n^2`` of n numbers in `pixel_values`.

    Some mask the patches of all images by one square; the others have 0 there.

    Attributes:
        kept, checkpointed: linear and square, if their layers keep everything, and if they keep their inputs.
        largest: size of the largest of some examples.
        layers: what of them can be checkpointed.
    """

    kept: tuple[float, float]
    checkpointed: tuple[float, float]
    largest: Size
    layers: tuple[GradientCheckpointingLayer, ...]

    def at(self, numbers: int) -> tuple[int, int]:
        """Return what they keep if they keep everything, and if they are checkpointed."""
        kept, checkpointed = (
            int(linear * numbers + square * numbers**2) for linear, square in (self.kept, self.checkpointed)
        )
        return kept, checkpointed


def is_planned_by_step(run: Run) -> bool:
    """Return whether each step has a plan of its own: images are of any size, and no row is the largest."""
    stock = is_vision_collator(run.trainer.data_collator)
    return run.kind == "sft" and has_images(run.trainer) and stock and run.image_rows is None and not run.is_sharded


def tower_cost(run: Run) -> TowerCost | None:
    """Count what the towers keep; None without images in some examples, and for a sharded tower."""
    if not has_images(run.trainer) or run.is_sharded:
        return None
    with _random_states_kept():
        batches = (
            (collated(run.trainer.data_collator, [dict(each)]), each) for each in _spread(run.trainer.train_dataset)
        )
        found = [*islice(((batch, each) for batch, each in batches if PIXELS in batch), _WITH_IMAGES)]
        if not found:
            return None
        smallest = min(found, key=lambda pair: int(pair[0][PIXELS].numel()))
        twice = collated(run.trainer.data_collator, [dict(smallest[1]), dict(smallest[1])])
    counts = []
    for batch in (smallest[0], twice):
        images = {name: batch[name].to(run.device) for name in OF_IMAGES & batch.keys()}
        with run.trainer.accelerator.autocast():
            counts.append(kept_by_tower(run.model, images))
    one, two = (int(batch[PIXELS].numel()) for batch in (smallest[0], twice))
    kept, checkpointed = (_through(one, two, *bytes_kept) for bytes_kept in zip(*counts, strict=True))
    largest = Size.of([max((batch for batch, _ in found), key=lambda batch: int(batch[PIXELS].numel()))])
    return TowerCost(kept, checkpointed, largest, tuple(tower_layers(run.model)))


def _spread(data: Any) -> Iterator[Any]:
    """Return a random example of each of 64 parts, of a stream the first: one part may have images, or every n-th."""
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        return islice(data, _EXAMPLES)
    draw, count = random.Random(0), min(len(data), _EXAMPLES)
    ends = [len(data) * part // max(1, count) for part in range(count + 1)]
    places = [draw.randrange(*part) for part in pairwise(ends)]
    return (data[place] for place in draw.sample(places, count))


def _through(one: int, two: int, of_one: float, of_two: float) -> tuple[float, float]:
    """Return linear and square terms through two counts, the latter not below 0."""
    square = max(0.0, (of_two / two - of_one / one) / (two - one)) if two > one else 0.0
    return of_one / one - square * one, square


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Let transforms of a data set draw numbers that the run then draws again."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - that of the user's transforms
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002


def tower_layers(model: Any) -> list[GradientCheckpointingLayer]:
    """Return the layers of towers that transformers can checkpoint."""
    decoder = set(facts.backbones(model)[-1].modules())
    inside = facts.backbones(model)[0].modules()
    return [each for each in inside if isinstance(each, GradientCheckpointingLayer) and each not in decoder]


def kept_by_tower(model: Any, images: dict[str, Tensor]) -> tuple[int, int]:
    """Return the bytes that autograd saves while a model makes features of images: of whole and checkpointed layers.

    Checkpointed layers of towers keep their inputs, and all of one of them while it runs again.
    """
    backbone, layers = facts.backbones(model)[0], tower_layers(model)
    weights = {storage_of(tensor) for tensor in (*model.parameters(), *model.buffers(), *images.values())}
    saved: list[torch.UntypedStorage]
    kept, inputs = [0], [0]

    def size() -> int:
        return sum(storage.nbytes() for storage in saved)

    def counted(function: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        before = size()
        out = function(hidden, *args, **kwargs)
        kept.append(size() - before)
        inputs.append(min(hidden.nbytes, kept[-1]))
        return out

    with (
        isolated_run(model, training=True),
        layer_functions(layers, [partial(counted)] * len(layers)),
        storages_saved(backbone, weights) as saved,
    ):
        backbone.get_image_features(**images, return_dict=True)
        return size(), size() - sum(kept) + sum(inputs) + max(kept)
