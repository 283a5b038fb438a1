"""The option `vision_rows`: batches of images and text as rows without padding, and rows across the data set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from fastpack_trl.features.feature import Met
from fastpack_trl.packing.batching import has_images
from fastpack_trl.run import Run

FEATURE = "vision_rows"
_CHECKED = "the packing check runs text only"


def concerns(run: Run) -> bool:
    """Return whether the data set has images, or the user asks for it."""
    return has_images(run.trainer) or run.settings.is_explicit(FEATURE)


def why_not(run: Run) -> Iterator[object]:
    """Yield why TRL's padded batches stay: the plan of the batches has asked `switched_off` and the family."""
    if not has_images(run.trainer):
        yield Met("the data set has no images")
    yield not run.packs and run.plan.reason


def switched_off(run: Run) -> str:
    """Return why the plan of the batches keeps images padded, or ``""``."""
    return "vision_rows='off'" if has_images(run.trainer) and run.settings.vision_rows == "off" else ""


@contextmanager
def install(run: Run) -> Iterator[None]:
    """Report the rows, which the collator of the trainer makes."""
    run.set_status(FEATURE, "on", "one row per batch", _CHECKED)
    yield
