"""Generated parts of `docs/`: tables, a print of `doctor`; run as a script, it writes those it is given, or all."""

from __future__ import annotations

import html
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

import yaml
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from benchmarks.models import shape_of
from benchmarks.results_page import grid
from benchmarks.tables import between
from fastpack_trl.attention.backends import BACKENDS, choose
from fastpack_trl.cli.main import main
from fastpack_trl.config import _CHOICES, Settings
from fastpack_trl.model.facts import read_features
from fastpack_trl.recipe.forecast import model_of, predict, stand_in
from fastpack_trl.recipe.gpus import GPUS, Gpu, as_if_on
from fastpack_trl.recipe.make_trainer import short_run_arguments
from fastpack_trl.testing import FAMILIES, tiny_model

DOCS = Path(__file__).parents[2] / "docs"
ALL: dict[str, Any] = {"lora_target_modules": "all-linear"}
NF4: dict[str, Any] = {**ALL, "load_in_4bit": True, "use_bnb_nested_quant": True}
PROJECTIONS: dict[str, Any] = {"lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
EXPERTS: dict[str, Any] = {**PROJECTIONS, "moe_quantize_experts": "on"}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-0.6B, all weights": ("qwen3-0.6b", {"use_peft": False}),
    "Llama-3.2-1B LoRA": ("llama-3.2-1b", ALL),
    "Qwen3-8B LoRA": ("qwen3-8b", ALL),
    "Qwen3-8B QLoRA": ("qwen3-8b", NF4),
    "Qwen3-14B QLoRA": ("qwen3-14b", NF4),
    "gpt-oss-20b LoRA, experts in four bits": ("gpt-oss-20b", EXPERTS),
}
SHOWN = ("T4", "4090", "H100")
CARDS = ("T4", "4090", "A100-40", "H100")


def arguments_of(folder: Path, shape: str, layers: int | None = None, **settings: Any) -> Any:
    """Return the arguments of a LoRA run of a model of public shape, as `doctor --gpu` reads them."""
    of = shape_of(shape).cut_to(layers or int(shape_of(shape).fields["num_hidden_layers"]))
    return arguments_for(folder / shape, AutoConfig.for_model(of.model_type, **of.fields), **settings)


def arguments_for(folder: Path, config: Any, **settings: Any) -> Any:
    """Return the arguments of a LoRA run of the model of a config, which is all that `folder` will have of it."""
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(folder)
    given = {  # the adapters of the records have no dropout
        "model_name_or_path": str(folder), "dataset_name": "unused", "dtype": "bfloat16", "packing": True,
        "use_peft": True, "lora_r": 16, "lora_dropout": 0.0, "max_length": 2048, "per_device_train_batch_size": 1,
        **settings,
    }  # fmt: skip
    (folder / "run.yaml").write_text(yaml.safe_dump(given))
    return short_run_arguments(str(folder / "run.yaml"), str(folder / "out"), "--use_cpu", "True")


def kinds() -> dict[tuple[int, int], list[Gpu]]:
    """Return the known GPUs by compute capability, from the oldest on."""
    gpus = sorted(GPUS.values(), key=lambda gpu: gpu.capability)
    return {capability: list(same) for capability, same in groupby(gpus, lambda gpu: gpu.capability)}


def precision_of(gpu: Gpu) -> str:
    return "bf16" if gpu.capability >= (8, 0) else "fp16"


def of_gpu(arguments: Any, gpu: Gpu) -> Any:
    """Return the arguments in the precision that a kind of GPU has."""
    training = copy(arguments.training)
    training.bf16 = precision_of(gpu) == "bf16"
    training.fp16 = not training.bf16
    return replace(arguments, training=training)


def taken(gpu: Gpu, arguments: Any) -> dict[str, str]:
    """Return the path of each feature on a kind of GPU, by the package's own rules with its capability forced."""
    run = stand_in(of_gpu(arguments, gpu), model_of(arguments).module, gpu)
    with as_if_on(gpu.capability):
        found = {name: re.split("[,:]", path)[0] for name, path in run.on.items()}  # the reason is below the table
        may_run = BACKENDS["flash_attention_4"].considered(run.features)
        found["flash_attention_4"] = "where installed" if may_run else "off"
    return found


def paths_table(folder: Path) -> str:
    """Return a column per compute capability, a row per feature."""
    runs = {"qwen3-0.6b": ALL, "gpt-oss-20b": PROJECTIONS}
    made = [arguments_of(folder, shape, 2, **settings) for shape, settings in runs.items()]
    made.append(arguments_of(folder, "qwen3-0.6b", 2, **NF4))
    columns, cells = ["feature"], []
    for capability, gpus in kinds().items():
        dense, experts, four_bits = (taken(gpus[0], arguments) for arguments in made)
        columns.append(f"{', '.join(gpu.name for gpu in gpus)} ({'.'.join(map(str, capability))})")
        rows = {"computes in": precision_of(gpus[0])}
        rows |= {"`packed_attention`": dense["packed_attention"]}
        rows |= {"the same, windows and sinks (gpt-oss)": experts["packed_attention"]}
        rows |= {f"`{name}`": dense[name] for name in ("flash_attention_4", "lora")}
        rows |= {"`lora` over 4 bits": four_bits["lora"], "`moe`": experts["moe"]}
        rows |= {f"`{name}`": dense[name] for name in ("fused_layers", "cuda_graph")}
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
        found = taken(GPUS["H100"], arguments_for(folder / family, model.config, **ALL))
        switches = (found.get(name, "-") for name in ("lora", "moe", "fused_layers", "cuda_graph"))
        cells = (found["packed_attention"], choose("auto", read_features(model)).path, *switches)
        alike.setdefault(cells, []).append(f"`{family}`")
    return grid(
        "model types | packed attention, GPU | CPU | `lora` | `moe` | `fused_layers` | `cuda_graph`",
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


def fields_list(_: Path) -> str:
    """Return each field of `FastSFTConfig` as a term with its values, and its help text as the definition."""
    lines = []
    for own in fields(Settings):
        values = ", ".join(_CHOICES.get(own.name, (str(own.default).lower(), "number")))
        text = html.escape(own.metadata["help"], quote=False)
        lines.append(f"<dt><code>{own.name}</code>: {values}</dt>\n<dd>{text}</dd>")
    return "\n".join(["<dl>", *lines, "</dl>"])


TABLES = {
    "fields": ("configuration.md", fields_list),
    "paths": ("hardware.md", paths_table),
    "rows": ("hardware.md", rows_table),
    "families": ("models.md", families_table),
    "doctor": ("cli.md", doctor_block),
}
"""By the name of its marks: page and contents."""


def page_with(name: str) -> tuple[Path, str]:
    """Return the page of a table, and its text with the table made anew."""
    page, table = TABLES[name]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = (DOCS / page).read_text(encoding="utf-8")
        return DOCS / page, between(text, (f"<!-- {name} -->", f"<!-- /{name} -->"), table(Path(folder)))


if __name__ == "__main__":
    for page, text in map(page_with, sys.argv[1:] or TABLES):
        page.write_text(text, encoding="utf-8")
