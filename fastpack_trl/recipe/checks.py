"""Checks before a model is loaded: settings, paths, architecture, tokenizer.

Each raises `UserError`, or lets pass what raises `ValueError`, with the setting, its value and the remedy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastpack_trl.errors import UserError, describe, did_you_mean, first_reason, short_repr
from fastpack_trl.recipe.data import check_data_exists
from fastpack_trl.recipe.methods import SFT, Method
from fastpack_trl.recipe.paths import did_you_mean_path, model_folder

if TYPE_CHECKING:
    from fastpack_trl.recipe.arguments import Arguments

_REPORTERS = {
    "clearml", "codecarbon", "comet_ml", "dvclive", "mlflow", "neptune", "swanlab", "tensorboard", "trackio", "wandb",
}  # fmt: skip
"""Targets of `report_to` that are the name of a package."""


def check_settings(arguments: Arguments, *, weights: bool = True) -> dict[str, Any]:
    """Check everything that can be checked without reading data or weights; return the keywords that load the model.

    Args:
        weights: also that the data are there and the checkpoint has its files.

    Raises:
        UserError: names the setting, its value and the remedy.
    """
    training, model = arguments.training, arguments.model
    _check_paths(training)
    if fault := first_reason(_faults(arguments)):
        raise UserError(fault)
    if weights:
        check_data_exists(arguments.script, arguments.mixture)
    if not model.model_name_or_path:
        raise UserError("no model: set model_name_or_path to a hub name such as Qwen/Qwen3-0.6B or to a folder")
    model.model_name_or_path = model_folder("model_name_or_path", model.model_name_or_path)
    init = {
        "revision": model.model_revision,
        "trust_remote_code": training.trust_remote_code,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(training.model_init_kwargs or {}),
    }
    if "quantization_config" in init:
        init["quantization_config"] = _quantization(init["quantization_config"])
    _check_attention(init["attn_implementation"])
    check_model(model.model_name_or_path, init, method=arguments.method, weights=weights)
    return init


def _faults(arguments: Arguments) -> Iterator[str]:
    """Yield what is wrong with settings by themselves."""
    from transformers.integrations import get_available_reporting_integrations

    script, training, model, mixture = arguments.script, arguments.training, arguments.model, arguments.mixture
    # transformers looks for them after preparing model and data.
    missing = _REPORTERS - set(get_available_reporting_integrations())
    for name in training.report_to or ():
        if name in missing and find_spec(name) is None:
            yield f"report_to={short_repr(name)} is not installed: pip install {name}, or set report_to to 'none'"
    given = training.optim_args
    if given and not all(len(pair.split("=")) == 2 for pair in given.split(",")):
        yield f"optim_args {short_repr(given)} is not a list of names and values, e.g. 'fused=True,amsgrad=True'"
    if model.use_peft and model.lora_r < 1:
        yield f"lora_r={model.lora_r} is below 1: give the rank of the adapters, e.g. 16"
    if model.use_peft and arguments.method.command == "reward" and model.lora_task_type != "SEQ_CLS":
        task = short_repr(model.lora_task_type)
        yield f"lora_task_type={task} is for models of language: a reward model needs SEQ_CLS"
    for field in ("load_in_4bit", "load_in_8bit"):
        if getattr(model, field) and find_spec("bitsandbytes") is None:
            yield f"{field} needs bitsandbytes: pip install 'fastpack-trl[qlora]'"
    template = getattr(training, "chat_template_path", None) or ""
    written_as_path = template.startswith(("./", "../", "/", "~")) or template.endswith((".jinja", ".j2"))
    if written_as_path and not Path(template).exists():
        where = Path(template).absolute()
        yield (
            f"chat_template_path {short_repr(template)} does not exist (looked for {where}): name a .jinja file or a "
            "tokenizer"
        )
    if training.eval_on_start and training.eval_strategy == "no":
        yield "eval_on_start: nothing is evaluated: set eval_strategy to steps or epoch, or leave it out"
    if training.max_steps <= 0 and (mixture.streaming if mixture.datasets else script.dataset_streaming):
        yield "streamed data has no known length: set max_steps, e.g. max_steps: 1000"


def _check_paths(training: Any) -> None:
    """Check that ``output_dir`` can be made and that ``resume_from_checkpoint`` names a complete checkpoint."""
    from fastpack_trl.model.preflight import choose_checkpoint, unwritable

    output = Path(str(training.output_dir))
    if training.should_save and (reason := unwritable(output)):
        raise UserError(f"output_dir {str(output)!r}: {reason}")
    resume: object = training.resume_from_checkpoint
    if isinstance(resume, str) and resume.lower() in ("true", "false"):
        # The command line hands over text; the trainer takes the boolean ("the last checkpoint in output_dir").
        resume = resume.lower() == "true"
        training.resume_from_checkpoint = resume
    if isinstance(resume, str) and not Path(resume).is_dir():
        raise UserError(
            f"resume_from_checkpoint {short_repr(resume)} is not a folder: name a checkpoint-N folder, or true"
        )
    if resume is True and not any(re.fullmatch(r"checkpoint-\d+", path.name) for path in output.glob("checkpoint-*")):
        raise UserError(
            f"resume_from_checkpoint: there is no checkpoint-N folder in output_dir {str(output)!r}: leave it out to "
            "start anew"
        )
    choose_checkpoint(resume, str(output))  # the choice is reported when training starts


def check_model(
    name: str,
    init: Mapping[str, Any],
    option: str = "model_name_or_path",
    method: Method = SFT,
    *,
    weights: bool = True,
) -> None:
    """Check by its ``config.json`` that the checkpoint is a causal language model; for rewards, or a classifier.

    Args:
        name: folder or hub name.
        init: keywords with which the model is loaded.
        option: what the user gave the name to, for the message.
        weights: also that the weights of a folder are there.

    Raises:
        UserError: it is none.
        ValueError: they are not.
    """
    import transformers
    from transformers.models.auto import modeling_auto

    from fastpack_trl.model.preflight import check_weights

    try:
        config = transformers.AutoConfig.from_pretrained(
            name, revision=init.get("revision"), trust_remote_code=init.get("trust_remote_code", False)
        )
    except (OSError, ValueError) as error:
        meant = "" if Path(name).exists() else did_you_mean_path(name)
        raise UserError(f"{option} {name!r} cannot be used: {describe(error)}{meant}") from error
    architectures = config.architectures or []
    if not architectures:
        raise UserError(
            f"model {name!r}: config.json (model_type {config.model_type!r}) names no architecture; a causal language "
            "model is needed: save it with AutoModelForCausalLM"
        )
    architecture = architectures[0]
    fitting = {
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
        *modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values(),
        *modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.values(),
    }
    if method.command == "reward":
        fitting |= {*modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values()}
    # A class that transformers does not know comes with the checkpoint; its `auto_map` says what it is.
    remote = {"AutoModelForCausalLM", "AutoModelForImageTextToText"} & set(getattr(config, "auto_map", None) or ())
    unknown = getattr(transformers, architecture, None) is None
    known_type = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if getattr(config, "is_encoder_decoder", False) or not (
        architecture in fitting or (unknown and (remote or known_type))
    ):
        raise UserError(
            f"model {name!r} is a {architecture} (model_type {config.model_type!r}): a causal language model "
            f"(...ForCausalLM) is needed for {method.what}"
        )
    if weights:
        check_weights(name, option)


def _check_attention(name: object) -> None:
    """Check that ``attn_implementation`` exists and is installed; None and mappings (a name per sub-model) pass."""
    from transformers import AttentionInterface

    if not isinstance(name, str) or "/" in name or name.startswith("paged|"):
        return  # a hub kernel or a paged implementation: transformers decides when the model is made
    known = sorted({"eager", *AttentionInterface._global_mapping})
    if name not in known:
        raise UserError(
            f"attn_implementation {short_repr(name)} does not exist{did_you_mean(name, known)}: use sdpa or eager, or "
            "leave it out"
        )
    packages = {"flash_attention_3": "flash_attn_interface"}
    package = packages.get(name, "flash_attn") if name.startswith("flash_attention_") else None
    # transformers takes the kernel from the hub when `kernels` is installed and the package is not.
    if package is not None and find_spec(package) is None and find_spec("kernels") is None:
        raise UserError(
            f"attn_implementation {name!r} needs the package {package}, which is not installed: install it, or leave "
            "attn_implementation out"
        )


def _quantization(given: object) -> Any:
    """Return ``{"quant_method": "mxfp4", "dequantize": True}`` as an object of transformers' class; others as they are.

    For a checkpoint that is quantised itself, as gpt-oss is, `from_pretrained` compares classes and refuses a mapping.
    """
    from transformers.quantizers.auto import AutoQuantizationConfig

    if not isinstance(given, Mapping):
        return given
    try:
        return AutoQuantizationConfig.from_dict(dict(given))
    except (ValueError, TypeError, ImportError) as error:
        raise UserError(
            f"model_init_kwargs: quantization_config: {short_repr(given)} cannot be used: {describe(error)}"
        ) from error


def load_tokenizer(name: str, training: Any, init: Mapping[str, Any]) -> Any:
    """Load the processing class as TRL does, and check that its vocabulary has the tokens that training needs."""
    from transformers import AutoProcessor

    try:
        processing_class = AutoProcessor.from_pretrained(
            name, revision=init.get("revision"), trust_remote_code=training.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"model {name!r} has no tokenizer that can be loaded: {describe(error)}") from error
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    vocabulary = tokenizer.get_vocab()
    for field in ("pad_token", "eos_token"):
        token = getattr(training, field, None)
        if token is not None and token not in vocabulary:
            raise UserError(
                f"{field} {short_repr(token)} is not in the vocabulary of the tokenizer of {name!r}: choose one that "
                f"is (special tokens: {', '.join(tokenizer.all_special_tokens[:10])})"
            )
    pad_token = getattr(training, "pad_token", None) or tokenizer.pad_token or tokenizer.eos_token
    if pad_token is None or pad_token not in vocabulary:
        raise UserError(
            f"the tokenizer of {name!r} has no padding token ({pad_token!r}): set pad_token to a token of its "
            "vocabulary"
        )
    return processing_class
