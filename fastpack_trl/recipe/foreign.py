"""Recognize configs of Axolotl, LLaMA-Factory and Unsloth-style scripts, and map their keys to ours by a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from fastpack_trl.errors import UserError, short_repr
from fastpack_trl.recipe.methods import METHODS, SFT, Method

_SECTIONS = {"model", "lora", "data", "training", "train", "logging", "peft"}
_DATA_KEYS = {"path", "name", "split", "data_files", "data_dir"}


def _modules(value: Any) -> dict[str, Any]:
    names = value.split(",") if isinstance(value, str) else value
    return {"lora_target_modules": "all-linear" if names == ["all"] else [name.strip() for name in names]}


_KEYS: Mapping[str, Mapping[str, str | Callable[[Any], Mapping[str, Any]]]] = {
    "Axolotl": {
        "base_model": "model_name_or_path", "revision_of_model": "model_revision", "sequence_len": "max_length",
        "sample_packing": "packing", "eval_sample_packing": "eval_packing", "optimizer": "optim",
        "micro_batch_size": "per_device_train_batch_size", "eval_batch_size": "per_device_eval_batch_size",
        "num_epochs": "num_train_epochs", "lr_scheduler": "lr_scheduler_type", "wandb_name": "run_name",
        "dataset_processes": "dataset_num_proc", "peft_use_rslora": "use_rslora", "peft_use_dora": "use_dora",
        "shuffle_merged_datasets": "shuffle_dataset", "rl_beta": "beta", "dpo_beta": "beta",
        "val_set_size": "test_split_size",
        "adapter": lambda value: {"use_peft": True} | ({"load_in_4bit": True} if value == "qlora" else {}),
        "lora_target_linear": lambda value: {"lora_target_modules": "all-linear"} if value else {},
        "special_tokens": lambda value: {key: value[key] for key in ("pad_token", "eos_token") if key in value},
        "wandb_project": lambda value: {"report_to": "wandb", "env": {"WANDB_PROJECT": value}},
    },
    "LLaMA-Factory": {
        "cutoff_len": "max_length", "lora_rank": "lora_r", "double_quantization": "use_bnb_nested_quant",
        "preprocessing_num_workers": "dataset_num_proc", "pref_beta": "beta", "neat_packing": "packing",
        "additional_target": "lora_modules_to_save", "val_size": "test_split_size", "lora_target": _modules,
        "quantization_bit": lambda value: {f"load_in_{value}bit": True},
        "pref_loss": lambda value: {"loss_type": [value]},
    },
    "Unsloth": {
        "model_name": "model_name_or_path", "max_seq_length": "max_length", "r": "lora_r",
        "target_modules": "lora_target_modules", "random_state": "seed", "modules_to_save": "lora_modules_to_save",
        "dataset_path": "dataset_name", "dataset": "dataset_name", "batch_size": "per_device_train_batch_size",
        "epochs": "num_train_epochs", "num_epochs": "num_train_epochs", "output": "output_dir",
    },
}  # fmt: skip
"""Key of a tool -> ours with the same value, or a function from its value to ours."""
_NO_EQUIVALENT: Mapping[str, set[str]] = {
    "Axolotl": {"dataset_prepared_path"},
    "LLaMA-Factory": {"stage", "finetuning_type", "template", "do_train", "dataset_dir", "overwrite_cache"},
    "Unsloth": {"use_gradient_checkpointing", "full_finetuning"},
}
"""Other keys that only this tool has."""
_GENERIC = {"dataset", "output", "epochs", "num_epochs", "batch_size", "optimizer"}
"""Keys that are no sign of a tool: people also write them by mistake."""
OTHER_NAMES = {key: to for keys in _KEYS.values() for key, to in keys.items() if isinstance(to, str)} | {
    "model": "model_name_or_path", "torch_dtype": "dtype", "attn": "packed_attention", "lr": "learning_rate",
    "resume": "resume_from_checkpoint",
}  # fmt: skip
"""Names that other tools and older versions of TRL give to an option."""


@dataclass(slots=True)
class Converted:
    """A YAML of another tool in our names: ``sequence_len: 64`` -> ``values["max_length"] = 64``."""

    tool: str
    method: Method = SFT
    values: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Their key -> its value, or what to do."""

    def text(self, source: str, file: str) -> str:
        """Return the text of `file`: the values, and omitted keys as comments."""
        head = f"# {source}, of {self.tool}, in the names of fastpack-trl:\n"
        command = f"#     fastpack-trl {self.method.command} --config {file}\n\n"
        notes = "".join(f"# {key}: {' '.join(why.split())}\n" for key, why in self.left_out.items())
        body = yaml.safe_dump(self.values, sort_keys=False, allow_unicode=True)
        return head + command + body + (f"\n# Left out:\n{notes}" if notes else "")


def tool_of(keys: Mapping[str, Any]) -> str:
    """Return the tool whose YAML has these keys: ``"Axolotl"``, ``"LLaMA-Factory"``, ``"Unsloth"``; empty for none."""
    flat = _flat(keys)
    matches = {tool: len(((_KEYS[tool].keys() | _NO_EQUIVALENT[tool]) - _GENERIC) & flat.keys()) for tool in _KEYS}
    best = max(matches, key=lambda tool: matches[tool])
    return best if matches[best] >= 2 else ""


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of sections with those of the top: ``{"lora": {"r": 8}}`` -> ``{"r": 8}``."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= value if key in _SECTIONS and isinstance(value, Mapping) else {key: value}
    return flat


def convert(config: Mapping[str, Any], folder: Path) -> Converted:
    """Map every key of a YAML of another tool.

    Args:
        config: its values.
        folder: where it lies; LLaMA-Factory's ``dataset_info.json`` is looked for from there and from here.

    Raises:
        UserError: a YAML of no tool that is known here, or for a training that TRL has no command for.
    """
    tool = tool_of(config)
    if not tool:
        raise UserError(f"not a config of {', '.join(_KEYS)}: its keys are {', '.join(list(config)[:8])}")
    given = {key: value for key, value in _flat(config).items() if value not in (None, "", "auto", [], {})}
    kind = str(given.pop("rl", given.pop("stage", "sft")))
    command = {"pt": "sft", "rm": "reward", "ipo": "dpo"}.get(kind, kind)
    if command not in METHODS:
        raise UserError(f"{kind!r} training is not supported: use one of {', '.join(METHODS)}")
    values: dict[str, Any] = {"loss_type": ["ipo"]} if kind == "ipo" else {}
    out = Converted(tool, METHODS[command], values)
    if tool == "LLaMA-Factory" and given.pop("finetuning_type", "lora") == "lora":
        rank = given.setdefault("lora_rank", 8)
        values |= {"use_peft": True, "lora_alpha": 2 * rank, "lora_target_modules": "all-linear"}
    if tool == "Unsloth" and not given.pop("full_finetuning", False) and ("r" in given or given.get("load_in_4bit")):
        values["use_peft"] = True
    learns_prompts = bool(given.pop("train_on_inputs", given.pop("train_on_prompt", kind == "pt")))
    for when in ("eval", "save"):  # steps below 1 are a part of all steps
        if count := given.pop(f"{when}s_per_epoch", None):
            steps = {f"{when}_strategy": "steps", f"{when}_steps": 1 / (count * float(given.get("num_epochs", 1)))}
            values |= {f"{when}_strategy": "epoch"} if count == 1 else steps
    if tool != "Unsloth":
        _add_data(given, out, folder, learns_prompts)
    known = {one.name for kind in out.method.dataclasses() for one in fields(kind)}
    for key, value in given.items():
        to = _KEYS[tool].get(key, "warmup_steps" if key == "warmup_ratio" else key)
        if callable(to):
            values |= to(value)
        elif to in known and key != "attn_implementation":
            values[to] = value
        else:
            out.left_out[key] = f"{short_repr(value)} has no equivalent"
    if not values.get("test_split_size"):  # nothing to evaluate on
        out.values = {name: value for name, value in values.items() if not name.startswith(("eval_", "test_split"))}
    if out.values.get("use_peft"):
        out.values.setdefault("lora_dropout", 0.0)  # TRL's default is 0.05
    return out


def _add_data(given: dict[str, Any], out: Converted, folder: Path, learns_prompts: bool) -> None:
    """Take the data sets of Axolotl or LLaMA-Factory: their paths, their format, and which tokens the loss counts."""
    entries, names, place = given.pop("datasets", []), given.pop("dataset", []), given.pop("dataset_dir", "data")
    most = given.pop("max_samples", None)
    files = [at / place / "dataset_info.json" for at in (Path.cwd(), folder)]
    table = next((file for file in files if file.is_file()), folder)
    info: dict[str, Any] = json.loads(table.read_text(encoding="utf-8")) if names and table.is_file() else {}
    for name in [one.strip() for one in names.split(",")] if isinstance(names, str) else names:
        about = info.get(name, {})
        if not about:
            out.left_out[f"dataset {name}"] = f"not found in {place}/dataset_info.json: name its file or hub name"
        path = str(table.parent / about["file_name"]) if "file_name" in about else about.get("hf_hub_url", name)
        entry = {"path": path, "type": about.get("formatting", "alpaca")}
        entry |= {"split": f"train[:{most}]"} if most else {}
        entries.append(entry | {key: about[key] for key in ("columns", "tags") if key in about})
    for entry in entries:
        for key in sorted(entry.keys() - _DATA_KEYS - {"type"}):
            out.left_out[f"datasets {key}"] = f"{short_repr(entry[key])}: rename the columns in the data"
    kinds = {str(entry.get("type", "")).partition(".")[0] for entry in entries}
    if entries:
        out.values["datasets"] = [{key: one[key] for key in one if key in _DATA_KEYS} for one in entries]
    if len(kinds) > 1:
        out.left_out["datasets type"] = "several formats: convert them to one, e.g. a column `messages`"
    if kinds in ({"alpaca"}, {"sharegpt"}):
        (out.values["dataset_format"],) = kinds
    alpaca = kinds == {"alpaca"}
    if out.method is SFT and kinds != {"completion"} and learns_prompts == alpaca:
        out.values["completion_only_loss" if alpaca else "assistant_only_loss"] = not learns_prompts
