"""Translate configs of Axolotl, LLaMA-Factory and Unsloth-style scripts by the tables in ``foreign.yaml``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from fastpack_trl.errors import UserError, command_line, one_line, short_repr
from fastpack_trl.recipe.methods import METHODS, SFT, Method
from fastpack_trl.recipe.yaml import comment, dump

_TABLES = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
_KEYS: dict[str, dict[str, str | Mapping[object, Mapping[str, Any]]]] = _TABLES["keys"]
_ANY_TOOL, *_TOOLS = _KEYS
OTHER_NAMES = {key: to for keys in _KEYS.values() for key, to in keys.items() if isinstance(to, str)}
"""Names that other tools and older versions of TRL give to an option."""
_PLAIN = {(key, word) for words, keys in _TABLES["plain"] for key in keys.split() for word in words.split()}
GROUPS = NEEDS_YOU, DROPPED, _ = "needs you", "dropped safely", "automatic here"
_NUMBER = int | float
_DATA_KEYS = dict.fromkeys(("path", "name", "split", "data_dir"), str) | {"data_files": str | list | Mapping}


@dataclass(slots=True)
class Converted:
    """A YAML of another tool in our names: ``sequence_len: 64`` -> ``values["max_length"] = 64``."""

    tool: str
    method: Method = SFT
    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    """Our name -> the key that gave the value."""
    notes: dict[str, tuple[str, str]] = field(default_factory=dict)
    """A key whose value is not taken -> its group of `GROUPS`, and the value with the reason."""

    def note(self, key: str, group: str, value: Any, reason: str) -> None:
        """Say why a value is not taken."""
        self.notes[key] = group, reason if "secret" in reason else f"{short_repr(value)} ({reason})"

    def lines(self) -> Iterator[str]:
        """Return the keys whose values are not taken, by group."""
        for group in GROUPS:
            lines = [f"  {one_line(f'{key:.80}: {text}')}" for key, (of, text) in self.notes.items() if of == group]
            yield from [f"{group} ({len(lines)}):", *lines] if lines else []

    def text(self, source: str, file: str) -> str:
        """Return the text of `file`: the values, and all else as comments."""
        head = comment(f"{source}, of {self.tool}, in the names of fastpack-trl:")
        head += comment(f"    {command_line(self.method.command, '--config', file)}")
        return f"{head}\n{dump(self.values)}\n{''.join(map(comment, self.lines()))}"

    def take(self, key: str, value: Any, hints: Mapping[str, str], label: str = "") -> None:
        """Put the value of a key, which the reader knows as `label`, under our name, or note why not."""
        label, to = label or key, (_KEYS[_ANY_TOOL] | _KEYS[self.tool]).get(key, key)
        rules = [rule for *rule, keys in _TABLES["rules"] if any(fnmatchcase(key, one) for one in keys.split())]
        group, reason = rules[-1] if rules else (NEEDS_YOU, "no equivalent")
        if isinstance(to, Mapping):
            single = value[0] if isinstance(value, list) and len(value) == 1 else value
            for one, ours in to.items():
                if type(one) is type(single) and one == single:
                    for name, each in ours.items():
                        self._put(name, each, key, label)
                    return None if ours else self.note(label, DROPPED, value, "the same happens here")
            if not rules and not isinstance(value, list) and type(single) not in map(type, to):
                raise UserError(f"{label}={short_repr(value)} must be one of {', '.join(map(str, to))}")
        elif to in hints and not rules:
            parts = value if isinstance(value, list) else [value] * (not isinstance(value, Mapping))
            if not all(isinstance(part, str | int | float | date) for part in parts):
                raise UserError(f"{label}={short_repr(value)} must be a single value, or a list of them")
            return self._put(to, _as_list(value, hints[to]), key, label)
        is_off = not value or value == "none"
        if group == NEEDS_YOU and is_off and not key.startswith(("enable_thinking", "finetune_", "freeze_")):
            group, reason = DROPPED, "off"
        return self.note(label, group, value, reason)

    def _put(self, to: str, value: Any, key: str, label: str) -> None:
        """Set an option, unless another key has given it another value."""
        if to == "lora_target_modules" and isinstance(value, list) and len(value) == 1:
            # TRL gives PEFT a single name as text, which PEFT reads as a regular expression of the whole name.
            one = "all-linear" if value == ["all"] else str(value[0])
            value = rf"(.*\.)?{one}" if one.isidentifier() else one
        if (other := self.origins.get(to)) and self.values[to] and self.values[to] != value:
            return self.note(label, NEEDS_YOU if value else DROPPED, value, f"{other} gives {to}")
        self.values[to], self.origins[to] = value, key
        return None


def _as_list(value: Any, hint: str) -> Any:
    """Return text as the list that an option of this type takes: ``"q_proj, v_proj"`` -> ``["q_proj", "v_proj"]``."""
    names = [name.strip() for name in value.split(",") if name.strip()] if isinstance(value, str) else []
    if "list" not in hint or not names or (len(names) == 1 and "str |" in hint):
        return value
    # a regular expression may contain commas
    return names if all(re.fullmatch(r"[\w./-]+", name) for name in names) else [value]


def tool_of(keys: Mapping[str, Any]) -> str:
    """Return the tool whose YAML has these keys: ``"Axolotl"``, ``"LLaMA-Factory"``, ``"Unsloth"``; empty for none."""
    signs = {tool: {*_KEYS[tool], *_TABLES["signs"][tool]}.difference(_TABLES["generic"]) for tool in _TOOLS}
    matches = {tool: len(signs[tool] & {*keys, *_flat(keys)}) for tool in _TOOLS}
    best = max(matches, key=lambda tool: matches[tool])
    return best if matches[best] >= 2 else ""


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of sections with those of the top: ``{"lora": {"r": 8}}`` -> ``{"r": 8}``."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        flat |= value if key in _TABLES["sections"] and isinstance(value, Mapping) else {key: value}
    return {str(key): value for key, value in flat.items()}


def _pop(given: dict[str, Any], key: str, kind: Any, default: Any) -> Any:
    """Return and remove a value of this type; raise `UserError` for another, or for a number below 0."""
    value = given.pop(key, default)
    is_kind = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
    if not is_kind or (isinstance(value, _NUMBER) and not 0 <= value < 2**31):
        name = getattr(kind, "__name__", kind)
        raise UserError(f"{key}={short_repr(value)} must be {name}{' >= 0' * (kind in (int, _NUMBER))}")
    return value


def convert(config: Mapping[str, Any], folder: Path) -> Converted:
    """Map every key of a YAML in `folder`; LLaMA-Factory's ``dataset_info.json`` is looked for there and here.

    Raises `UserError` for a YAML of no tool that is known here, for a training that TRL has no command for, and for
    wrong types; `arguments.check` refuses wrong values.
    """
    tool = tool_of(config)
    if not tool:
        raise UserError(f"not a config of {', '.join(_TOOLS)}: its keys are {', '.join(list(config)[:8])}")
    given = {key: value for key, value in _flat(config).items() if value not in (None, "", "auto", [], {})}
    for key in given.keys() & {*_TABLES["sections"]} - {"model"}:
        raise UserError(f"{key}={short_repr(given[key])} must be a mapping of settings")
    kind = given.pop("rl", given.pop("stage", "sft"))
    kind = "reward" if given.pop("reward_model", False) is True else kind
    command = {"pt": "sft", "rm": "reward", "ipo": "dpo"}.get(str(kind), str(kind))
    if command not in METHODS:
        raise UserError(f"{short_repr(kind)} training is not supported: use one of {', '.join(METHODS)}")
    values: dict[str, Any] = {"loss_type": ["ipo"]} if kind == "ipo" else {}
    out = Converted(tool, METHODS[command], values)
    if tool == "LLaMA-Factory" and given.setdefault("finetuning_type", "lora") == "lora":
        given.setdefault("lora_alpha", 2 * _pop({**given}, "lora_rank", int, given.setdefault("lora_rank", 8)))
    if tool == "LLaMA-Factory" and given.get("quantization_bit"):
        given.setdefault("double_quantization", True)
    whole = given.get("full_finetuning") or given.get("training_type") == "full"
    if tool == "Unsloth" and not whole and (given.keys() & {"r", "lora_r"} or given.get("load_in_4bit")):
        values["use_peft"] = True
    learns_prompts = _pop(given, "train_on_inputs", bool, _pop(given, "train_on_prompt", bool, kind == "pt"))
    for when in ("eval", "save"):  # steps below 1 are a part of all steps
        count, epochs = _pop(given, f"{when}s_per_epoch", _NUMBER, 0), _pop({**given}, "num_epochs", _NUMBER, 1)
        if count * epochs:
            steps = {f"{when}_strategy": "steps", f"{when}_steps": 1 / (count * epochs)}
            values |= {f"{when}_strategy": "epoch"} if count == 1 else steps
    for plugin in _pop(given, "plugins", list, []):
        out.take(str(plugin), True, {}, f"plugins {plugin}")
    _add_data(given, out, folder, learns_prompts)
    kinds = out.method.dataclasses(quick=True)
    hints = {name: str(kind) for own in kinds for name, kind in get_type_hints(own).items()}
    for key, value in given.items():
        out.take(key, value, hints)
    _add_defaults(given, out, hints, str(kind))
    if not values.get("test_split_size"):
        for name in [name for name in values if name.startswith(("eval_", "test_split"))]:
            out.note(name, DROPPED, values.pop(name), "no data is held out")
    if values.get("use_peft"):
        values.setdefault("lora_dropout", 0.0)  # TRL's default is 0.05
    return out


def _add_defaults(given: Mapping[str, Any], out: Converted, hints: Mapping[str, str], kind: str) -> None:
    """Take the tool's own defaults that differ from TRL's, where a config does not say otherwise."""
    for key, value in _TABLES["defaults"].get(out.tool, {}).items():
        to = _KEYS[out.tool].get(key, _KEYS[_ANY_TOOL].get(key, key))
        is_given = key in given or (isinstance(to, str) and to in out.values)
        if not is_given and (out.values.get("use_peft") or not key.startswith("lora_")):
            out.take(key, value, hints)
    if kind == "pt":  # plain text
        out.values.setdefault("packing", True)
        out.values.pop("dataset_format", None)
    if out.tool != "Unsloth":
        return
    if out.values.get("dataset_format") == "alpaca" and not given.get("train_on_completions"):
        out.values["completion_only_loss"] = False
    length = "max_steps" if "max_steps" in out.values else "num_train_epochs"
    usual = ["learning_rate", length, "per_device_train_batch_size", "gradient_accumulation_steps"]
    usual += ["warmup_steps"] + ["lora_r", "lora_alpha", "lora_target_modules"] * bool(out.values.get("use_peft"))
    if lacking := [name for name in usual if name not in out.values]:
        out.note("defaults", NEEDS_YOU, ", ".join(lacking), "not in this file: here TRL's defaults count")


def _of_table(given: dict[str, Any], out: Converted, folder: Path) -> list[dict[str, Any]]:
    """Return the entries that LLaMA-Factory's ``dataset_info.json`` has of the data sets of a config."""
    place, most = _pop(given, "dataset_dir", str, "data"), _pop(given, "max_samples", int, 0)
    names, entries = given.pop("dataset", []) if out.tool == "LLaMA-Factory" else [], []
    try:
        files = [at / place / "dataset_info.json" for at in (Path.cwd(), folder)]
        table = next((file for file in files if file.is_file()), folder)
        info = json.loads(table.read_text(encoding="utf-8")) if names and table.is_file() else {}
        for name in map(str.strip, _as_list(names, "list")):
            about = dict(info.get(name, {}))
            if not about.keys() & {"file_name", "hf_hub_url"}:
                reason = f"no file_name or hf_hub_url in {place}/dataset_info.json: name its file or hub name"
                out.note(f"dataset {name}", NEEDS_YOU, name, reason)
            if "images" in str(about.get("columns")):
                given.setdefault("freeze_vision_tower", True)
                given.setdefault("media_dir", place)
                out.note(f"dataset {name} images", NEEDS_YOU, "<image>", "take it out of the text: TRL adds it")
            if "num_samples" in about:
                out.note(f"dataset {name} num_samples", NEEDS_YOU, about["num_samples"], "name a split: train[:N]")
            path = str(table.parent / about["file_name"]) if "file_name" in about else about.get("hf_hub_url", name)
            entry = {"path": path, "type": about.get("formatting", "alpaca")}
            ours = {"subset": "name", "folder": "data_dir", "split": "split", "columns": "columns", "tags": "tags"}
            entry |= {ours[key]: about[key] for key in ours if key in about}
            entries.append(entry | ({"split": f"{about.get('split', 'train')}[:{most}]"} if most else {}))
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"dataset={short_repr(names)}: dataset_info.json has no such entry: {error}") from error
    return entries


def _add_data(given: dict[str, Any], out: Converted, folder: Path, learns_prompts: bool) -> None:
    """Take the data sets of a config: their paths, their format, and which tokens the loss counts."""
    entries = [*_pop(given, "datasets", list, []), *_of_table(given, out, folder)]
    kinds = set[str]()
    for entry in [*entries]:
        fits = isinstance(entry, Mapping) and entry.get("path")
        if not fits or not all(isinstance(entry.get(key) or "", kind) for key, kind in _DATA_KEYS.items()):
            raise UserError(f"datasets: {short_repr(entry)} must be a mapping of text, such as `path: data.jsonl`")
        if entry["path"] == "pandas":
            entries.remove(entry)
            out.note("datasets path", NEEDS_YOU, "pandas", "loads pickles, which run code: convert them to JSON lines")
        maps = [value for value in entry.values() if isinstance(value, Mapping)]
        roles = [entry.get("message_field_role"), *(one.get(key) for one in maps for key in ("role", "role_tag"))]
        kind = str(entry.get("type", "")).partition(".")[0]
        kinds.add("sharegpt" if "from" in roles else "chat_template" if "role" in roles else kind)
        for key in sorted(map(str, entry.keys() - _DATA_KEYS.keys() - {"type"})):
            value = entry.get(key)
            words = value if isinstance(value, Mapping) else {key: value}
            if not key.startswith(("field", "message_", "columns", "tags")):
                out.take(key, value, {}, f"datasets {key}")
            elif all(not word or (name, str(word)) in _PLAIN for name, word in words.items()):
                out.note(f"datasets {key}", DROPPED, value, "read as it is")
            else:
                out.note(f"datasets {key}", NEEDS_YOU, value, "rename the columns in the data")
            if words.get("history") and not given.get("mask_history"):
                reason = "here its answers are prompt: make it `messages` with assistant_only_loss to train them"
                out.note(f"datasets {key} history", NEEDS_YOU, words["history"], reason)
    if entries:
        out.values["datasets"] = [{key: one[key] for key in one if key in _DATA_KEYS and one[key]} for one in entries]
    if len(kinds) > 1 or kinds - {"", "alpaca", "sharegpt", "chat_template", "completion"}:
        out.note("datasets type", NEEDS_YOU, sorted(kinds), "convert the data to one format, e.g. a column `messages`")
    if kinds in ({"alpaca"}, {"sharegpt"}):
        (out.values["dataset_format"],) = kinds
    if kinds == {"chat_template"} and out.method.command == "dpo":
        out.values["dataset_format"] = "sharegpt"  # TRL reads no `messages` beside `chosen` and `rejected`
    alpaca = kinds == {"alpaca"}
    if alpaca and out.tool == "Axolotl":
        reason = "its text around instructions ('Below is an instruction') becomes the model's chat template"
        out.note("datasets type", NEEDS_YOU, "alpaca", reason)
    if out.tool != "Unsloth" and out.method is SFT and kinds != {"completion"} and learns_prompts == alpaca:
        out.values["completion_only_loss" if alpaca else "assistant_only_loss"] = not learns_prompts
