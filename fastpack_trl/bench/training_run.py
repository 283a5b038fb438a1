"""`TrainingRun(row, side, launcher)`: one training of a comparison, in processes of its own.

A row says what is trained, a side how, a launcher where. In ``benchmarks/mine.py``:

```python
def measure_side(row, side, *, seed):  # in the run's own process
    watch = RunWatch(warmup=6, timed=12)
    trainer = make_trainer(row["row"], side, seed, callbacks=[watch])  # max_steps=LONG_RUN: the watch ends it
    trainer.train()
    return watch.figures(trainer)


launcher = OwnProcess("benchmarks.mine:measure_side", options={"seed": 0}, timeout=400)
runs = in_turn([{"row": "qwen3-8b", "tokens": 4096}], ("stock", "fastpack"), rounds=2, launcher=launcher)
record = run_rows(runs, case="mine", settings={"warmup": 6}, file=ResultFile(path), device="cuda", threads=8, seed=0)
```

``record["rows"]`` has an entry per run, ``{"row", "tokens", "round", "side", "setting", **figures}``. `run_rows` writes
the file after each of them, and the same call goes on with it: a run that it has is not run again. This module imports
neither torch nor transformers: another interpreter may have to import something before them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastpack_trl.bench.process import OwnProcess, accelerate_launch, torchrun
from fastpack_trl.measure.rounds import turn_order

__all__ = ["Launcher", "OwnProcess", "TrainingRun", "accelerate_launch", "in_turn", "torchrun"]

Launcher = Callable[[Mapping[str, Any], str], dict[str, Any]]
"""Given a row and a side, returns the run's figures, or ``failed`` with the reason: `OwnProcess`, or a function that
trains in this process."""


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """One run: ``TrainingRun({"row": "qwen3-8b lora 4096", "tokens": 4096, "round": 0}, "stock", launcher)``.

    Attributes:
        row: plain data for JSON: its name as ``row``, its ``tokens``, perhaps the ``round``, and what else the side
            must know and the record is to say.
    """

    row: Mapping[str, Any]
    side: str
    launcher: Launcher

    @property
    def label(self) -> dict[str, Any]:
        """Return what the entry of the run begins with; an entry of an earlier call with the same is the same run."""
        turn = f", round {self.row['round']}" if "round" in self.row else ""
        return {**self.row, "side": self.side, "setting": f"{self.row['row']}, {self.side}{turn}"}

    def measure(self, _seconds: float = math.inf, /) -> dict[str, Any]:
        """Train; return the figures, or ``failed`` with the reason.

        Raises:
            UserError: the side said that something is set wrong.
        """
        return self.launcher(self.row, self.side)


def in_turn(
    rows: Sequence[Mapping[str, Any]], sides: Sequence[str], *, rounds: int, launcher: Launcher
) -> Iterator[TrainingRun]:
    """Yield the runs row by row, the sides of a round in the order of `turn_order`."""
    for row in rows:
        for number in range(rounds):
            for side in turn_order(sides, number):
                yield TrainingRun({**row, "round": number}, side, launcher)
