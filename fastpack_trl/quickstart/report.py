"""Results of the quickstart: the promises it must keep, the table, the plot and the JSON."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastpack_trl.measure.intervals import Interval
    from fastpack_trl.quickstart.settings import Settings
    from fastpack_trl.quickstart.side_by_side import Comparison

PACKAGES = ("torch", "transformers", "trl", "accelerate", "peft", "datasets", "tokenizers")
LEAST_FALL = 0.10  # of the full fine-tune's loss
# Fewer steps promise no fall of a loss: the first ones warm up.
PROMISING_STEPS, PROMISING_LORA_STEPS = 20, 5
LAST = 10  # logged losses in a phase's last loss: a row packs documents of one size, so a step's loss is noisy
# The same weights, input and kernels in float32: equal up to the order of a sum.
LOGIT_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Promise:
    """``Promise("loss falls", kept=True, text="full fine-tune: loss 8.35 -> 6.02, ...")``."""

    name: str
    kept: bool | None
    """None where so few steps promise nothing."""
    text: str


@dataclass(frozen=True, slots=True)
class Phase:
    """One training run, from what its trainer logged and reported."""

    log: tuple[dict[str, Any], ...]
    """Every entry of the trainer's ``log_history``."""
    report: dict[str, Any]
    """The trainer's ``fastpack_report.to_dict()``."""

    @classmethod
    def of(cls, trainer: Any) -> Phase:
        """Return the phase that `trainer` has just trained."""
        return cls(tuple(dict(entry) for entry in trainer.state.log_history), trainer.fastpack_report.to_dict())

    def curve(self, key: str = "loss") -> list[tuple[int, float]]:
        """Return ``[(step, value), ...]`` of `key`; ``"eval_loss"`` is the held-out loss."""
        return [(int(entry["step"]), float(entry[key])) for entry in self.log if key in entry]

    @property
    def first(self) -> float:
        """The first logged loss."""
        return self.curve()[0][1]

    @property
    def last(self) -> float:
        """Mean of the last logged losses, at most ten and at most half of them."""
        losses = [loss for _, loss in self.curve()]
        return fmean(losses[-max(1, min(LAST, len(losses) // 2)) :])

    @property
    def held_out(self) -> list[float]:
        """Loss on the held-out text, before the first step and after the last."""
        return [loss for _, loss in self.curve("eval_loss")]

    @property
    def facts(self) -> dict[str, Any]:
        """Packing fill, truncated tokens and the like."""
        facts: dict[str, Any] = self.report["facts"]
        return facts

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "first_loss": self.first,
            "last_loss": self.last,
            "held_out_loss": self.held_out,
            "log": list(self.log),
            **self.report,
        }


@dataclass(slots=True)
class Results:
    """Everything that was measured, filled stage by stage."""

    settings: dict[str, Any]
    versions: dict[str, str]
    machine: dict[str, Any]
    seconds: dict[str, float] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    answer: dict[str, Any] = field(default_factory=dict)
    full: Phase = field(init=False)
    lora: Phase = field(init=False)
    comparison: Comparison = field(init=False)

    @classmethod
    def start(cls, settings: Settings) -> Results:
        """Return results with settings, versions and machine, and nothing measured yet."""
        import torch

        from fastpack_trl import __version__
        from fastpack_trl.measure.record import version_of

        chosen = {name: str(value) if isinstance(value, Path) else value for name, value in asdict(settings).items()}
        versions = {"python": platform.python_version(), "fastpack-trl": __version__}
        return cls(
            settings={**chosen, "training": settings.training},
            versions=versions | {name: version_of(name) for name in PACKAGES},
            machine={"system": platform.system(), "machine": platform.machine(), "threads": torch.get_num_threads()},
        )

    def promises(self) -> list[Promise]:
        """Return what a run must show; a NaN keeps no promise."""
        full, held_out, compared = self.full, self.lora.held_out, self.comparison
        steps, lora_steps = int(self.settings["steps"]), int(self.settings["lora_steps"])
        logits = self.answer["max_logit_difference"]
        return [
            Promise(
                "full_loss_falls",
                None if steps < PROMISING_STEPS else full.last <= (1 - LEAST_FALL) * full.first,
                f"full fine-tune: loss {full.first:.3f} -> {full.last:.3f}; a fall of {LEAST_FALL:.0%} or more is "
                f"promised from --steps {PROMISING_STEPS} on",
            ),
            Promise(
                "lora_loss_falls",
                None if lora_steps < PROMISING_LORA_STEPS else len(held_out) > 1 and held_out[-1] < held_out[0],
                f"LoRA: held-out loss {_path(held_out)}; a fall is promised from --lora_steps "
                f"{PROMISING_LORA_STEPS} on",
            ),
            Promise(
                "adapter_reloads",
                logits <= LOGIT_TOLERANCE,
                f"adapter in fresh objects: logits differ by {logits:.1e}, at most {LOGIT_TOLERANCE:.0e} is rounding",
            ),
            Promise(
                "losses_equal_stock",
                compared.within_rounding,
                f"stock comparison: losses differ by {compared.loss_difference:.1e}, at most {compared.bound:.1e} is "
                "rounding",
            ),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, which has no NaN and no infinity: they become ``"nan"`` and ``"inf"``."""
        plain: dict[str, Any] = _finite(
            {
                "settings": self.settings,
                "versions": self.versions,
                "machine": self.machine,
                "seconds": self.seconds,
                "data": self.data,
                "model": self.model,
                "full": self.full.to_dict(),
                "lora": self.lora.to_dict(),
                "adapter": self.answer,
                "comparison": self.comparison.to_dict(),
                "promises": [asdict(promise) for promise in self.promises()],
            }
        )
        return plain


def _finite(value: Any) -> Any:
    """Turn NaN and infinities into strings, tuples into lists, and anything unknown into text."""
    if isinstance(value, dict):
        return {str(key): _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def table(results: Results) -> str:
    """Format the figures, one per line."""
    compared = results.comparison
    rows = [
        ("full fine-tune", f"loss {results.full.first:.3f} -> {results.full.last:.3f}"),
        ("  held-out text", f"loss {_path(results.full.held_out)}"),
        ("LoRA", f"loss {results.lora.first:.3f} -> {results.lora.last:.3f}"),
        ("  held-out text", f"loss {_path(results.lora.held_out)}"),
        *((name, str(value)) for name, value in results.lora.facts.items()),
        ("packing proof", results.lora.report["features"]["verify_packing"]["reason"]),
        ("stock", f"{_speed(compared, 'stock')}: non-padding, median step (interval of the median)"),
        ("fastpack", f"{_speed(compared, 'fastpack')}; {_with_interval(compared.ratio, '.2f')} x stock"),
        ("largest loss difference", f"{compared.loss_difference:.1e} (rounding: up to {compared.bound:.1e})"),
        ("adapter in fresh objects", f"logits differ by {results.answer['max_logit_difference']:.1e}"),
        ("time", f"{results.seconds['total']:.0f} s in all"),
    ]
    width = max(len(label) for label, _ in rows)
    return "\n".join(f"{label.ljust(width)}  {value}" for label, value in rows)


def _speed(compared: Comparison, side: str) -> str:
    return f"{_with_interval(compared.rate(side), ',.0f')} tokens/s"


def _with_interval(value: Interval, style: str) -> str:
    return f"{value.median:{style}} ({value.low:{style}} to {value.high:{style}})"


def _path(losses: Sequence[float]) -> str:
    return " -> ".join(f"{loss:.3f}" for loss in losses)


def plot(results: Results, path: Path) -> bool:
    """Draw both loss curves to `path`; return False without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return False
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    offset = results.full.curve()[-1][0]  # the LoRA run continues where the full fine-tune ended
    parts = ((results.full, 0, "C0", "full fine-tune"), (results.lora, offset, "C1", "LoRA"))
    for phase, start, colour, label in parts:
        for key, style, suffix in (("loss", "-", ""), ("eval_loss", "o--", ", held-out text")):
            points = phase.curve(key)
            steps, losses = [start + step for step, _ in points], [loss for _, loss in points]
            axes.plot(steps, losses, style, color=colour, label=label + suffix)
    axes.axvline(offset, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xlabel="optimizer step", ylabel="loss of the answers (nats per token)", title="fastpack-trl quickstart")
    axes.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return True
