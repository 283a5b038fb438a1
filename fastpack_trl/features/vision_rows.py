"""The option `vision_rows`: batches of images and text as rows without padding, and rows across the data set."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from accelerate.logging import get_logger
from datasets import Dataset

from fastpack_trl.features.feature import Met
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.packing.batching import has_images
from fastpack_trl.run import Run
from fastpack_trl.vision.packing import BY_PLACE, LIMIT, PackedRows, pack_samples
from fastpack_trl.vision.placeholders import placeholders_on_host

logger = get_logger(__name__)

FEATURE = "vision_rows"
_CHECKED = "packing is checked on text only"


def concerns(run: Run) -> bool:
    """Return whether the data set has images, or the user asks for rows of them."""
    return has_images(run.trainer) or run.settings.is_explicit(FEATURE) or run.settings.image_row_tokens is not None


def why_not(run: Run) -> Iterator[object]:
    """Yield why TRL's padded batches stay: the plan of the batches has asked `switched_off` and the family."""
    why, tokens = "" if run.packs else run.plan.reason, run.settings.image_row_tokens
    if not has_images(run.trainer):
        run.report.asked |= set() if tokens is None else {FEATURE}
        yield Met("the data set has no images" + f": image_row_tokens={tokens} has no effect" * (tokens is not None))
    if run.training and tokens is not None and (why := why or _why_unpacked(run)):
        raise ValueError(f"image_row_tokens={tokens}: {why}; leave image_row_tokens out")
    yield why


def switched_off(run: Run) -> str:
    """Return why the plan of the batches keeps images padded, or ``""``."""
    return "vision_rows='off'" if has_images(run.trainer) and run.settings.vision_rows == "off" else ""


def _why_unpacked(run: Run) -> str:
    if not isinstance(run.trainer.train_dataset, Dataset):
        return "a streamed data set has no length"
    strategy = str(run.args.train_sampling_strategy)
    return "" if strategy in BY_PLACE else f"train_sampling_strategy={strategy!r} reads single samples"


@contextmanager
def install(run: Run) -> Iterator[None]:
    """Pack samples if the user asks for it; the collator of the trainer joins those of a batch."""
    with placeholders_on_host(run.model), _packing(run):
        yield


@contextmanager
def _packing(run: Run) -> Iterator[None]:
    if run.settings.image_row_tokens is None or not run.training:
        run.set_status(FEATURE, "on", "one row per batch", _CHECKED)
        yield
        return
    started = time.perf_counter()
    packed = _packed(run, run.settings.image_row_tokens)
    run.report.facts["image rows"] = f"{packed}; counted in {time.perf_counter() - started:.1f} s"
    if packed.left_out:
        logger.warning(f"{FEATURE}: {packed}")
    by = " (max_length)" * (packed.limit < run.settings.image_row_tokens)
    run.set_status(FEATURE, "on", f"rows of up to {packed.limit:,} tokens{by}", _CHECKED)
    with patch_attribute(run, "image_rows", packed):
        yield


def _packed(run: Run, tokens: int) -> PackedRows:
    trainer, (limit, name) = run.trainer, min((tokens, LIMIT), (run.max_length or tokens, "max_length"))
    with trainer.accelerator.main_process_first():  # the others find its counts in the cache
        return pack_samples(trainer.train_dataset, trainer.data_collator, limit, run.args.dataset_num_proc, name)
