"""Generated parts of `docs/`: tables, a print of `doctor`; run as a script, it writes those it is given, or all."""

from __future__ import annotations

import io
import re
import sys
import tempfile
import warnings
from contextlib import redirect_stdout
from copy import copy
from dataclasses import fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from shape_material import arguments_for, arguments_of

from benchmarks.tables import between, grid
from fastpack_trl.attention.backends import choose
from fastpack_trl.attention.flash_attention_4 import has_device
from fastpack_trl.attention.per_document import has_grouped_kernel
from fastpack_trl.cli.main import main
from fastpack_trl.config import _CHOICES, Settings
from fastpack_trl.model.facts import read_features
from fastpack_trl.recipe.forecast import predict, stand_in
from fastpack_trl.recipe.gpus import GPUS, Gpu, as_if_on
from fastpack_trl.recipe.probe import model_of
from fastpack_trl.testing import FAMILIES, tiny_model

DOCS = Path(__file__).parents[2] / "docs"
MARKS = {name: (f"<!-- {name} -->", f"<!-- /{name} -->") for name in ("fields", "paths", "rows", "families", "doctor")}
PAGES = {
    "fields": "configuration.md",
    "paths": "hardware.md",
    "rows": "hardware.md",
    "families": "models.md",
    "doctor": "cli.md",
}
ALL, PROJECTIONS = "all-linear", ["q_proj", "k_proj", "v_proj", "o_proj"]
NF4 = {"load_in_4bit": True, "use_bnb_nested_quant": True}
LORA: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("qwen3-0.6b", {"lora_target_modules": ALL}),
    "4-bit": ("qwen3-0.6b", {"lora_target_modules": ALL, **NF4}),
    "experts": ("gpt-oss-20b", {"lora_target_modules": PROJECTIONS}),
}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-0.6B, all weights": ("qwen3-0.6b", {"use_peft": False}),
    "Llama-3.2-1B LoRA": ("llama-3.2-1b", {"lora_target_modules": ALL}),
    "Qwen3-8B LoRA": ("qwen3-8b", {"lora_target_modules": ALL}),
    "Qwen3-8B QLoRA": ("qwen3-8b", {"lora_target_modules": ALL, **NF4}),
    "Qwen3-14B QLoRA": ("qwen3-14b", {"lora_target_modules": ALL, **NF4}),
    "gpt-oss-20b LoRA, experts in four bits": (
        "gpt-oss-20b", {"lora_target_modules": PROJECTIONS, "moe_quantize_experts": "on"},
    ),
}  # fmt: skip
SHOWN = ("T4", "4090", "H100")
CARDS = ("T4", "4090", "A100-40", "H100")


def kinds() -> dict[tuple[int, int], list[Gpu]]:
    """Return the known GPUs by compute capability, from the oldest on."""
    gpus = sorted(GPUS.values(), key=lambda gpu: gpu.capability)
    return {capability: list(same) for capability, same in groupby(gpus, lambda gpu: gpu.capability)}


def precision_of(gpu: Gpu) -> str:
    return "bf16" if gpu.has_bf16 else "fp16"


def of_gpu(arguments: Any, gpu: Gpu) -> Any:
    """Return the arguments in the precision that a kind of GPU has."""
    training = copy(arguments.training)
    training.bf16, training.fp16 = gpu.has_bf16, not gpu.has_bf16
    return replace(arguments, training=training)


def taken(gpu: Gpu, arguments: Any) -> dict[str, str]:
    """Return the path of each feature on a kind of GPU, by the package's own rules with its capability forced."""
    run = stand_in(of_gpu(arguments, gpu), model_of(arguments).module, gpu)
    with as_if_on(gpu.capability):
        found = {name: re.split("[,:]", path)[0] for name, path in run.on.items()}  # the reason is below the table
        repeats = found["packed_attention"] == "per_document" and not has_grouped_kernel(run.features)
        found["repeated"] = ", heads repeated" * repeats
        found["flash_attention_4"] = "where installed" if has_device(run.features) else "off"
    return found


def paths_table(folder: Path) -> str:
    """Return a column per compute capability, a row per feature."""
    made = {name: arguments_of(folder, shape, 2, **settings) for name, (shape, settings) in LORA.items()}
    columns, cells = ["feature"], []
    for capability, gpus in kinds().items():
        dense, four_bits, experts = (taken(gpus[0], made[name]) for name in ("dense", "4-bit", "experts"))
        columns.append(f"{', '.join(gpu.name for gpu in gpus)} ({'.'.join(map(str, capability))})")
        rows = {"computes in": precision_of(gpus[0])}
        rows |= {"`packed_attention`": dense["packed_attention"] + dense["repeated"]}
        rows |= {"the same, windows and sinks (gpt-oss)": experts["packed_attention"]}
        rows |= {f"`{name}`": dense[name] for name in ("flash_attention_4", "lora")}
        rows |= {"`lora` over 4 bits": four_bits["lora"], "`moe`": experts["moe"]}
        rows |= {f"`{name}`": dense[name] for name in ("layer_compile", "cuda_graph")}
        rows |= {"`cuda_graph`, experts": experts["cuda_graph"]}
        cells.append(rows.values())
    return grid(" | ".join(columns), list(zip(rows, *cells, strict=True)))


def rows_table(folder: Path) -> str:
    """Return the longest packed row that `doctor --gpu` promises, per model and card."""
    lines = []
    for name, (shape, settings) in ROWS.items():
        arguments, seen = arguments_of(folder, shape, **settings), dict[Any, Any]()
        made = [predict(of_gpu(arguments, gpu), gpu, seen) for gpu in map(GPUS.__getitem__, CARDS)]
        assert not any(one.unknown for one in made), name
        lines.append([name, *(f"{longest:,}" if (longest := one.longest_row()) else "does not fit" for one in made)])
    return grid(" | ".join(["tokens of a row", *(f">{card}, {GPUS[card].gib:g} GiB" for card in CARDS)]), lines)


def families_table(folder: Path) -> str:
    """Return a row per set of features on a GPU of capability 9.0, and on a CPU, with the model types that get it."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for family in FAMILIES:
        model = tiny_model(family)
        found = taken(GPUS["H100"], arguments_for(folder / family, model.config, lora_target_modules=ALL))
        switches = (found.get(name, "-") for name in ("lora", "moe", "layer_compile", "cuda_graph"))
        cells = (found["packed_attention"], choose("auto", read_features(model)).path, *switches)
        alike.setdefault(cells, []).append(f"`{family}`")
    return grid(
        "model types | packed attention, GPU | CPU | `lora` | `moe` | `layer_compile` | `cuda_graph`",
        [[", ".join(families), *cells] for cells, families in alike.items()],
    )


def doctor_block(folder: Path) -> str:
    """Return what `doctor --gpu` prints for a shipped config, as a terminal shows it."""
    config, printed = DOCS.parent / "configs" / "qwen3-8b-lora-8k.yaml", io.StringIO()
    arguments_of(folder, "qwen3-8b")  # writes the model's config: nothing is downloaded
    words = ["doctor", "--config", str(config), "--gpu", *SHOWN]
    with redirect_stdout(printed):
        assert main([*words, "--model_name_or_path", str(folder / "qwen3-8b")]) == 0
    shown = f"$ fastpack-trl doctor --config configs/{config.name} --gpu {' '.join(SHOWN)}"
    return f"```text\n{shown}\n{printed.getvalue().strip()}\n```"


def fields_table(_: Path) -> str:
    """Return a row per field of `FastSFTConfig`: its values and its help text."""
    lines = [
        [f"`{own.name}`", ", ".join(_CHOICES.get(own.name, ("number", str(own.default).lower()))), own.metadata["help"]]
        for own in fields(Settings)
    ]
    return grid("field | values | meaning", lines)


TABLES = {
    "fields": fields_table,
    "paths": paths_table,
    "rows": rows_table,
    "families": families_table,
    "doctor": doctor_block,
}


def page_with(name: str, text: str) -> str:
    """Return the text of a page with one of its tables made anew."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return between(text, MARKS[name], TABLES[name](Path(folder)))


if __name__ == "__main__":
    for table in sys.argv[1:] or PAGES:
        file = DOCS / PAGES[table]
        file.write_text(page_with(table, file.read_text(encoding="utf-8")), encoding="utf-8")
