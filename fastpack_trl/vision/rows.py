"""Rows of images and text: TRL's padded batch becomes one row without padding, in the loader's worker."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn

from fastpack_trl.model.facts import masks_by_kind, text_model
from fastpack_trl.model.upstream import DataCollatorForVisionLanguageModeling
from fastpack_trl.packing import batching
from fastpack_trl.packing.blocks import Blocks
from fastpack_trl.packing.packed_batch import IGNORE_INDEX, PackedBatch, Part, TensorVersion
from fastpack_trl.packing.packed_inputs import PackedInputs, PaddedInputs
from fastpack_trl.vision.lengths import keep_on_host

logger = logging.getLogger(__name__)

FAMILIES = frozenset(
    "gemma3 idefics3 internvl llava mistral3 qwen2_5_vl qwen3_5 qwen3_vl smolvlm".split()  # noqa: SIM905
)
"""Model types whose rows were compared with padded batches. Others have masks, states or positions of their own."""
SEES_BLOCKS = ("per_document", "varlen")
"""Attention paths on which the tokens of an image attend to each other (`PackedBatch.blocks`)."""
OF_TOKENS = frozenset({"input_ids", "labels", "attention_mask", "mm_token_type_ids", "token_type_ids"})
"""Keys of a batch with a value per token."""
PIXELS, GRIDS, SIZES = "pixel_values", "image_grid_thw", "image_sizes"
OF_IMAGES = frozenset({PIXELS, "pixel_attention_mask", SIZES, GRIDS})
"""Keys of a batch that belong to its images, in the order of the documents; they stay as the processor made them."""
SPARE = "fastpack_spare"
"""Key of a row for its second version."""
MISMATCH = "Image features and image tokens do not match"
"""Of transformers' models, if an image and its placeholders differ."""
_TRIED = 16
ROW = "fastpack_row"
"""Key of an example for its place in the data set."""


def is_vision_collator(collator: object) -> bool:
    """Return whether a collator is exactly TRL's own for images."""
    return type(collator) is DataCollatorForVisionLanguageModeling


def plan_batches(trainer: Any, path: str, flattens: bool, unproven: str = "") -> batching.BatchPlan:
    """Return the batches of an SFT run, as `packing.batching.plan_batches`, also for data with images."""
    if not batching.has_images(trainer):
        return batching.plan_batches(trainer, path, flattens, unproven)
    return batching.plan_padded(trainer, path, flattens, chain([unproven], _why_padded(trainer, path)))


def _why_padded(trainer: Any, path: str) -> Iterator[object]:
    family, collator = str(text_model(trainer.model).config.model_type), trainer.data_collator
    yield family not in FAMILIES and f"images of {family}: its rows were not compared with padded batches"
    yield not is_vision_collator(collator) and f"custom data collator {type(collator).__name__}"
    causal = masks_by_kind(trainer.model) and path not in SEES_BLOCKS
    yield causal and f"{path} makes the tokens of an image causal, which {family} lets attend to each other"


def rope_index(model: nn.Module) -> Any:
    """Return an object that computes positions of several sections as the model does; None if it has none.

    It is an empty module of the model's class with its config, which travels to the workers of a loader.
    """
    inner: Any = text_model(model).base_model
    if not hasattr(inner, "get_rope_index"):
        return None
    empty: Any = object.__new__(type(inner))
    nn.Module.__init__(empty)
    empty.config = inner.config
    return empty


class ImageRows:
    """Join the documents of a batch of TRL's collator for images into one row.

    ``attention_mask=[[1, 1, 1], [1, 1, 0]]`` -> a row of five tokens with the documents (3, 2). Keys with a value per
    token are gathered by the mask, positions are those of the model per document, and pixels stay as they are. A batch
    that a row cannot equal stays padded: a `PaddedInputs`, with a warning that names the reason.

    Args:
        stock: TRL's collator, which pads on the right.
        model: for its positions of several sections, and its blocks of tokens that attend to each other.
        spare: an example with an image, which a row without images has in a second version, at `SPARE`, as a document
            that no loss counts; for ranks that wait for each other in a sharded tower.
    """

    def __init__(self, stock: Any, model: nn.Module, spare: dict[str, Any] | None = None) -> None:
        self.stock, self.positions, self.sees_blocks = stock, rope_index(model), masks_by_kind(model)
        self.spare = spare
        self._told = set[str]()

    def __call__(self, examples: Sequence[Any]) -> dict[str, Any]:
        samples = list(chain.from_iterable(each if isinstance(each, list) else [each] for each in examples))
        batch = dict(collated(self.stock, samples))
        mask = batch["attention_mask"]
        unknown = ", ".join(sorted(batch.keys() - OF_TOKENS - OF_IMAGES))
        why = f"unknown keys of the processor: {unknown}" if unknown else ""
        why = why or ("padding on the left" if (mask.diff(dim=1) > 0).any() else "")
        if why:
            if why not in self._told:
                logger.warning(f"vision_rows: a batch stays padded ({why})")
                self._told.add(why)
            return PaddedInputs(batch)
        row = self._row(batch, mask.bool())
        if self.spare is not None and PIXELS not in batch:
            batch = dict(self.stock([{**each} for each in (*samples, self.spare)]))
            batch["labels"][-1] = IGNORE_INDEX
            row[SPARE] = more = self._row(batch, batch["attention_mask"].bool())
            own, whole = row["packed_batch"], more["packed_batch"]
            part = Part(whole.total_tokens, own.total_tokens, len(own.loss_positions))
            more["packed_batch"] = replace(whole, parts=(part,))
        return row

    def _row(self, batch: dict[str, Any], keep: Tensor) -> PackedInputs:
        batch["labels"][:, 0] = IGNORE_INDEX  # nothing precedes a document's first token
        row = {name: value[keep][None] if name in OF_TOKENS else value for name, value in batch.items()}
        del row["attention_mask"]
        lengths = keep.sum(1).numpy()
        packed = PackedBatch.from_lengths(lengths[lengths > 0], labels=row["labels"])
        if self.sees_blocks and (kinds := row.pop("token_type_ids", None)) is not None:
            packed = replace(packed, blocks=Blocks.of(kinds[0].numpy() == 1, lengths[lengths > 0]))
        row["position_ids"] = packed.position_ids
        if self.positions is not None and GRIDS in batch:
            with naming_limit(self.stock.max_length):
                sections = self._sections(batch)
            # (4, 1, tokens): the first section tells the documents, the others are per document already.
            row["position_ids"] = torch.cat([packed.position_ids[None], sections[:, keep][:, None]])
            packed = replace(packed, positions=TensorVersion.of(row["position_ids"]))
        return ImageInputs(row | {"packed_batch": packed})

    def _sections(self, batch: dict[str, Any]) -> Tensor:
        """Return the positions of a padded batch, (3, documents, width)."""
        accepted = inspect.signature(self.positions.get_rope_index).parameters
        try:
            found = self.positions.get_rope_index(**{name: batch[name] for name in accepted if name in batch})
        except (RuntimeError, StopIteration) as error:
            raise ValueError(f"{MISMATCH}: {error}") from error
        sections: Tensor = found[0]
        return sections


@contextmanager
def naming_limit(max_length: int | None) -> Iterator[None]:
    """Name the limit if it cuts placeholders of images, as TRL's loss does."""
    try:
        yield
    except ValueError as error:
        if max_length is None or MISMATCH not in str(error):
            raise
        why = (
            f"The current `max_length` ({max_length}) is too short and causes image placeholder tokens to be truncated"
        )
        raise ValueError(f"{why}: raise it, or set it to `None`.") from error


def smallest_with_image(examples: Iterable[dict[str, Any]], stock: Any) -> dict[str, Any] | None:
    """Return the example of the fewest tokens among the first ones with an image; None if none has one."""
    count = replace(stock, max_length=None)
    shown = (example for example in examples if example.get("images") or example.get("image"))
    return min(islice(shown, _TRIED), key=lambda each: collated(count, [each])["attention_mask"].sum(), default=None)


def in_step(batches: list[Any], any_rank: Callable[[list[float]], list[float]]) -> list[Any]:
    """Return micro-batches in which each rank runs the tower if any does: its sharded layers are collectives.

    Args:
        any_rank: returns the largest number of all ranks at each place.
    """
    own = [float(PIXELS in batch) for batch in batches]
    spares = [batch.pop(SPARE, batch) for batch in batches]
    return [one if is_idle else batch for batch, one, is_idle in zip(batches, spares, any_rank(own), strict=True)]


class ImageInputs(PackedInputs):
    """The keywords of a row with images: sizes of images and places of their features are found on the host."""

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> PackedInputs:
        moved = super().to(device, non_blocking)
        for name in {GRIDS, "input_ids"} & moved.keys():
            keep_on_host(moved[name], self[name])
        if SIZES in moved:  # a tower reads one after the other
            moved[SIZES] = self[SIZES]
        return moved


def collated(stock: Any, examples: list[dict[str, Any]]) -> Any:
    """Return the batch of TRL's collator; an error names the example that causes it."""
    plain = [{name: value for name, value in example.items() if name != ROW} for example in examples]
    try:
        return stock([dict(example) for example in plain])  # the collator changes them
    except Exception as error:
        for named, example in zip(examples, plain, strict=True):
            try:
                stock([example])
            except Exception:  # noqa: BLE001 - of the processor, whatever it is
                if ROW in named:
                    error.add_note(f"in row {named[ROW]} of the data set")
                break
        raise
