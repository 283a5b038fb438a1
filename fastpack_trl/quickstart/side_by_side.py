"""The same steps with `trl.SFTTrainer` and with `FastSFTTrainer`, in one process: speed and every step's loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback

FLOAT32_EPS = 2.0**-23
# Both sides compute the same sums in float32, in another order: the losses of a step differ by a few units in the last
# place, and the optimizer carries such differences on. 64 units (6e-5 at a loss of 8) leave room for that; documents
# that see their neighbours move the loss of a single step by a hundred times as much.
ROUNDING_UNITS = 64


class StepRecorder(TrainerCallback):
    """Loss, tokens and seconds of every step, from what the trainer itself logs (``logging_steps=1``)."""

    def __init__(self, bar: Any = None) -> None:
        self.bar = bar
        self.losses: list[float] = []
        self.tokens: list[int] = []
        self.seconds: list[float] = []
        self._total_tokens = 0
        self._last = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start the clock of the first step."""
        self._last = perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """From the end of one step to the end of the next: fetching, collating and logging are part of it."""
        now = perf_counter()
        self.seconds.append(now - self._last)
        self._last = now
        if self.bar is not None:
            self.bar.update(1)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """`num_tokens` counts all tokens so far; a packed row has no padding, so each is a real one."""
        if logs and "loss" in logs:
            self.losses.append(float(logs["loss"]))
            total = int(logs["num_tokens"])
            self.tokens.append(total - self._total_tokens)
            self._total_tokens = total


@dataclass(frozen=True, slots=True)
class SideRun:
    """One short run of one side; the lists have one entry per step."""

    side: str
    losses: tuple[float, ...]
    tokens: tuple[int, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs of both sides over the same rows, from the same weights and seed."""

    runs: tuple[SideRun, ...]
    warmup: int
    """Steps at the start of each run that are not timed; their losses are compared."""

    @property
    def _reference(self) -> tuple[float, ...]:
        return next(run for run in self.runs if run.side == "stock").losses

    @property
    def bound(self) -> float:
        """Largest difference of a step's losses that counts as rounding."""
        return ROUNDING_UNITS * FLOAT32_EPS * max(1.0, *self._reference)

    def rates(self, side: str) -> list[float]:
        """Non-padding tokens per second of every timed step of `side`."""
        return [
            tokens / seconds
            for run in self.runs
            if run.side == side
            for tokens, seconds in zip(run.tokens[self.warmup :], run.seconds[self.warmup :], strict=True)
        ]

    def rate(self, side: str) -> float:
        """Median over the timed steps of `side`: non-padding tokens per second."""
        return median(self.rates(side))

    def spread(self, side: str) -> tuple[float, float]:
        """What the middle half of the timed steps lies between; wide where other work shares the machine."""
        rates = self.rates(side)
        low, _, high = quantiles(rates, n=4, method="inclusive") if len(rates) > 1 else (rates[0],) * 3
        return low, high

    @property
    def ratio(self) -> float:
        """Tokens per second, ours / stock."""
        return self.rate("fastpack") / self.rate("stock")

    @property
    def loss_difference(self) -> float:
        """Largest absolute difference between any run's loss and the first stock run's, step by step.

        Infinite where a loss is NaN or infinite, so that it is within no bound.
        """
        reference = self._reference
        differences = [abs(a - b) for run in self.runs for a, b in zip(run.losses, reference, strict=True)]
        return max(difference if math.isfinite(difference) else math.inf for difference in differences)

    @property
    def within_rounding(self) -> bool:
        """Whether the losses are the same within rounding."""
        return self.loss_difference <= self.bound < math.inf

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "tokens": "non-padding tokens of a step / seconds from the end of the step before to its end; median",
            "warmup_steps": self.warmup,
            "stock_tokens_per_s": self.rate("stock"),
            "fastpack_tokens_per_s": self.rate("fastpack"),
            "stock_middle_half": self.spread("stock"),
            "fastpack_middle_half": self.spread("fastpack"),
            "ratio": self.ratio,
            "max_loss_difference": self.loss_difference,
            "loss_difference_bound": self.bound,
            "runs": [
                {"side": run.side, "losses": run.losses, "tokens": run.tokens, "seconds": run.seconds}
                for run in self.runs
            ],
        }


def compare_with_stock(
    model: Path, rows: Any, settings: Mapping[str, Any], *, work_folder: Path, steps: int, warmup: int, pairs: int
) -> Comparison:
    """Alternate short runs of both sides, the order swapped from pair to pair so that a drift of the machine cancels.

    Args:
        model: folder with the weights and the tokenizer that every run starts from.
        rows: a data set that a trainer has already packed; it is used as it is.
        settings: arguments of both configurations (`SFTConfig` and `FastSFTConfig`).
        work_folder: ``output_dir`` of the runs, where nothing is saved.
        steps: timed steps per run, after `warmup` steps.
    """
    from tqdm.auto import tqdm
    from trl import SFTConfig, SFTTrainer

    from fastpack_trl.config import FastSFTConfig
    from fastpack_trl.trainer import FastSFTTrainer

    sides = {"stock": (SFTTrainer, SFTConfig), "fastpack": (FastSFTTrainer, FastSFTConfig)}
    order = [side for pair in range(pairs) for side in (sides if pair % 2 == 0 else reversed(sides))]
    runs = []
    with tqdm(total=len(order) * (warmup + steps), desc="Comparing", unit="step", dynamic_ncols=True) as bar:
        for side in order:
            bar.set_postfix_str(side)
            trainer_class, config_class = sides[side]
            recorder = StepRecorder(bar)
            config = config_class(
                **settings,
                output_dir=str(work_folder),
                max_steps=warmup + steps,
                logging_steps=1,
                disable_tqdm=True,  # one bar for all runs
                dataset_kwargs={"skip_prepare_dataset": True},
            )
            trainer = trainer_class(model=str(model), args=config, train_dataset=rows, callbacks=[recorder])
            trainer.remove_callback(PrinterCallback)  # takes the bar's place under `disable_tqdm`; a line per step
            trainer.train()
            run = SideRun(side, tuple(recorder.losses), tuple(recorder.tokens), tuple(recorder.seconds))
            runs.append(run)
    return Comparison(tuple(runs), warmup)
