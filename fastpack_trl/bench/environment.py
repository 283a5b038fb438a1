"""The process while it measures: its number of threads, and nothing printed beside the one progress bar."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

import datasets
import torch


@contextlib.contextmanager
def limited_threads(count: int) -> Iterator[None]:
    """Run inside with `count` intra-op threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Show no bar per mapped data set, and no advice about flash attention for the side that is measured without it."""
    bars, level = datasets.are_progress_bars_disabled(), logging.root.manager.disable
    datasets.disable_progress_bars()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # TRL's own defaults use deprecated names
            yield
    finally:
        logging.disable(level)
        if not bars:
            datasets.enable_progress_bars()


@contextlib.contextmanager
def one_bar() -> Iterator[None]:
    """Show no banner, log or bar of the sides beside the bar over all of them."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with quiet(), contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        if shown:
            logging.enable_progress_bar()
