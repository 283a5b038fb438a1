"""The option `save_report`: the report of a run in two places: a file next to the checkpoints, and the model card."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from fastpack_trl._version import REPOSITORY, __version__
from fastpack_trl.callbacks.throughput import MeasuredRate
from fastpack_trl.measure.record import finite, write_whole
from fastpack_trl.model.changes import callbacks_added
from fastpack_trl.run import Run

logger = logging.getLogger(__name__)

FILE = "fastpack_report.json"
_CHANGING = ("frozen_base",)
"""Features that change the computation; each has a line only if it is on."""
_CARD = "README.md"
_TITLE = "### fastpack-trl"


class _Saves(TrainerCallback):
    def __init__(self, run: Run) -> None:
        self._run = run

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and args.should_save:
            _write(self._run, Path(args.output_dir), state.global_step)

    on_train_end = on_save


def concerns(run: Run) -> bool:
    """Return whether the run saves its report."""
    return run.settings.save_report != "off"


@contextmanager
def install(run: Run) -> Iterator[None]:
    """Save the report of a run while it trains: with each checkpoint, and at its end."""
    rate = run.rate = MeasuredRate()  # kept after training, for the model card
    with callbacks_added(run.trainer, rate, _Saves(run)):
        yield


def _figures(run: Run, step: int) -> dict[str, Any]:
    rate, proof = run.rate, run.proof
    return {
        "fastpack_trl": __version__,
        "step": step,
        "tokens_per_second": rate.per_second if rate is not None else None,
        "proof": None if proof is None else proof.to_dict(),
        **run.report.to_dict(),
    }


def _write(run: Run, folder: Path, step: int) -> None:
    text = json.dumps(finite(_figures(run, step)), indent=2, default=str) + "\n"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / FILE, text)
    except OSError as error:  # e.g. a full disk: the run must not end for its report
        logger.warning(f"{FILE} was not written: {error.strerror or error}; save_report='off' leaves it out")


def add_to_card(run: Run) -> None:
    """Add a section to the model card that TRL has just written, unless the report is not saved.

    It lists the version, the enabled features, the measured tokens per second, and the packing check.
    """
    card = Path(run.args.output_dir) / _CARD
    if not concerns(run) or not run.trainer.is_world_process_zero() or not card.is_file():
        return
    text = card.read_text(encoding="utf-8")
    if _TITLE in text:
        return
    before, heading, after = text.partition("## Citations")
    write_whole(card, f"{before.rstrip()}\n\n{_section(run)}\n\n{heading}{after}".rstrip() + "\n")


def _section(run: Run) -> str:
    on = ", ".join(f"`{line.feature}` ({line.path})" for line in run.report if line.status == "on")
    rate, proof = run.rate, run.proof
    name = "fastpack-trl" if "/OWNER/" in REPOSITORY else f"[fastpack-trl]({REPOSITORY})"
    lines = [f"Trained with {name} {__version__}: {on or 'all features off'}.", ""]
    lines += [f"- The computation differs from TRL's: {line}." for line in run.report if line.feature in _CHANGING]
    if rate is not None and rate.per_second:
        lines.append(f"- Speed: {rate.per_second:,.0f} tokens/s, between logs, of all processes.")
    if proof is not None:
        lines.append(f"- Packing: {proof}.")
    return "\n".join([_TITLE, "", *lines]).rstrip()
