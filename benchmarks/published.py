"""Figures that others have published about the rows of `benchmarks.by_itself`, quoted; none is measured here."""

from __future__ import annotations

from dataclasses import dataclass

GUIDE = "https://unsloth.ai/blog/nvidia-collab"
"""Unsloth and NVIDIA, guide of May 2026; each optimisation measured against Unsloth's own earlier code."""


ROWS = {
    "qwen3-14b-qlora": "Qwen3-14B, QLoRA",
    "llama-3.2-1b": "Llama-3.2-1B, whole training step",
    "qwen3-0.6b": "Qwen3-0.6B, whole training step",
    "qwen3-8b-reload": "Qwen3-8B, checkpoints reloaded from host memory",
    "qwen3-14b-reload": "Qwen3-14B, checkpoints reloaded from host memory",
    "qwen3-32b-reload": "Qwen3-32B, checkpoints reloaded from host memory",
    "gpt-oss-20b-routing": "gpt-oss-20b, decoder layers",
}
"""For people, by the row of `benchmarks.by_itself`."""


@dataclass(frozen=True, slots=True)
class Published:
    """``Published("forward +43.3 %, ...", "Qwen3-14B QLoRA; GPU, batch and length not stated")``.

    Attributes:
        quoted: the figures.
        setting: what they say that they ran.
    """

    quoted: str
    setting: str


PUBLISHED = {
    "qwen3-14b-qlora": Published(
        "forward +43.3 %, backward +5.8 %, per batch +14.3 %", "Qwen3-14B QLoRA; GPU, batch and length not stated"
    ),
    "llama-3.2-1b": Published("199 ms per step saved, 11.5 %", "Llama-3.2-1B, 2,048 packed tokens, Blackwell"),
    "qwen3-0.6b": Published("319 ms per step saved, 14.8 %", "Qwen3-0.6B, 2,048 packed tokens, Blackwell"),
    "qwen3-8b-reload": Published("0.3739 to 0.4053 steps/s, +8.40 %, 0.37 GB more", "8B, whole model, B200"),
    "qwen3-14b-reload": Published("0.2245 to 0.2395 steps/s, +6.70 %, 0.47 GB more", "14B, whole model, B200"),
    "qwen3-32b-reload": Published("0.1979 to 0.2070 steps/s, +4.61 %, 0.23 GB more", "32B, whole model, B200"),
    "gpt-oss-20b-routing": Published(
        "forward +23 %, backward +13 %", "gpt-oss-20b over a loop over experts; GPU, batch and length not stated"
    ),
}
"""By the row of `benchmarks.by_itself`."""

RELOAD_GAINS = {"qwen3-8b": 0.084, "qwen3-14b": 0.067, "qwen3-32b": 0.046}
"""Of a double buffer over a serial reload, whole models on a B200 (`GUIDE`)."""
