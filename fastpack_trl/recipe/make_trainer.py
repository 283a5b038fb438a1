"""From parsed arguments to a trainer: settings, tokenizer and data are checked before the weights are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from fastpack_trl.errors import SETTING_ERRORS, DataError, UserError, naming_keys, nearest, preparing, short_repr
from fastpack_trl.recipe import checks
from fastpack_trl.recipe.arguments import Arguments, as_flags, parse, split_off
from fastpack_trl.recipe.data import data_name, load_data
from fastpack_trl.recipe.formats import reshape
from fastpack_trl.recipe.methods import SFT, Method, method_of
from fastpack_trl.recipe.rewards import check_reward_columns, load_rewards
from fastpack_trl.recipe.rows import check_rows, take_split
from fastpack_trl.recipe.yaml import load_config

if TYPE_CHECKING:
    from transformers import TrainerCallback
    from trl import ModelConfig


def short_run_arguments(config: str, folder: str, *flags: str) -> Arguments:
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
        arguments = parse([*as_flags(own), *others], method_of_run(config, flags), may_launch=False)
    arguments.training.resume_from_checkpoint = None
    return arguments


def method_of_run(config: str, flags: Sequence[str] = ()) -> Method:
    """Return the method of a YAML: what ``--trainer`` among the flags says, else what its keys say."""
    named, _ = split_off("trainer", flags)
    return method_of(load_config(config), *named[-1:])


def make_trainer(
    arguments: Arguments,
    callbacks: Sequence[TrainerCallback] | None = None,
    trainer_class: Callable[..., Any] | None = None,
) -> Any:
    """Check, load and construct: return the trainer before its first step.

    Args:
        trainer_class: default: the one of the method.

    Raises:
        UserError: a setting, file or model that the user has to change. What the libraries raise for others passes;
            inside `preparing` it becomes a `UserError` too.
    """
    import torch
    from trl import get_peft_config, get_quantization_config

    method = arguments.method
    script, training, model = arguments.script, arguments.training, arguments.model
    init = checks.check_settings(arguments)
    of_method: dict[str, Any] = {"reward_funcs": load_rewards(script)} if method.scores_rewards else {}
    name = str(model.model_name_or_path)
    processing_class = checks.load_tokenizer(name, training, init)
    quantization_config, peft_config = get_quantization_config(model), get_peft_config(model)
    splits, named = load_data(script, arguments.mixture), data_name(script, arguments.mixture)
    train_dataset = take_split(splits, script.dataset_train_split, "dataset_train_split")
    eval_dataset = None
    if training.eval_strategy != "no":
        why = f" (needed by eval_strategy={training.eval_strategy.value!r})"
        eval_dataset = take_split(splits, script.dataset_test_split, "dataset_test_split", why)
    with naming_data(named):
        wanted = arguments.data.dataset_format
        train_dataset = reshape(train_dataset, "train", wanted)
        eval_dataset = None if eval_dataset is None else reshape(eval_dataset, "eval", wanted)
        for split, what in ((eval_dataset, "eval"), (train_dataset, "train")):
            if split is not None:
                check_rows(split, what, training, processing_class, method)
                check_reward_columns(of_method.get("reward_funcs", ()), next(iter(split)))
    if method is SFT:
        of_method["processing_class"] = processing_class  # others load it with sides of padding of their own

    given = {"model_init_kwargs": training.model_init_kwargs}
    training.model_init_kwargs = init
    with naming_data(named), naming_keys(given), _lora_targets(model, init):
        trainer = (trainer_class or method.trainer)(
            model=name,
            args=training,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            callbacks=list(callbacks or ()),
            quantization_config=quantization_config,
            peft_config=peft_config,
            **of_method,
        )
    if method.command == "dpo" and script.ignore_bias_buffers:
        from torch.nn.parallel import DistributedDataParallel

        masks = [name for name, buffer in trainer.model.named_buffers() if buffer.dtype == torch.bool]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(trainer.model, masks)
    return trainer


@contextmanager
def naming_data(named: str) -> Iterator[None]:
    """Put the name of the data into errors about rows and templates."""
    try:
        yield
    except DataError as error:
        raise UserError(f"data {short_repr(named)}: {error}") from error


@contextmanager
def _lora_targets(model: ModelConfig, init: Mapping[str, Any]) -> Iterator[None]:
    """Name the setting if LoRA matches no module, the nearest layer, and what TRL makes of a single name."""
    try:
        yield
    except ValueError as error:
        targets = model.lora_target_modules
        if not str(error).startswith("Target modules"):
            raise
        there = _linear_layers(str(model.model_name_or_path), init)
        names = [targets.rpartition("*")[2]] if isinstance(targets, str) else list(targets or ())
        near = list(dict.fromkeys(one for name in names for one in nearest(name, there)[:1]))
        said = f"lora_target_modules {short_repr(targets)}: no module of the model has this name"
        if there and not near:
            said += f" (it has {', '.join(there)})"
        if isinstance(targets, str):
            said += "; TRL reads a single name as a regular expression over whole module names"
            near = [f".*{name}" for name in near]
        said += "; all-linear takes every linear layer"
        raise UserError(f"{said}; did you mean {' '.join(map(repr, near))}?" if near else said) from error


def _linear_layers(name: str, init: Mapping[str, Any]) -> list[str]:
    """Return the last parts of the names of a model's linear layers, without its weights; empty where unknown."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kinds = {key: init[key] for key in ("revision", "trust_remote_code") if init.get(key)}
    try:
        config = AutoConfig.from_pretrained(name, **kinds)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=kinds.get("trust_remote_code", False))
    except (*SETTING_ERRORS, RuntimeError, TypeError, AttributeError):  # a suggestion less; the error has its cause
        return []
    found = (path.rpartition(".")[2] for path, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    return sorted(set(found) - {"lm_head"})
