"""YAMLs of Axolotl, LLaMA-Factory and Unsloth-style scripts: recognised, and all their keys mapped to ours at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from fastpack_trl.errors import UserError, short_repr
from fastpack_trl.recipe.methods import METHODS, SFT, Method

_SIGNS: Mapping[str, str] = {
    "Axolotl": "base_model sequence_len micro_batch_size sample_packing num_epochs adapter lora_target_linear "
    "val_set_size dataset_prepared_path lr_scheduler",
    "LLaMA-Factory": "stage finetuning_type cutoff_len template lora_target do_train dataset_dir lora_rank "
    "overwrite_cache preprocessing_num_workers",
    "Unsloth": "max_seq_length model_name use_gradient_checkpointing random_state full_finetuning r target_modules",
}
"""Keys that only this tool has: two of them tell its files."""
_NAMES: Mapping[str, Mapping[str, str]] = {
    "Axolotl": {
        "base_model": "model_name_or_path", "revision_of_model": "model_revision", "sequence_len": "max_length",
        "sample_packing": "packing", "eval_sample_packing": "eval_packing", "optimizer": "optim",
        "micro_batch_size": "per_device_train_batch_size", "eval_batch_size": "per_device_eval_batch_size",
        "num_epochs": "num_train_epochs", "lr_scheduler": "lr_scheduler_type", "warmup_ratio": "warmup_steps",
        "wandb_name": "run_name", "dataset_processes": "dataset_num_proc", "peft_use_rslora": "use_rslora",
        "peft_use_dora": "use_dora", "shuffle_merged_datasets": "shuffle_dataset", "rl_beta": "beta",
        "dpo_beta": "beta", "val_set_size": "test_split_size",
    },
    "LLaMA-Factory": {
        "cutoff_len": "max_length", "lora_rank": "lora_r", "double_quantization": "use_bnb_nested_quant",
        "preprocessing_num_workers": "dataset_num_proc", "pref_beta": "beta", "neat_packing": "packing",
        "additional_target": "lora_modules_to_save", "warmup_ratio": "warmup_steps", "val_size": "test_split_size",
    },
    "Unsloth": {
        "model_name": "model_name_or_path", "max_seq_length": "max_length", "r": "lora_r",
        "target_modules": "lora_target_modules", "random_state": "seed", "modules_to_save": "lora_modules_to_save",
        "dataset_path": "dataset_name", "dataset": "dataset_name", "warmup_ratio": "warmup_steps",
        "batch_size": "per_device_train_batch_size", "epochs": "num_train_epochs", "num_epochs": "num_train_epochs",
        "output": "output_dir",
    },
}  # fmt: skip
"""Key of a tool -> ours, with the same value."""
_BY_ITSELF = "nothing to set: "
_WITHOUT: Mapping[str, str] = {
    **dict.fromkeys(
        ("flash_attention", "xformers_attention", "sdp_attention", "flex_attention", "flash_attn"),
        "packed_attention: auto",
    ),
    "attn_implementation": "packed_attention: auto",
    **dict.fromkeys(("activation_offloading", "use_gradient_checkpointing"), "activation_memory: auto"),
    **dict.fromkeys(("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel"), "lora: auto"),
    **dict.fromkeys(("pad_to_sequence_len", "group_by_length"), "rows have no padding"),
    **dict.fromkeys(("model_type", "tokenizer_type", "strict", "template", "chat_template"), "the checkpoint says it"),
    **dict.fromkeys(("dataset_prepared_path", "overwrite_cache"), "`datasets` keeps what it has prepared"),
    **dict.fromkeys(("do_train", "overwrite_output_dir", "plot_loss", "bias", "local_rank"), "the default"),
    "enable_liger_kernel": "sync_free: auto", "torch_compile": "layer_compile: auto",
    "quantization_method": "the default",
}  # fmt: skip
_DATA_KEYS = {"path", "name", "split", "data_files", "data_dir"}
_SECTIONS = {"model", "lora", "data", "training", "train", "logging", "peft"}


@dataclass(slots=True)
class Converted:
    """A YAML of another tool in our names: ``sequence_len: 64`` -> ``values["max_length"] = 64``."""

    tool: str
    method: Method = SFT
    values: dict[str, Any] = field(default_factory=dict)
    mapped: dict[str, str] = field(default_factory=dict)
    """Their key -> ours, where the names differ."""
    without: dict[str, str] = field(default_factory=dict)
    """Their key -> why nothing takes its place, or what to do."""

    def text(self, source: str, file: str) -> str:
        """Return what is written to `file`: the values, and what has no equivalent as comments."""
        command = f"fastpack-trl {self.method.command} --config {file}"
        head = f"# {source}, of {self.tool}, in the names of fastpack-trl:\n#     {command}\n\n"
        notes = "".join(f"# {key}: {' '.join(why.split())}\n" for key, why in self.without.items())
        body = yaml.safe_dump(self.values, sort_keys=False, allow_unicode=True)
        return f"{head}{body}" + (f"\n# Without an equivalent, or not needed:\n{notes}" if notes else "")


def tool_of(keys: Mapping[str, Any]) -> str:
    """Return the tool whose YAML has these keys: ``"Axolotl"``, ``"LLaMA-Factory"``, ``"Unsloth"``; empty for none."""
    flat = _flat(keys)
    found = {tool: len(set(signs.split()) & set(flat)) for tool, signs in _SIGNS.items()}
    best = max(found, key=lambda tool: found[tool])
    return best if found[best] >= 2 else ""


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
        known = ", ".join(_SIGNS)
        raise UserError(f"this is no YAML of {known}: its keys are {', '.join(list(config)[:8])}; change them by hand")
    given = {key: value for key, value in _flat(config).items() if value not in (None, "", "auto", [], {})}
    out = Converted(tool)
    {"Axolotl": _axolotl, "LLaMA-Factory": _llama_factory, "Unsloth": _unsloth}[tool](given, out, folder)
    own = {one.name for kind in out.method.dataclasses() for one in fields(kind)} | {"datasets"}
    for key, value in given.items():
        name = _NAMES[tool].get(key, key)
        if name in own and key not in _WITHOUT:
            out.values.setdefault(name, value)
            if name != key:
                out.mapped[key] = name
        elif key in _WITHOUT:
            out.without[key] = _BY_ITSELF + _WITHOUT[key]
        else:
            out.without[key] = f"{short_repr(value)} has no equivalent for {out.method.command}"
    _fit_evaluation(out.values)
    return out


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of sections beside those of the top: ``{"lora": {"r": 8}}`` -> ``{"r": 8}``."""
    out: dict[str, Any] = {}
    for key, value in config.items():
        out |= value if key in _SECTIONS and isinstance(value, Mapping) else {key: value}
    return out


def _take(given: dict[str, Any], out: Converted, key: str, to: Callable[[Any], Mapping[str, Any]]) -> None:
    """Take a key whose value changes as well: `to` returns ours."""
    if key in given:
        found = to(given.pop(key))
        out.values |= found
        out.mapped[key] = ", ".join(found) or "the default"


def _axolotl(given: dict[str, Any], out: Converted, folder: Path) -> None:
    kind = str(given.pop("rl", "sft"))
    out.method = _method("dpo" if kind == "ipo" else kind)
    if kind == "ipo":
        out.values["loss_type"] = ["ipo"]
    four_bits = {"load_in_4bit": True} if given.get("adapter") == "qlora" else {}
    _take(given, out, "adapter", lambda _: {"use_peft": True, **four_bits})
    _take(given, out, "lora_target_linear", lambda value: {"lora_target_modules": "all-linear"} if value else {})
    epochs = float(given.get("num_epochs", 1))
    _take(given, out, "evals_per_epoch", lambda value: _per_epoch("eval", float(value), epochs))
    _take(given, out, "saves_per_epoch", lambda value: _per_epoch("save", float(value), epochs))
    tokens = ("pad_token", "eos_token")
    _take(given, out, "special_tokens", lambda value: {name: value[name] for name in tokens if name in value})
    _take(given, out, "wandb_project", lambda value: {"report_to": "wandb", "env": {"WANDB_PROJECT": value}})
    learns_all = bool(given.pop("train_on_inputs", False))
    _take(given, out, "datasets", lambda value: _axolotl_data(value, out, learns_all))
    if out.values.get("use_peft"):
        given.setdefault("lora_dropout", 0.0)  # TRL's default is 0.05


def _axolotl_data(entries: list[dict[str, Any]], out: Converted, learns_all: bool) -> dict[str, Any]:
    formats: set[str] = set()
    found: dict[str, Any] = {"datasets": [{k: v for k, v in one.items() if k in _DATA_KEYS} for one in entries]}
    for one in entries:
        kind = str(one.get("type", "chat_template"))
        turns = one.get("message_field_role", (one.get("message_property_mappings") or {}).get("role"))
        if kind == "completion":
            found["dataset_text_field"] = one.get("field", "text")
        of_turns = "sharegpt" if "sharegpt" in kind or turns == "from" else ""
        formats.add("alpaca" if kind.startswith("alpaca") else of_turns)
        for key, own in (("field_messages", "messages" if out.method is SFT else "prompt"), ("field_chosen", "chosen")):
            if one.get(key, own) not in (own, "conversations"):
                out.without[f"datasets {key}"] = f"rename the column {one[key]!r} to {own!r}"
    return found | _format(formats, out, learns_all)


def _format(formats: set[str], out: Converted, learns_all: bool) -> dict[str, Any]:
    """Return the format of all data, and on which tokens the loss is."""
    if len(formats) > 1:
        out.without["datasets type"] = "several formats: bring them to one, e.g. a column `messages`"
    (name, *others) = sorted(formats) or [""]
    found: dict[str, Any] = {"dataset_format": name} if name and not others else {}
    if out.method is SFT and name == "alpaca" and learns_all:
        found["completion_only_loss"] = False
    elif out.method is SFT and name != "alpaca" and not learns_all and "dataset_text_field" not in out.values:
        found["assistant_only_loss"] = True
    return found


def _llama_factory(given: dict[str, Any], out: Converted, folder: Path) -> None:
    stage = str(given.pop("stage", "sft"))
    out.method = _method({"pt": "sft", "rm": "reward"}.get(stage, stage))
    kind = given.pop("finetuning_type", "lora")
    if kind == "lora":
        rank = given.get("lora_rank", 8)
        for key, default in (("lora_rank", 8), ("lora_alpha", 2 * rank), ("lora_dropout", 0.0), ("lora_target", "all")):
            given.setdefault(key, default)  # theirs are other ones than TRL's
        out.values["use_peft"] = True
    elif kind != "full":
        out.without["finetuning_type"] = f"{kind!r} has no equivalent: all weights are trained"
    _take(given, out, "lora_target", lambda value: {"lora_target_modules": _modules(value)})
    _take(given, out, "quantization_bit", lambda value: {f"load_in_{value}bit": True})
    _take(given, out, "pref_loss", lambda value: {"loss_type": [value]})
    learns_all = bool(given.pop("train_on_prompt", False)) or stage == "pt"
    names, place, most = given.pop("dataset", ""), given.pop("dataset_dir", "data"), given.pop("max_samples", None)
    if not names:
        return
    table = next((file for at in (Path.cwd(), folder) if (file := at / place / "dataset_info.json").is_file()), None)
    info: dict[str, Any] = json.loads(table.read_text(encoding="utf-8")) if table else {}
    entries, formats = [], set()
    for name in [one.strip() for one in names.split(",")] if isinstance(names, str) else names:
        about = info.get(name, {})
        if not about:
            out.without[f"dataset {name}"] = f"name its file or hub name: no {place}/dataset_info.json here has it"
        local = about.get("file_name")
        path = str(table.parent / local) if table and local else about.get("hf_hub_url", name)
        entries.append({"path": path} | ({"split": f"train[:{most}]"} if most else {}))
        formats.add(about.get("formatting", "alpaca"))
        if "columns" in about or "tags" in about:
            out.without[f"columns of {name}"] = f"{short_repr(about.get('columns') or about['tags'])}: rename them"
    out.values |= {"datasets": entries} | _format(formats, out, learns_all)
    out.mapped["dataset"] = "datasets"


def _unsloth(given: dict[str, Any], out: Converted, folder: Path) -> None:
    if not given.pop("full_finetuning", False) and ("r" in given or given.get("load_in_4bit")):
        out.values["use_peft"] = True
        given.setdefault("lora_dropout", 0.0)


def _modules(value: Any) -> Any:
    names = value.split(",") if isinstance(value, str) else value
    return "all-linear" if names == ["all"] else [name.strip() for name in names]


def _method(command: str) -> Method:
    if command not in METHODS:
        raise UserError(f"a training {command!r} has no command here: there are {', '.join(METHODS)}")
    return METHODS[command]


def _per_epoch(when: str, count: float, epochs: float) -> dict[str, Any]:
    """Return a strategy: once an epoch, or a part of all steps, as transformers reads numbers below 1."""
    if count == 1:
        return {f"{when}_strategy": "epoch"}
    return {f"{when}_strategy": "steps", f"{when}_steps": 1 / (count * epochs)}


def _fit_evaluation(values: dict[str, Any]) -> None:
    """Without data to evaluate on there is no evaluation."""
    if not values.get("test_split_size"):
        for name in ("test_split_size", "eval_strategy", "eval_steps", "eval_packing"):
            values.pop(name, None)
