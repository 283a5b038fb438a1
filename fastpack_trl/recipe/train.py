"""Train in this process from the arguments of a command, like TRL's script of that name."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from fastpack_trl.errors import TerminatedError, command_line, naming_keys, preparing
from fastpack_trl.features.save_report import FILE
from fastpack_trl.model.preflight import newest_checkpoint
from fastpack_trl.recipe.arguments import Arguments, parse, split_off
from fastpack_trl.recipe.data import data_name
from fastpack_trl.recipe.make_trainer import make_trainer, naming_data
from fastpack_trl.recipe.methods import SFT, Method


class _Progress(TrainerCallback):
    """Records that preparation is done and the first step begins."""

    has_begun = False

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.has_begun = True


def train(argv: Sequence[str], method: Method = SFT, *, callbacks: Sequence[TrainerCallback] | None = None) -> Any:
    """Parse, load, train and save in this process, without a launcher; return the trainer.

    ``train(["--config", "sft.yaml", "--max_steps", "3"])``

    Raises:
        UserError: a setting, file or model that the user has to change; also an option of `accelerate launch`.
    """
    with preparing():
        arguments = parse(argv, method, may_launch=False)
    return train_parsed(arguments, callbacks=callbacks)


def train_parsed(arguments: Arguments, callbacks: Sequence[TrainerCallback] | None = None) -> Any:
    """Load, train and save as `train` does, from parsed arguments.

    SIGTERM ends a run of one process that saves checkpoints with the step in which it arrives, and saves that step.

    Raises:
        TerminatedError: SIGTERM ended the run; says how to resume it.
    """
    training, progress, trainer = arguments.training, _Progress(), None
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and training.save_strategy != "no" and training.world_size == 1:
        training.enable_jit_checkpoint = True  # processes of one run would end in different steps
    output = Path(str(training.output_dir))
    missing = [path for path in (output, *output.parents) if not path.exists()]  # innermost first
    try:
        # Resuming and the packing check are part of the preparation; a failing step keeps its traceback.
        with naming_keys(vars(training)), preparing(finished=lambda: progress.has_begun):
            trainer = make_trainer(arguments, [*(callbacks or ()), progress])
            name = data_name(arguments.script, arguments.mixture)
            with naming_data(name), _noting_sigterm(in_main_thread) as received:
                trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
    except BaseException as error:
        with suppress(OSError):  # `Trainer.__init__` makes the folder; one with files stays
            for path in missing:
                path.rmdir()
        if isinstance(error, KeyboardInterrupt) and trainer is not None:
            raise KeyboardInterrupt(how_to_resume(arguments, trainer.state.global_step)) from None
        raise
    if received and trainer.state.global_step < trainer.state.max_steps:
        raise TerminatedError(how_to_resume(arguments, trainer.state.global_step))
    _finish(trainer, arguments)
    return trainer


@contextmanager
def _noting_sigterm(in_main_thread: bool) -> Iterator[list[int]]:
    """Yield a list to which SIGTERM is added when transformers' ``enable_jit_checkpoint`` handles it."""
    received: list[int] = []
    handler: Any = signal.getsignal(signal.SIGTERM)

    def note(*given: Any) -> None:
        received.append(given[0])
        handler(*given)

    if callable(handler) and in_main_thread:
        signal.signal(signal.SIGTERM, note)
    yield received


def how_to_resume(arguments: Arguments, step: int) -> str:
    """Return what an interrupted run has saved, and the command that resumes it."""
    training = arguments.training
    checkpoint = newest_checkpoint(training.output_dir)
    if checkpoint is None:
        shorter = f"a save_steps below {training.save_steps:g}"
        remedy = shorter if training.save_strategy == "steps" else "save_strategy=steps, with a small save_steps,"
        return f"at step {step}, before any checkpoint: nothing to resume; {remedy} keeps more of a run"
    _, own = split_off("resume_from_checkpoint", arguments.words)
    again = command_line(arguments.method.command, *own, "--resume_from_checkpoint", "true")
    return f"at step {step}; resume from {checkpoint.name}: {again}"


def _finish(trainer: Any, arguments: Arguments) -> None:
    """Save, push and end, as ``trl/scripts/sft.py`` does."""
    training = arguments.training
    trainer.accelerator.print("Training completed.")
    trainer.save_model(training.output_dir)
    trainer.accelerator.print(f"Model saved to {training.output_dir}.")
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=arguments.script.dataset_name)
        trainer.accelerator.print(f"Model pushed to https://huggingface.co/{trainer.hub_model_id}.")
    trainer.accelerator.print(_last_line(trainer))
    _release_ddp(trainer)
    if hasattr(trainer, "end"):  # transformers>=5.18: finishes the trackers, destroys the process group
        trainer.end()


def _last_line(trainer: Any) -> str:
    """Return the last line of a run: losses, tokens per second, peak memory, what TRL ran, and the report's path."""
    run, parts = trainer.fastpack_run, []
    for name, key in (("loss", "loss"), ("held-out loss", "eval_loss")):
        losses = [row[key] for row in trainer.state.log_history if key in row]
        parts += [f"{name} {losses[0]:.3f} -> {losses[-1]:.3f}"] if len(losses) > 1 else []
    if (rate := run.rate) is not None and rate.per_second:
        parts.append(f"{rate.per_second:,.0f} tokens/s")
    if torch.cuda.is_available():
        parts.append(f"peak memory {torch.cuda.max_memory_reserved() / 2**30:.1f} GiB")
    stock = ", ".join(line.feature for line in run.report if line.status == "stock")
    partly = ", ".join(line.feature for line in run.report if line.feature in run.report.partly)
    fell = [f"run by TRL: {stock}"] * bool(stock) + [f"in part by TRL: {partly}"] * bool(partly)
    parts += fell or ["nothing fell back to TRL"]
    report = Path(str(trainer.args.output_dir)) / FILE
    return "; ".join([*parts, *[f"report: {report}"] * report.is_file()])


def _release_ddp(trainer: Any) -> None:
    """Free the DDP wrapper while the process group lives; ``trainer.model`` stays.

    Freed after the group, it is the group's last owner. Its destructor (torch 2.13, gloo) then waits for the group's
    thread with the GIL held, and that thread waits for the GIL: the process never ends.
    """
    if isinstance(trainer.model_wrapped, DistributedDataParallel):
        trainer.model_wrapped = trainer.model
        trainer.accelerator.free_memory()
