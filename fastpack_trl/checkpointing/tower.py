"""Bytes that the tower of a model keeps for backward in the largest row of images, counted on one example."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from fastpack_trl.checkpointing.plan import layer_functions
from fastpack_trl.checkpointing.trace import storage_of, storages_saved
from fastpack_trl.model import facts
from fastpack_trl.model.changes import isolated_run
from fastpack_trl.model.upstream import GradientCheckpointingLayer
from fastpack_trl.packing.batching import has_images
from fastpack_trl.run import Run
from fastpack_trl.vision.rows import OF_IMAGES, PIXELS, collated

_EXAMPLES = 16


def tower_bytes(run: Run) -> int:
    """Return what the towers keep in the largest row: of `image_row_tokens`, else of the largest of some examples.

    It grows with the images. A sharded tower is not counted.
    """
    if not has_images(run.trainer) or run.is_sharded:
        return 0
    stock, each = run.trainer.data_collator, run.args.per_device_train_batch_size
    batches = (collated(stock, [example]) for example in islice(run.trainer.train_dataset, _EXAMPLES))
    found = [batch for batch in batches if PIXELS in batch]
    if not found:
        return 0
    largest = max(found, key=lambda batch: int(batch[PIXELS].numel()))
    numbers = largest[PIXELS].numel()
    most = numbers if run.image_rows is None else run.image_rows.pixels
    images = {name: largest[name].to(run.device) for name in OF_IMAGES & largest.keys()}
    with run.trainer.accelerator.autocast():
        return int(
            kept_by_tower(run.model, images, checkpoints=run.args.gradient_checkpointing) / numbers * most * each
        )


def kept_by_tower(model: Any, images: dict[str, Tensor], *, checkpoints: bool) -> int:
    """Return the bytes that autograd saves while a model makes features of images.

    Args:
        checkpoints: layers of towers keep their inputs alone, and all of one of them while it runs again.
    """
    backbone = facts.backbones(model)[0]
    decoder = set(facts.backbones(model)[-1].modules())
    layers = [
        each for each in backbone.modules() if isinstance(each, GradientCheckpointingLayer) and each not in decoder
    ]
    weights = {storage_of(tensor) for tensor in (*model.parameters(), *model.buffers(), *images.values())}
    saved: list[torch.UntypedStorage]
    kept, inputs = [0], [0]

    def size() -> int:
        return sum(storage.nbytes() for storage in saved)

    def counted(function: Callable[..., Any], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        before = size()
        out = function(hidden, *args, **kwargs)
        kept.append(size() - before)
        inputs.append(hidden.nbytes)
        return out

    with (
        isolated_run(model, training=True),
        layer_functions(layers, [partial(counted)] * len(layers)),
        storages_saved(backbone, weights) as saved,
    ):
        backbone.get_image_features(**images, return_dict=True)
        return size() - sum(kept) + (sum(inputs) + max(kept) if checkpoints else sum(kept))
