"""``fastpack-trl sft``: supervised fine-tuning from a YAML or flags, with every option of ``trl sft`` and ours.

The steps are those of ``trl/scripts/sft.py``. What differs: the trainer is `FastSFTTrainer`, ``dataset_name`` may be a
local file, and whatever can be wrong is checked before the model is loaded.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastpack_trl.errors import DataError, UserError, describe, naming_keys, preparing, shown
from fastpack_trl.recipe.arguments import SftArguments, make_parser, parse
from fastpack_trl.recipe.data import check_data_exists, data_name, load_data

if TYPE_CHECKING:
    from transformers import TrainerCallback
    from trl import ModelConfig

    from fastpack_trl.trainer import FastSFTTrainer

# Set for the processes that we launch: they take the launch options of the YAML as done.
_LAUNCHED = "FASTPACK_LAUNCHED"


def main(argv: Sequence[str]) -> int:
    """Run ``fastpack-trl sft`` with these arguments; returns the exit code.

    Raises:
        UserError: a setting, file or model that the user has to change.
    """
    if "-h" in argv or "--help" in argv:
        make_parser().print_help()
        return 0
    # Asked before anything is imported: configuration classes set such variables themselves.
    launched = under_launcher()
    with preparing():
        arguments = parse([word for word in argv if word != "--traceback"], may_launch=not launched)
        launches = not launched and (bool(arguments.launch) or _launches_by_default())
        if launches:
            check_settings(arguments)  # once and here, not once per process
    if launches:
        return launch(arguments, extra=["--traceback"] if "--traceback" in argv else [])
    if arguments.launch and _LAUNCHED not in os.environ and os.environ.get("RANK", "0") == "0":
        unused = " ".join(arguments.launch)
        print(f"fastpack-trl sft: note: a launcher has started this process; not used: {unused}", file=sys.stderr)
    _train(arguments, callbacks=None)
    return 0


def train(argv: Sequence[str], *, callbacks: Sequence[TrainerCallback] | None = None) -> FastSFTTrainer:
    """Parse, load, train and save in this process; never launches others. Returns the trainer.

    ``train(["--config", "sft.yaml", "--max_steps", "3"])``

    Raises:
        UserError: a setting, file or model that the user has to change; also an option of `accelerate launch`.
    """
    with preparing():
        arguments = parse(argv, may_launch=False)
    return _train(arguments, callbacks=callbacks)


def under_launcher() -> bool:
    """Whether `accelerate launch`, `torchrun` or the like started this process.

    `accelerate launch` sets no WORLD_SIZE for a single process, but always the last variable, which nobody sets by hand
    (unlike ACCELERATE_USE_CPU or ACCELERATE_MIXED_PRECISION).
    """
    names = (_LAUNCHED, "WORLD_SIZE", "LOCAL_RANK", "ACCELERATE_DYNAMO_USE_FULLGRAPH")
    return any(name in os.environ for name in names)


def _launches_by_default() -> bool:
    # TRL launches always. One process without accelerate defaults behaves the same in this process and saves a second
    # import of everything; several devices or a defaults file need the launcher to behave as under TRL.
    import torch
    from accelerate.commands.config.config_args import default_config_file

    return torch.cuda.device_count() > 1 or Path(default_config_file).is_file()


def launch(arguments: SftArguments, extra: Sequence[str] = ()) -> int:
    """Start ``python -m fastpack_trl sft`` through `accelerate launch`; returns the exit code of what it started.

    `extra` goes to what is started, after its own arguments.

    Raises:
        UserError: `accelerate launch` refuses its options.
    """
    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    def refuse(message: str) -> None:
        raise UserError(f"accelerate launch: {message}")

    parser = launch_command_parser()
    parser.error = refuse  # prints its usage (200 lines) and exits otherwise
    words = [*arguments.launch, "--module", "fastpack_trl", "sft", *arguments.own, *extra]
    with preparing():
        launch_args = parser.parse_args(words)
    os.environ[_LAUNCHED] = "1"
    try:
        with preparing():
            launch_command(launch_args)
    except subprocess.CalledProcessError as error:
        # The process has reported its error itself. A negative code is the signal that ended it.
        return error.returncode if error.returncode > 0 else 128 - error.returncode
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        return code if code > 0 else 128 - code
    finally:
        os.environ.pop(_LAUNCHED, None)
    return 0


def check_settings(arguments: SftArguments) -> dict[str, Any]:
    """Everything that can be wrong without reading data or weights. Returns the keywords to load the model with.

    Raises:
        UserError: names the setting, its value and the remedy.
    """
    from fastpack_trl.model.preflight import check_weights
    from fastpack_trl.recipe import checks as sft_checks

    training, model = arguments.training, arguments.model
    sft_checks.check_paths(training)
    sft_checks.check_reporters(training)
    sft_checks.check_optimizer_arguments(training)
    check_data_exists(arguments.script, arguments.mixture)
    model.model_name_or_path = sft_checks.local_model(model)
    init = {
        "revision": model.model_revision,
        "trust_remote_code": training.trust_remote_code,
        "attn_implementation": model.attn_implementation,
        "dtype": model.dtype,
        **(training.model_init_kwargs or {}),
    }
    if "quantization_config" in init:
        init["quantization_config"] = sft_checks.quantization(init["quantization_config"])
    check_weights(model.model_name_or_path, init)
    sft_checks.check_attention(init["attn_implementation"])
    sft_checks.check_template(training)
    sft_checks.check_architecture(model.model_name_or_path, init)
    streaming = arguments.mixture.streaming if arguments.mixture.datasets else arguments.script.dataset_streaming
    if training.eval_on_start and training.eval_strategy == "no":
        raise UserError("eval_on_start: nothing is evaluated: set eval_strategy to steps or epoch, or leave it out")
    if streaming and training.max_steps <= 0:
        raise UserError("streamed data has no known length: set max_steps, e.g. max_steps: 1000")
    return init


def _train(arguments: SftArguments, callbacks: Sequence[TrainerCallback] | None) -> FastSFTTrainer:
    training = arguments.training
    with _nothing_left_behind(Path(str(training.output_dir))), naming_keys(vars(training)):
        with preparing():
            trainer = make_trainer(arguments, callbacks)
        progress = _progress()
        trainer.add_callback(progress)
        # Resuming and the proof at the start still belong to the preparation; a failing step keeps its traceback.
        with preparing(finished=lambda: progress.training), _of_data(data_name(arguments.script, arguments.mixture)):
            trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    _finish(trainer, arguments)
    return trainer


def make_trainer(
    arguments: SftArguments,
    callbacks: Sequence[TrainerCallback] | None = None,
    trainer_class: Callable[..., Any] | None = None,
) -> Any:
    """Check, load and construct: the trainer before its first step, of `trainer_class` (default: `FastSFTTrainer`).

    Raises:
        UserError: a setting, file or model that the user has to change. What the libraries raise for others passes;
            `preparing` turns it into one.
    """
    from trl import get_peft_config, get_quantization_config

    from fastpack_trl.recipe import checks as sft_checks
    from fastpack_trl.trainer import FastSFTTrainer

    script, training, model = arguments.script, arguments.training, arguments.model
    init = check_settings(arguments)
    name = str(model.model_name_or_path)
    processing_class = sft_checks.load_tokenizer(name, training, init)
    quantization_config, peft_config = get_quantization_config(model), get_peft_config(model)
    splits, named = load_data(script, arguments.mixture), data_name(script, arguments.mixture)
    train_dataset = sft_checks.take_split(splits, script.dataset_train_split, "dataset_train_split")
    eval_dataset = None
    if training.eval_strategy != "no":
        why = f" (needed by eval_strategy={training.eval_strategy.value!r})"
        eval_dataset = sft_checks.take_split(splits, script.dataset_test_split, "dataset_test_split", why)
    with _of_data(named):
        if eval_dataset is not None:
            sft_checks.check_rows(eval_dataset, "eval", training, processing_class)
        sft_checks.check_rows(train_dataset, "train", training, processing_class)

    given = {"model_init_kwargs": training.model_init_kwargs}
    training.model_init_kwargs = init
    with _of_data(named), naming_keys(given), _lora_targets(model):
        return (trainer_class or FastSFTTrainer)(
            model=name,
            args=training,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            callbacks=list(callbacks) if callbacks is not None else None,
            quantization_config=quantization_config,
            peft_config=peft_config,
        )


@contextmanager
def _of_data(named: str) -> Iterator[None]:
    """What is wrong with rows is said with the name of the data."""
    from jinja2 import TemplateError

    try:
        yield
    except DataError as error:
        raise UserError(f"data {shown(named)}: {error}") from error
    except TemplateError as error:
        # `datasets` does not say in which row.
        raise UserError(
            f"data {shown(named)}: the chat template cannot render a conversation: {describe(error)}: correct the "
            "messages or the template (chat_template_path names another)"
        ) from error


@contextmanager
def _lora_targets(model: ModelConfig) -> Iterator[None]:
    """A LoRA that matches no module is said with its setting, and with what TRL makes of a single name."""
    try:
        yield
    except ValueError as error:
        targets = model.lora_target_modules
        if not str(error).startswith("Target modules"):
            raise
        said = f"lora_target_modules {shown(targets)}: no module of the model is called so; "
        if isinstance(targets, str):
            said += f"TRL takes a single name for a regular expression of whole names: write '.*{targets}', say; "
        raise UserError(f"{said}all-linear takes every linear layer") from error


def _finish(trainer: FastSFTTrainer, arguments: SftArguments) -> None:
    """Save, push and end, as ``trl/scripts/sft.py`` does."""
    training = arguments.training
    trainer.accelerator.print("Training completed.")
    trainer.save_model(training.output_dir)
    trainer.accelerator.print(f"Model saved to {training.output_dir}.")
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=arguments.script.dataset_name)
        trainer.accelerator.print(f"Model pushed to https://huggingface.co/{trainer.hub_model_id}.")
    _release_ddp(trainer)
    if hasattr(trainer, "end"):  # transformers>=5.18: finishes the trackers, destroys the process group
        trainer.end()


def _release_ddp(trainer: FastSFTTrainer) -> None:
    """Free the DDP wrapper while the process group lives; ``trainer.model`` stays.

    Freed after the group, it is the group's last owner. Its destructor (torch 2.13, gloo) then waits for the group's
    thread with the GIL held, and that thread waits for the GIL: the process never ends.
    """
    from torch.nn.parallel import DistributedDataParallel

    if isinstance(trainer.model_wrapped, DistributedDataParallel):
        trainer.model_wrapped = trainer.model
        trainer.accelerator.free_memory()


def _progress() -> Any:
    """A callback whose ``training`` becomes true when everything is prepared and the steps begin."""
    from transformers import TrainerCallback

    class Progress(TrainerCallback):
        training = False

        def on_train_begin(self, *_: Any, **__: Any) -> None:
            self.training = True

    return Progress()


@contextmanager
def _nothing_left_behind(folder: Path) -> Iterator[None]:
    """When the run is refused or interrupted, folders that did not exist before and are empty are removed again.

    `Trainer.__init__` makes ``output_dir``; what is found wrong later must not leave an empty folder.
    """
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        yield
    except BaseException:
        for path in missing:  # innermost first
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()
        raise
