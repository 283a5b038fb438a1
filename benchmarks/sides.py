"""The runs of each side of a row: their times, memory and losses, and whether their speeds may be compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from statistics import fmean, median, quantiles

from benchmarks.cases import OURS, README_ROWS, Case
from benchmarks.records import REFERENCE, Run

COMPARED = 24
"""Steps whose losses are compared: later on, two runs of one side in bf16 drift apart as well."""
CEILING = 2e-3
"""Largest difference of losses that TRL's compiled layers excuse; they were seen 1.1e-3 to 5.3e-3 apart from TRL."""
ALL_WEIGHTS = 5e-3
"""Largest difference of a loss if all weights of images and text train: TRL's own rounds were 3.8e-3 apart."""
FARTHER = 2.0
"""How many times as far as TRL's losses in bf16 ours may be from those in float32, if a row has `REFERENCE`."""
FARTHEST = 2e-2
"""Largest distance of TRL's losses in bf16 from those in float32: beyond it these are of another training."""
LEAKS = "gpt-oss"
"""Model whose packed documents see each other under TRL, so its losses differ."""
OTHER_BATCHES = "fastpack image rows"
"""Side whose steps hold other documents than those of TRL, so that losses of one step cannot be compared."""


@dataclass(frozen=True, slots=True)
class Side:
    """All runs of one side of a row."""

    runs: Sequence[Run]

    @property
    def rounds(self) -> list[Side]:
        return [Side([run]) for run in self.runs]

    @property
    def seconds(self) -> list[float]:
        return [second for run in self.runs for second in run["seconds"]]

    @property
    def step(self) -> float:
        return median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and last quartile of three times or more."""
        low, _, high = quantiles(self.seconds, n=4)
        return low, high

    @property
    def is_steady(self) -> bool:
        return len(self.seconds) < 3 or self.quartiles[1] <= 3 * self.quartiles[0]

    @property
    def tokens(self) -> float | None:
        """Tokens of a step, without padding."""
        counts = [run["tokens"] / run["steps"] for run in self.runs if run.get("tokens")]
        return fmean(counts) if counts else None

    @property
    def whole(self) -> float:
        """Estimated seconds per step of a whole run: the measured steps as they were, and the timed ones for the rest.

        The rest takes their mean on a side of ours, the median on others: what is recorded or compiled for new lengths
        slows down some timed steps and fewer later ones, which must not count for us.
        """
        steps, first = self.runs[0].get("run"), [run.get("warmup", {}) for run in self.runs]
        if not steps or any("seconds" not in each for each in first):
            return fmean(self.seconds)
        timed = [(fmean(run["seconds"]), run["steps"]) for run in self.runs]
        later = fmean(self.seconds) if self.runs[0]["side"].startswith(OURS) else self.step
        return fmean(
            (each["seconds"] + mean * count + (steps - each["steps"] - count) * later) / steps
            for each, (mean, count) in zip(first, timed, strict=True)
        )

    @property
    def peak(self) -> float | None:
        return max((run["peak_gib"] for run in self.runs if run.get("peak_gib")), default=None)

    def times(self, other: Side, whole: bool = False) -> float:
        """Return how many times as fast as `other` this side is; per token of the timed steps if both count them."""
        share = self.tokens / other.tokens if self.tokens and other.tokens else 1.0
        return (other.whole / self.whole if whole else other.step / self.step) * share

    def apart(self, other: Side, last: int = COMPARED) -> float | None:
        """Return the largest relative difference of a loss of the same step up to `last`, in any round; inf with a NaN.

        It counts from the nearest of the other's rounds; if `other` is this side, from its first round. None if none
        was logged by both, or steps hold other documents. For preference trainers of a gradient norm.
        """
        if OTHER_BATCHES in (self.runs[0]["side"], other.runs[0]["side"]):
            return None
        name = "grad_norms" if self.runs[0]["case"] == "preference" else "losses"
        rounds = [run.get(name) or {} for run in other.runs[: 1 if other is self else None]]
        found = list[float]()
        for run in self.runs:
            for step, loss in (run.get(name) or {}).items():
                theirs = [losses[step] for losses in rounds if step in losses and int(step) <= last]
                apart = [abs(loss - one) / max(abs(one), 1e-2) for one in theirs]
                found += [min(one if isfinite(one) else inf for one in apart)] if apart else []
        return max(found, default=None)


def sides_of(records: Iterable[Run]) -> dict[str, dict[str, Side]]:
    """Return the sides of each row: rows of the README first, others and sides in the order of the records."""
    found: dict[str, dict[str, list[Run]]] = {}
    for run in records:
        if run.get("seconds") or run.get("largest") == 0:
            found.setdefault(run["row"], {}).setdefault(run["side"], []).append(run)
    rows = dict.fromkeys([row for row in README_ROWS if row in found] + [*found])
    return {row: {side: Side(runs) for side, runs in found[row].items()} for row in rows}


def comparable(sides: Mapping[str, Side], case: Case) -> set[str]:
    """Return the sides of a row whose speeds may be compared.

    TRL's own sides always qualify; ours if their losses are within the budget (`ALL_WEIGHTS` of images), or nearer to
    TRL's than those of TRL's compiled layers (`CEILING` at most), or if documents of the model leak in TRL. In a row
    with losses in float32 these alone decide: ours must be within the budget of them, or `FARTHER` times as far as TRL.
    """
    gate, compiled = sides.get(next(iter(case.over), "")), sides.get("trl compiled")
    if gate is None:
        return {*sides}
    row = gate.runs[0]["row"]
    budget = ALL_WEIGHTS if row.startswith("images") and " full " in row else case.budget
    budget = max(budget, min(CEILING, (compiled and compiled.apart(gate)) or 0.0))
    exact = exact_of(sides, gate, case)
    if exact:
        budget = max(case.budget, FARTHER * (gate.apart(exact) or 0.0))
    return {
        name
        for name, side in sides.items()
        if name.startswith("trl") or LEAKS in row or _distance(side, exact or gate, exact is not None) <= budget
    } - {REFERENCE}


def _distance(side: Side, other: Side, needed: bool) -> float:
    """Return how far losses are apart; without common steps 0, or inf if a loss is `needed`."""
    apart = side.apart(other)
    without = inf if needed and side.runs[0]["side"] != OTHER_BATCHES else 0.0
    return without if apart is None else apart


def exact_of(sides: Mapping[str, Side], gate: Side, case: Case) -> Side | None:
    """Return the losses in float32 if they are of the same training as TRL's in bf16.

    That is: code, versions and seed are the same, the losses before the first update are within the budget, and later
    ones within `FARTHEST`.
    """
    exact = sides.get(REFERENCE)
    if exact is None:
        return None
    run, other = exact.runs[0], gate.runs[0]
    same = all(run.get(name) == other.get(name) for name in ("tree", "versions", "seed"))
    first, apart = gate.apart(exact, last=1), gate.apart(exact)
    return exact if same and first is not None and first <= case.budget and (apart or 0.0) <= FARTHEST else None


def gpu_of(side: Side) -> str:
    """Return the name of a GPU in a sentence: ``H100``."""
    return str(side.runs[0]["machine"]["gpu"]).removeprefix("NVIDIA ").partition(" ")[0]
