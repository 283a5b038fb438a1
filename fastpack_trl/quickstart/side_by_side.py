"""The same short trainings with `trl.SFTTrainer` and with `FastSFTTrainer`, in turn: speed and every step's loss."""

from __future__ import annotations

import io
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fastpack_trl.measure.intervals import Interval, median_interval
from fastpack_trl.measure.rounds import take_turns

SIDES = ("stock", "fastpack")
FLOAT32_EPS = 2.0**-23
# Both sides compute the same sums in float32, in another order: the losses of a step differ by a few units in the last
# place, and the optimizer carries such differences on. 64 units (6e-5 at a loss of 8) leave room for that; documents
# that see their neighbours move the loss of a single step by a hundred times as much.
ROUNDING_UNITS = 64
COMPARED_STEPS = 9  # of a run; later ones have carried the differences on for too long


@dataclass(frozen=True, slots=True)
class SideRun:
    """One training of one side; the lists have one entry per step.

    Attributes:
        side: ``stock`` or ``fastpack``.
        losses: as logged, nats per token.
        rates: non-padding tokens per second.
        seconds: from the end of the step before, so that fetching, collating and logging are part of it.
    """

    side: str
    losses: tuple[float, ...]
    rates: tuple[float, ...]
    seconds: tuple[float, ...]

    @classmethod
    def of(cls, side: str, trainer: Any) -> SideRun:
        """Return what the log of a trainer with a `ThroughputCallback` and ``logging_steps=1`` says."""
        log = [entry for entry in trainer.state.log_history if "loss" in entry]
        return cls(
            side,
            tuple(float(entry["loss"]) for entry in log),
            tuple(float(entry["tokens/nonpad_per_s"]) for entry in log),
            tuple(float(entry["step_time_ms"]) / 1000 for entry in log),
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """Trainings of both sides over the same rows, from the same weights and seed.

    Attributes:
        runs: in the order in which they ran.
        warmup: steps at the start of each run that are not timed; their losses are compared.
    """

    runs: tuple[SideRun, ...]
    warmup: int

    def of(self, side: str) -> list[SideRun]:
        """Return the runs of one side."""
        return [run for run in self.runs if run.side == side]

    @property
    def _reference(self) -> tuple[float, ...]:
        return self.of("stock")[0].losses

    @property
    def bound(self) -> float:
        """Largest difference of a step's losses that counts as rounding."""
        return ROUNDING_UNITS * FLOAT32_EPS * max(1.0, *self._reference)

    def rate(self, side: str) -> Interval:
        """Return non-padding tokens per second of the timed steps: median and interval."""
        return median_interval([rate for run in self.of(side) for rate in run.rates[self.warmup :]])

    @property
    def ratio(self) -> Interval:
        """Seconds of stock / seconds of fastpack for the same step of the same round: median and interval."""
        rounds = zip(*(self.of(side) for side in SIDES), strict=True)
        steps = (zip(stock.seconds, ours.seconds, strict=True) for stock, ours in rounds)
        return median_interval([slow / fast for pairs in steps for slow, fast in list(pairs)[self.warmup :]])

    @property
    def loss_difference(self) -> float:
        """Largest absolute difference between any run's loss and the first stock run's, over its first nine steps.

        Infinite where any loss is NaN or infinite, so that it is within no bound.
        """
        if not all(math.isfinite(loss) for run in self.runs for loss in run.losses):
            return math.inf
        pairs = (zip(run.losses, self._reference, strict=True) for run in self.runs)
        return max(abs(a - b) for steps in pairs for a, b in list(steps)[:COMPARED_STEPS])

    @property
    def within_rounding(self) -> bool:
        """True if the losses are the same within rounding."""
        return self.loss_difference <= self.bound < math.inf

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        figures: dict[str, Any] = {
            "tokens": "non-padding tokens of a step / seconds from the end of the step before to its end; median, with "
            "the interval that covers it",
            "warmup_steps": self.warmup,
        }
        for name, value in {**{f"{side}_tokens_per_s": self.rate(side) for side in SIDES}, "ratio": self.ratio}.items():
            figures |= {name: value.median, f"{name}_interval": value.to_dict()}
        return figures | {
            "max_loss_difference": self.loss_difference,
            "loss_difference_bound": self.bound,
            "runs": [asdict(run) for run in self.runs],
        }


def train_side_by_side(
    model: Path, rows: Any, settings: Mapping[str, Any], *, work_folder: Path, steps: int, warmup: int, rounds: int
) -> Comparison:
    """Train with each side in turn, the order swapped from round to round so that a drift of the machine cancels.

    Args:
        model: folder with the weights and the tokenizer that every run starts from.
        rows: a data set that a trainer has already packed; it is used as it is.
        settings: arguments of both configurations (`SFTConfig` and `FastSFTConfig`).
        work_folder: ``output_dir`` of the runs, where nothing is saved.
        steps: timed steps per run, after `warmup` steps.
        rounds: runs of each side.

    Raises:
        RuntimeError: a run failed; names the side and the reason.
    """
    from tqdm.auto import tqdm
    from transformers.trainer_callback import PrinterCallback
    from trl import SFTConfig, SFTTrainer

    from fastpack_trl.callbacks import ThroughputCallback
    from fastpack_trl.config import FastSFTConfig
    from fastpack_trl.trainer import FastSFTTrainer

    classes = {"stock": (SFTTrainer, SFTConfig), "fastpack": (FastSFTTrainer, FastSFTConfig)}

    def train(side: str) -> SideRun:
        bar.set_postfix_str(side)
        trainer_class, config_class = classes[side]
        config = config_class(
            **settings,
            output_dir=str(work_folder),
            max_steps=warmup + steps,
            logging_steps=1,
            disable_tqdm=True,  # one bar for all runs
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        trainer = trainer_class(model=str(model), args=config, train_dataset=rows, callbacks=[ThroughputCallback()])
        trainer.remove_callback(PrinterCallback)  # takes the bar's place under `disable_tqdm`; a line per step
        with redirect_stdout(io.StringIO()):  # its banner: the runs before have shown it
            trainer.train()
        bar.update(1)
        return SideRun.of(side, trainer)

    with _without_note_on_mfu(), tqdm(total=len(SIDES) * rounds, desc="Comparing", unit="run") as bar:
        turns = take_turns({side: partial(train, side) for side in SIDES}, rounds=rounds, warmup=0)
    for side, reason in turns.failed.items():
        raise RuntimeError(f"the comparison cannot be made, {side} failed: {reason}")
    in_turn = {side: iter(runs) for side, runs in turns.results.items()}
    return Comparison(tuple(next(in_turn[side]) for side in turns.order), warmup)


@contextmanager
def _without_note_on_mfu() -> Iterator[None]:
    """Silence the callback's note that utilisation is left out: the quickstart runs on the CPU and shows none."""
    logger = logging.getLogger("fastpack_trl.callbacks")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
