"""The idle rule: graphs are recorded if the device waits for the host, and if recording is paid back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean

from fastpack_trl.capture.device import CudaGraphs, IdleWatch
from fastpack_trl.packing.buckets import Bucket, Buckets
from fastpack_trl.run import Run

FEATURE = "cuda_graph"
EAGER_STEPS = 2
"""Optimizer steps before anything is recorded: in the first, micro-batches run unmerged; in the second the optimizer
has its states, and merged rows have their length."""
LEAST_IDLE = 0.1
"""Share of these steps for which the device has to be idle. In 22 comparisons graphs saved 14 % of a step or more in
all but eight, which lay between -4 and 3 %: the device was idle for 75 % of a step at 0.6B, and for 2 % at 8B."""
CLEAR = {2: (0.0, 0.6), 3: (0.05, 0.3), 12: (1.0, 0.0)}
"""Watched steps, from the second on, and when they are clear: the device was idle for at most the first share of each,
or for at least the second of each. Two are if it mostly waits: each step that a graph comes sooner saves that share."""
RECORD_SECONDS = 0.15
"""Assumed cost of recording a bucket besides the time of a step: in all 0.1 to 0.2 s at 0.6B on an H200, 0.5 at 8B."""


class IdleRule:
    """Watches the device in a few settled steps, from the first forward pass until the backward passes are launched.

    Args:
        run: whose trainer trains.
        device: is watched.
        buckets: of the rows so far.
        pays: graphs are recorded at once, as with ``cuda_graph="on"``.
        share: of the layers of a step that graphs replay: the host goes on launching those of towers.

    Attributes:
        pays: graphs are recorded.
        note: the observation.
        declined: buckets whose rows run eagerly: recording them would not be paid back.
    """

    def __init__(self, run: Run, device: CudaGraphs, buckets: Buckets, *, pays: bool, share: float = 1.0) -> None:
        self._share, self._run, self._device, self._buckets = share, run, device, buckets
        self._saving: float | None = None  # seconds per step; None: nothing is weighed
        self._seconds = list[float]()  # of each recording, at first as assumed
        self.declined = set[Bucket]()
        self._first_step: int | None = None
        self._present_step = -1
        self._watch: IdleWatch | None = None
        self._watched: list[tuple[float, float]] = []
        self.pays = pays
        self.note = ""

    @property
    def steps_done(self) -> int:
        """Number of optimizer steps of this run."""
        done = self._run.trainer.state.global_step
        if self._first_step is None:
            self._first_step = done  # not 0 if a run was resumed
        return done - self._first_step

    @property
    def is_settled(self) -> bool:
        """The first steps are over, and so is what they decide."""
        return self.steps_done >= EAGER_STEPS and self._run.is_warmed_up

    def begins_step(self) -> bool:
        """Return whether this is the first forward pass of an optimizer step, which is watched from there on."""
        step = self._run.trainer.state.global_step
        if step == self._present_step:
            return False
        self._present_step = step
        due = self.steps_done >= EAGER_STEPS - 1 and self._run.is_warmed_up
        if due and not self.pays and self._watch is None:
            self._watch = self._device.watch_idle()
        return True

    def end_step(self) -> str:
        """Decide once enough steps are known; return the reason if graphs do not pay."""
        if self._watch is None:
            return ""
        self._watched.append(self._watch.stop())
        self._watch = None
        return self._weigh() if len(self._watched) in CLEAR else ""

    def _weigh(self) -> str:
        """Decide by the lower quartile of the steps: whatever interrupts the host only adds to the idle time of some.

        In two runs of one training the mean of three steps was 3% and 23%.
        """
        shares, count = sorted(share for share, _ in self._watched), len(self._watched)
        most, least = CLEAR[count]
        if shares[-1] > most and shares[0] < least:
            return ""
        idle, each = shares[count // 4], sorted(seconds for _, seconds in self._watched)[count // 4]
        self.note = f"the device was idle for {idle:.0%} of {count} eager steps ({shares[0]:.0%} to {shares[-1]:.0%})"
        steps_left = self._run.steps_left()
        if idle < LEAST_IDLE:
            return f"{self.note}: graphs pay off from {LEAST_IDLE:.0%} on"
        cost, saved, sizes = RECORD_SECONDS + each, self._share * idle * each, len(self._buckets.made)
        if max(1, sizes) * cost >= saved * steps_left:
            rows = f"{sizes} sizes of rows" if sizes > 1 else "a row"
            return f"{steps_left} steps of {each * 1e3:.0f} ms are left: recording {rows} would not be paid back"
        self.pays, self._saving, self._seconds = True, saved, [cost]
        return ""

    def pays_for(self, bucket: Bucket, recordings: int = 1) -> bool:
        """Return whether the rows that a bucket is expected to get pay for so many recordings."""
        if self._saving is None:
            return True
        saving = self._saving * self._buckets.share(bucket)
        pays = recordings * fmean(self._seconds) < saving * self._run.steps_left()
        (self.declined.discard if pays else self.declined.add)(bucket)
        return pays

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time inside as that of a recording."""
        start = time.perf_counter()
        yield
        self._seconds.append(time.perf_counter() - start)

    def close(self) -> None:
        """Stop watching a step that was interrupted."""
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
