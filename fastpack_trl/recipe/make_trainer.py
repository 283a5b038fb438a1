"""Make a trainer from parsed arguments; settings and data are checked before the weights are read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from inspect import getfullargspec, isfunction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastpack_trl.errors import DataError, UserError, describe, naming_keys, preparing, short_repr
from fastpack_trl.packing.columns import column_fault
from fastpack_trl.recipe.arguments import Arguments, as_flags, parse, split_off
from fastpack_trl.recipe.data import data_name, load_data
from fastpack_trl.recipe.formats import reshape
from fastpack_trl.recipe.methods import SFT, Method, method_of
from fastpack_trl.recipe.paths import missing_hint, model_folder
from fastpack_trl.recipe.yaml import load_config

if TYPE_CHECKING:
    from transformers import TrainerCallback

_OVERLONG = "get_soft_overlong_punishment"
_REWARDS_OF_TRL = f"accuracy_reward, reasoning_accuracy_reward, think_format_reward, {_OVERLONG}"
_TRL_GIVES = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}
_REPORTERS = {"clearml", "codecarbon", "comet_ml", "dvclive", "mlflow", "neptune", "swanlab", "trackio", "wandb"}
"""Targets of `report_to` that are names of packages."""
_HEADS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")


def short_run_arguments(config: str, folder: str, *flags: str, may_launch: bool = False) -> Arguments:
    """Return the arguments of a YAML for a short run that writes to `folder` only, without reports and evaluation.

    `flags` win over both, and ``--trainer dpo`` among them says which command it is for (default: as its keys say).
    Raises `UserError` as `parse`.
    """
    own = {
        "config": config, "output_dir": folder, "report_to": "none", "save_strategy": "no", "eval_strategy": "no",
        "eval_on_start": False, "load_best_model_at_end": False, "push_to_hub": False, "disable_tqdm": True,
    }  # fmt: skip
    with preparing():
        _, others = split_off("trainer", flags)
        arguments = parse([*as_flags(own), *others], method_of_run(config, flags), may_launch=may_launch)
    arguments.training.resume_from_checkpoint = None
    return arguments


def method_of_run(config: str, flags: Sequence[str] = ()) -> Method:
    """Return the method of a YAML: the one that ``--trainer`` names, else the one that its keys fit."""
    named, _ = split_off("trainer", flags)
    return method_of(load_config(config), *named[-1:])


def make_trainer(
    arguments: Arguments,
    callbacks: Sequence[TrainerCallback] | None = None,
    trainer_class: Callable[..., Any] | None = None,
) -> Any:
    """Check, load and construct: return the trainer, by default that of the method, before its first step.

    Raises `UserError` for what the user has to change. What the libraries raise passes: `preparing` converts it.
    """
    from transformers.quantizers.auto import AutoQuantizationConfig
    from trl import get_peft_config, get_quantization_config

    method, script, training, model = arguments.method, arguments.script, arguments.training, arguments.model
    check_settings(arguments)
    of_method: dict[str, Any] = {"reward_funcs": _load_rewards(script)} if method.scores_rewards else {}
    splits, name = load_data(script, arguments.mixture), data_name(script, arguments.mixture)
    roles = ("train",) if training.eval_strategy == "no" else ("train", "eval")
    with naming_data(name):
        data = {role: _take_split(splits, role, arguments) for role in roles}
        for reward in filter(isfunction, of_method.get("reward_funcs", ())):
            own, row = getfullargspec(reward), next(iter(data["train"]))
            needs = own.args[: len(own.args) - len(own.defaults or ())]
            if lacking := [column for column in needs if column not in row.keys() | _TRL_GIVES]:
                raise DataError(f"reward {reward.__name__} needs a column {lacking[0]!r}: there are {', '.join(row)}")
    given = dict(training.model_init_kwargs or {})
    training.model_init_kwargs = {
        "revision": model.model_revision, "trust_remote_code": training.trust_remote_code,
        "attn_implementation": model.attn_implementation, "dtype": model.dtype,
    } | given  # fmt: skip
    if isinstance(quantization := given.get("quantization_config"), Mapping):
        # `from_pretrained` compares classes if the checkpoint itself is quantized, as gpt-oss is.
        quantization = AutoQuantizationConfig.from_dict(dict(quantization))
        training.model_init_kwargs["quantization_config"] = quantization
    with naming_data(name), naming_keys({"model_init_kwargs": given}):
        trainer = (trainer_class or method.classes[0])(
            model=model.model_name_or_path, args=training, train_dataset=data["train"], eval_dataset=data.get("eval"),
            callbacks=list(callbacks or ()), quantization_config=get_quantization_config(model),
            peft_config=get_peft_config(model), **of_method,
        )  # fmt: skip
    tokenizer = getattr(trainer.processing_class, "tokenizer", trainer.processing_class)
    is_tokenized = {"input_ids", "chosen_ids"} & next(iter(data["train"])).keys()
    if not is_tokenized and not tokenizer("text", add_special_tokens=False)["input_ids"]:
        # transformers makes an empty one for some families if its files are missing
        raise UserError(f"the tokenizer of {model.model_name_or_path!r} produces no tokens: its files are missing")
    if method.command == "dpo" and script.ignore_bias_buffers:
        import torch

        masks = [name for name, buffer in trainer.model.named_buffers() if buffer.dtype == torch.bool]
        trainer.model._ddp_params_and_buffers_to_ignore = masks
    return trainer


def check_settings(arguments: Arguments, *, runs: bool = True) -> None:
    """Check what can be checked without reading data or weights; normalize the model's name and the resume folder.

    Raises `UserError` with the setting, its value and the fix; with `runs`, also for a package that is not here.
    """
    training, model = arguments.training, arguments.model
    for field in ("load_in_4bit", "load_in_8bit"):
        if runs and getattr(model, field) and find_spec("bitsandbytes") is None:
            raise UserError(f"{field}=True needs bitsandbytes: pip install 'fastpack-trl[qlora]'")
    for name in training.report_to:  # transformers raises for it after the weights are loaded
        if name in _REPORTERS and find_spec(name) is None:
            raise UserError(f"report_to={name!r} is not installed: pip install {name}, or set report_to: none")
    if training.eval_on_start and training.eval_strategy == "no":
        raise UserError("eval_on_start=True evaluates nothing: set eval_strategy to steps or epoch, or leave it out")
    if model.use_peft and arguments.method.command == "reward" and model.lora_task_type != "SEQ_CLS":
        raise UserError(f"lora_task_type={model.lora_task_type!r} is for language models: a reward model needs SEQ_CLS")
    _check_paths(training)
    if not model.model_name_or_path:
        raise UserError("no model: set model_name_or_path to a hub name such as Qwen/Qwen3-0.6B or to a folder")
    model.model_name_or_path = model_folder("model_name_or_path", model.model_name_or_path)
    options = {"revision": model.model_revision, "trust_remote_code": training.trust_remote_code}
    check_model(model.model_name_or_path, options, method=arguments.method)


def _check_paths(training: Any) -> None:
    """Check that ``output_dir`` can be made and that ``resume_from_checkpoint`` names a complete checkpoint."""
    from fastpack_trl.model.preflight import checkpoints, choose_checkpoint, unwritable

    output, resume = str(training.output_dir), training.resume_from_checkpoint
    if training.should_save and (reason := unwritable(Path(output))):
        raise UserError(f"output_dir={output!r}: {reason}")
    if str(resume).lower() in ("true", "false"):
        # The command line hands over text; the trainer takes the boolean ("the last checkpoint in output_dir").
        resume = training.resume_from_checkpoint = str(resume).lower() == "true"
    if isinstance(resume, str) and not Path(resume).is_dir():
        raise UserError(f"resume_from_checkpoint={resume!r} is not a folder: pass a checkpoint, or true for the newest")
    if resume is True and not checkpoints(output):
        raise UserError(f"output_dir={output!r} has no checkpoint-N folder: leave resume_from_checkpoint out")
    choose_checkpoint(resume, output)  # the choice is reported when training starts


def check_model(
    name: str, options: Mapping[str, Any], option: str = "model_name_or_path", method: Method = SFT
) -> None:
    """Check by its ``config.json`` that a checkpoint is a causal language model; for rewards, or a classifier.

    `options` are keywords with which it is loaded; the `UserError` names the `option` that the user gave it to.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(name, **options)
    except Exception as error:  # a damaged file may raise anything
        fault = f"no such folder{missing_hint(name)}, and on the hub: {describe(error).rstrip('.')}"
        if Path(name).exists():
            fault = f"{describe(error).rstrip('.')}; correct its config.json"
        raise UserError(f"{option} {name!r} cannot be used: {fault}") from error
    heads = (*_HEADS, "ForSequenceClassification") if method.command == "reward" else _HEADS
    kind = str((config.architectures or ["a model without a head"])[0])
    # A class that comes with the checkpoint may have any name; its `auto_map` names its kind.
    if getattr(config, "is_encoder_decoder", False) or not (kind.endswith(heads) or hasattr(config, "auto_map")):
        needs = f"{method.what} needs a causal language model (...ForCausalLM)"
        raise UserError(f"{option} {name!r} is {kind} (model_type {config.model_type!r}): {needs}")


def _take_split(splits: Mapping[str, Any], role: str, arguments: Arguments) -> Any:
    """Return the split to train or evaluate on; raise if it is missing or empty, or of columns of another method."""
    field = f"dataset_{role.replace('eval', 'test')}_split"
    name, training, method = getattr(arguments.script, field), arguments.training, arguments.method
    if name not in splits:
        why = ", or eval_strategy: no (evaluation needs rows of its own)" * (role == "eval")
        raise UserError(f"{field}={short_repr(name)}: no such split: set it to one of {', '.join(splits)}{why}")
    if next(iter(splits[name]), None) is None:
        raise UserError(f"{field}={short_repr(name)}: the split is empty: check the file, or choose another split")
    split = reshape(splits[name], role, arguments.data.dataset_format, method.command)
    is_prepared = method is SFT and (training.dataset_kwargs or {}).get("skip_prepare_dataset")
    if not is_prepared and (fault := column_fault(next(iter(split)), role, method.command, training)):
        raise DataError(fault)
    return split


@contextmanager
def naming_data(name: str) -> Iterator[None]:
    """Put the name of the data into errors about examples and templates."""
    try:
        yield
    except DataError as error:
        raise UserError(f"data {short_repr(name)}: {error}") from error


def _load_rewards(script: Any) -> list[str | Callable[..., Any]]:
    """Return the rewards that ``reward_funcs`` and ``reward_model_name_or_path`` name, as ``trl/scripts/grpo.py``."""
    model, known = script.reward_model_name_or_path, f"{_REWARDS_OF_TRL}, or functions of yours (my_module.reward)"
    if not model and not script.reward_funcs:
        raise UserError(f"no reward: set reward_funcs to some of {known}, or reward_model_name_or_path to a model")
    rewards: list[Any] = [model_folder("reward_model_name_or_path", model)] if model else []
    sys.path.insert(0, str(Path.cwd()))  # as TRL's scripts do
    for name in script.reward_funcs or ():
        module, _, function = name.rpartition(".")
        try:
            reward = getattr(import_module(module or "trl.rewards"), function)
        except (ImportError, AttributeError) as error:
            raise UserError(f"reward_funcs={name!r}: {describe(error)}: name some of {known}") from error
        rewards.append(reward(max_completion_len=1280, soft_punish_cache=256) if name == _OVERLONG else reward)
    return rewards
