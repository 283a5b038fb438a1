"""The help of commands that train: our options first, in groups, then TRL's; and what was meant by a wrong name."""

from __future__ import annotations

from argparse import SUPPRESS, Action, HelpFormatter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from typing import Any

from fastpack_trl.errors import did_you_mean
from fastpack_trl.recipe.formats import DataArguments

EPILOG = (
    "--config FILE reads a YAML whose keys are the options above; flags win over it. Options of `accelerate launch` "
    "(num_processes, mixed_precision, ...) and accelerate_config are accepted in both, `env` (a mapping of environment "
    "variables) in the YAML. A feature that is given a value by name, such as on, stops training where it cannot be "
    "had; auto trains without it."
)
COMMAND_OPTIONS: Mapping[str, str] = {
    "--config FILE": "a YAML of settings; `fastpack-trl init NAME` writes one",
    "--accelerate_config NAME": "start several processes by a config of TRL's (fsdp2, zero2, multi_gpu, ...) or a file",
    "--verbose": "the banner says why each feature is off (also: FASTPACK_VERBOSE=1)",
    "--traceback": "show the traceback of an error that is otherwise one line (also: FASTPACK_TRACEBACK=1)",
    "-h, --help": "this text",
    "--help-all": "this text, and every option of TRL",
}
"""Options of the command itself, which no dataclass has."""
GROUPS: Mapping[str, tuple[str, ...]] = {
    "Packing, of fastpack-trl": (
        "packed_attention", "share_prefixes", "verify_packing",
    ),
    "Memory, of fastpack-trl": (
        "activation_memory", "activation_memory_gib", "checkpoint_offload",
    ),
    "LoRA and experts, of fastpack-trl": ("lora", "cache_dequantized", "moe", "moe_quantize_experts"),
    "The step, of fastpack-trl": ("sync_free", "merge_accumulation", "layer_compile", "cuda_graph"),
    "The report, of fastpack-trl": ("save_report",),
}  # fmt: skip
"""Titles and fields of `Settings`; one that is in none of them comes under a title of its own."""
_LONGEST = 50  # characters of choices beside the name of an option
_ELSEWHERE: Mapping[str, str] = {
    "model": "model_name_or_path", "base_model": "model_name_or_path", "torch_dtype": "dtype",
    "dataset": "dataset_name", "attn": "packed_attention", "lr": "learning_rate", "epochs": "num_train_epochs",
    "batch_size": "per_device_train_batch_size", "micro_batch_size": "per_device_train_batch_size",
    "gradient_accumulation": "gradient_accumulation_steps", "output": "output_dir",
    "resume": "resume_from_checkpoint", "max_seq_length": "max_length", "sequence_len": "max_length",
    "sample_packing": "packing",
}  # fmt: skip
"""Names that other tools and older versions of TRL give to an option."""


def meant(name: str, valid: Iterable[str]) -> str:
    """Return ``"; did you mean '--max_length'?"`` for a wrong option or key; empty if none is near."""
    dashes = "--" if name.startswith("--") else ""
    bare = name.removeprefix("--")
    if (known := _ELSEWHERE.get(bare.replace("-", "_"))) is not None:
        return f"; did you mean '{dashes}{known}'?"
    if dashes:  # options have two spellings: name them in the user's
        valid = [one for one in valid if ("_" if "-" in bare else "-") not in one.removeprefix("--")]
    return did_you_mean(name, valid)


class _Formatter(HelpFormatter):
    """One spelling of each option, its choices, and its default where it has one."""

    def _format_action_invocation(self, action: Action) -> str:
        shown = action.option_strings[0]
        if action.nargs == 0:
            return shown
        choices = _listed(action)
        if len(choices) >= _LONGEST:  # the text names all
            choices = f"{choices[: _LONGEST // 2].rpartition(',')[0]},..."
        return f"{shown} {{{choices}}}" if choices else f"{shown} {action.dest.upper()}"

    def _expand_help(self, action: Action) -> str:
        if action.option_strings[0].startswith("--no_"):
            return f"--{action.dest} False"
        text = (action.help or "").replace("%%", "%")
        choices, default = _listed(action), getattr(action.default, "value", action.default)
        if len(choices) >= _LONGEST and choices.split(",")[1] not in text:
            text += f" One of {choices.replace(',', ', ')}."
        return text if default in (None, SUPPRESS, "") else f"{text} (default: {default})"


def _listed(action: Action) -> str:
    return ",".join(map(str, action.choices or ()))


def write_help(parser: Any, *, whole: bool = True) -> str:
    """Return the help of TRL's parser in groups: the command's own options, ours, then, `whole`, those of TRL."""
    formatter = _Formatter(prog=parser.prog, width=80)
    formatter.add_text(f"usage: {parser.prog} --config FILE [--OPTION VALUE ...]")
    stock = parser.prog.replace("fastpack-trl", "trl")
    formatter.add_text(f"Train with every option of `{stock}`, and those of fastpack-trl.")
    command = [Action([name], name, nargs=0, help=text) for name, text in COMMAND_OPTIONS.items()]
    left = 0
    for title, actions in (("Command", command), *_groups(parser)):
        if not whole and "of TRL" in title:
            left += len(actions)
            continue
        formatter.start_section(title)
        formatter.add_arguments(actions)
        formatter.end_section()
    if left:
        formatter.add_text(f"{left} options of `{stock}` are accepted as well: --help-all lists them.")
    formatter.add_text(EPILOG)
    return formatter.format_help()


def _groups(parser: Any) -> Iterator[tuple[str, list[Action]]]:
    (config,) = (kind for kind in parser.dataclass_types if kind.__name__.startswith("Fast"))
    of_trl = {field.name for field in fields(config.__bases__[-1])}
    ours = [field.name for field in fields(config) if field.name not in of_trl]
    named = {name for names in GROUPS.values() for name in names}
    left = {"More, of fastpack-trl": tuple(name for name in ours if name not in named)}
    for title, members in {**GROUPS, **left}.items():
        if actions := [action for name in members for action in parser._actions if action.dest == name]:
            yield title, actions
    for kind in parser.dataclass_types:
        names = [field.name for field in fields(kind) if field.name not in ours]
        title = f"{kind.__name__}, of TRL"
        if kind is DataArguments:
            title = "Data, of fastpack-trl"
        if kind is config:
            title = f"Training, of TRL's {kind.__name__.removeprefix('Fast')}"
        yield title, [action for action in parser._actions if action.dest in names]
