"""What each optimisation should save, from a few numbers that are measured or published apart from the step.

Every function takes seconds, bytes and counts and returns seconds. The pages of docs/ compare them with what a step
has saved; `SOUND` is how far apart the two may be before a page has to say why.
"""

from __future__ import annotations

from dataclasses import dataclass

SOUND = 0.25
"""Relative difference of predicted and measured."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Seconds of one step that an optimisation saves, by the part of the step."""

    forward: float
    backward: float

    @property
    def step(self) -> float:
        return self.forward + self.backward


def metadata_saved(layers: int, rebuild: float, *, recomputed: bool) -> Saved:
    """Return what is saved by making packing metadata once per batch instead of in each layer.

    Forward: every layer but one is spared its rebuild. Backward: where layers are recomputed, all are spared another.

    Args:
        layers: with attention.
        rebuild: seconds of one rebuild by itself.
        recomputed: whether layers are checkpointed.
    """
    return Saved((layers - 1) * rebuild, layers * rebuild if recomputed else 0.0)


def reload_saved(layers: int, nbytes: float, bytes_per_second: float, layer_backward: float) -> Saved:
    """Return what is saved by fetching a layer's input while the layer after it runs backward.

    Every layer but the last waits for its own copy in a serial reload; with a second buffer it waits only for what is
    longer than the layer that runs meanwhile.

    Args:
        layers: checkpointed; the input of the last one stays on the device.
        nbytes: of one layer's input.
        bytes_per_second: from pinned host memory to the device.
        layer_backward: seconds of one layer's recomputation and backward.
    """
    copy = nbytes / bytes_per_second
    return Saved(0.0, (layers - 1) * min(copy, layer_backward))


def routing_saved(layers: int, loop: tuple[float, float], once: tuple[float, float], *, recomputed: bool) -> Saved:
    """Return what is saved by sorting the tokens of a layer once instead of asking for each expert's.

    Args:
        layers: with experts.
        loop: seconds of one layer's dispatch and sum with experts that do nothing, forward and backward, one by one.
        once: the same after one sort.
        recomputed: whether layers are checkpointed: forward runs again in backward.
    """
    forward, backward = loop[0] - once[0], loop[1] - once[1]
    return Saved(layers * forward, layers * (backward + (forward if recomputed else 0.0)))


def apart(predicted: float, measured: float) -> float:
    """Return the relative difference of a prediction, of what was measured."""
    return abs(predicted - measured) / abs(measured) if measured else float("inf")


def sound(predicted: float, measured: float) -> bool:
    """Return whether a prediction is near what was measured."""
    return apart(predicted, measured) <= SOUND


def published_checks() -> list[tuple[str, float, float]]:
    """Return the published figures as what they are, predicted, and published: milliseconds, or share of a step.

    Of the guide (`by_itself.GUIDE`): 13.7 ms per dense mask; 55.7 GB/s; the extra memory is one layer's input.
    """
    checks = []
    for name, layers, published in (("Llama-3.2-1B", 16, 199.0), ("Qwen3-0.6B", 28, 319.0)):
        predicted = metadata_saved(layers, 13.7, recomputed=False).step
        checks.append((f"{name}, milliseconds of a step for metadata", predicted, published))
    steps = (("8B", 36, 0.37e9, 0.4053, 0.084), ("14B", 40, 0.47e9, 0.2395, 0.067), ("32B", 64, 0.23e9, 0.2070, 0.0461))
    for name, layers, nbytes, per_second, gain in steps:
        saved = reload_saved(layers, nbytes, 55.7e9, float("inf")).step
        checks.append((f"{name}, share of a step for serial reloads", saved * per_second, gain))
    return checks
