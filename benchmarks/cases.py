"""What the tables of ``RESULTS.md`` say above their rows, and the rows of the README."""

from __future__ import annotations

from dataclasses import dataclass

OURS, SAME_MEMORY = "fastpack", "fastpack same memory"


@dataclass(frozen=True, slots=True)
class Case:
    """What a table of RESULTS.md says above its rows.

    Attributes:
        over: sides that the others are compared with; the losses are those of the first.
        budget: largest relative difference of a logged loss; beyond it no speed is shown (but see `comparable`).
    """

    title: str
    text: str
    over: tuple[str, ...] = ("trl", "trl compiled")
    budget: float = 1e-3


_CAPS = """The longest row that trains (*tokens a step*), and the shortest that did not fit. *trl offload* sets
`activation_offloading=True`; fastpack offloads by default. 80 GiB is the whole card. Each side was searched once, some
by different commands, so compare lengths and not times."""
_IMAGES = """Documents with 0, 1 and 2 images in turn; *lora* is on decoder and tower. The same eight steps of each
side are timed, after 8 of TRL and 40 of fastpack, but for *fastpack image rows*.
*fastpack same memory* recomputes as TRL, *eager* without graphs. Losses of *full* (all weights, in bf16) may differ by
5e-3, since TRL's own rounds differ by up to 3.8e-3; this limit was set after the runs had been seen, and by the general
one of 1e-3 none of these sides would show a speed. *fastpack image rows* trains one row of 8,192 tokens a step, packed
across the data set, so compare its tokens/s; below the table is how long the data took to count."""
_START = "Short runs, figures by round, caches empty or *warm*."
_TEXT = "Code, one packed row a step; *2x4*: 4 batches of 2, not packed. *whole*: all layers; *experts*: LoRA on them."
_MASKS = "The mask of TRL's step is made in each layer, once per batch, or not at all (*packed kernel*)."
_BUFFERS = "Layer inputs return from host memory through one buffer (run first) or two."
_SORTS = "A layer finds the tokens of its experts in a loop over experts, or by one sort."
_PARTS = "The time of these parts alone: masks of a pass, dispatch of a layer."
_NORMS = "Gradient norms are compared, because losses hardly depend on the model."
CASES = {
    "sft": Case("SFT", _TEXT),
    "images": Case("Images and text", _IMAGES),
    "memory_caps": Case("Longest row under a memory cap", _CAPS, ()),
    "start": Case("From the first step on", _START),
    "several_gpus": Case("Two GPUs", "One packed row per GPU and step. FSDP 2 logs losses in bf16.", budget=8e-3),
    "preference": Case("Preference and online trainers", _NORMS, budget=2e-2),
    "prefixes": Case(
        "Shared prefixes", "Rows of 8,192 tokens. In *1000+200*, 1,000 shared tokens precede 100 to 300 own.",
        ("trl", "fastpack whole documents"),
    ),
    "hybrid": Case("Hybrid models", "TRL pads the documents that fastpack packs.", budget=1e-2),
    "metadata": Case("Packing metadata alone", _MASKS, ("metadata per layer",), 5e-3),
    "reload": Case("Reload of layer inputs alone", _BUFFERS, ("fastpack one buffer",)),
    "routing": Case("Routing alone", _SORTS, ("expert by expert",), 3e-2),
    "experts": Case("Experts alone", "Forward and backward of one block, or of decoder layers without the head."),
    "micro": Case("Parts alone", _PARTS, ("metadata per layer", "expert by expert")),
    "host": Case("Narrow models", "Models so narrow that a step is mostly the host's work."),
    "collate": Case("Collator", "Fetching and collating packed rows on one core.", ("trl",)),
}  # fmt: skip
"""By case, in the order of the page."""
README_ROWS = {
    "qwen3-8b lora 4096": ("Qwen3-8B LoRA", "8B\nLoRA"),
    "qwen3-14b nf4 4096": ("Qwen3-14B QLoRA", "14B\nQLoRA"),
    "qwen3-30b-a3b whole experts 4096": ("Qwen3-30B-A3B, LoRA on experts", "30B-A3B\nexperts"),
    "llama-3.2-1b full 4096": ("Llama-3.2-1B, all weights", "1B all\nweights"),
    "images qwen2.5-vl-3b lora 8": ("Qwen2.5-VL-3B LoRA, images and text", "3B VL\nimages"),
    "start qwen3-8b lora 4096, 100 steps": ("Qwen3-8B LoRA, a run of 100 steps", "8B, 100\nsteps"),
}
"""Rows of the README: the title in its table, and in its figure."""
