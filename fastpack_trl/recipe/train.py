"""Train in this process from the arguments of a command, like TRL's script of that name."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from transformers import TrainerCallback

from fastpack_trl.errors import TerminatedError, command_line, naming_keys, preparing
from fastpack_trl.features.save_report import FILE
from fastpack_trl.model.changes import patch_attribute
from fastpack_trl.model.preflight import newest_checkpoint
from fastpack_trl.recipe.arguments import Arguments, parse, split_off
from fastpack_trl.recipe.data import data_name
from fastpack_trl.recipe.make_trainer import make_trainer, naming_data
from fastpack_trl.recipe.methods import SFT, Method


class _Ending(TrainerCallback):
    """Ends a run at SIGTERM: at once before its first step, else after the step in which it arrives, which it saves."""

    has_begun = is_saved = terminated = False

    def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
        self.has_begun, done = True, state.global_step
        if done and state.is_world_process_zero:
            print(f"resumed from step {done}: {done} of {state.max_steps} steps done", flush=True)

    def on_save(self, *_: Any, **__: Any) -> None:
        self.is_saved = True

    @contextmanager
    def handling_sigterm(self) -> Iterator[None]:
        """Note SIGTERM; a second one, or Ctrl-C after it, ends the process at once. Exit restores the handlers."""
        process, numbers = os.getpid(), (signal.SIGTERM, signal.SIGINT)

        def handle(number: int, _: object) -> None:
            for each in numbers:
                signal.signal(each, signal.SIG_DFL)  # which ends the process even if it hangs outside Python
            self.terminated = True
            if os.getpid() != process:
                os.kill(os.getpid(), number)  # a forked worker inherits this handler
            if not self.has_begun:
                raise TerminatedError

        with ExitStack() as stack:
            for number in numbers:
                stack.callback(signal.signal, number, signal.getsignal(number))
            signal.signal(signal.SIGTERM, handle)
            yield

    @contextmanager
    def ending_steps(self, trainer: Any) -> Iterator[None]:
        """Save and raise `TerminatedError` after the step of a SIGTERM; train no step after the last one."""
        names, finished = ("_maybe_log_save_evaluate", "_run_epoch"), -1
        finish_step, run_epoch = (getattr(trainer, name, lambda *_, **__: None) for name in names)

        def finish(*args: Any, **kwargs: Any) -> None:
            nonlocal finished
            self.is_saved = False
            finish_step(*args, **kwargs)
            # After the last step of an epoch it is called again, for what is due per epoch.
            is_over = trainer.state.epoch % 1 or finished == trainer.state.global_step
            finished = trainer.state.global_step
            if is_over and self.terminated and not trainer.control.should_training_stop:
                if not self.is_saved:
                    trainer.control.should_save = True
                    finish_step(*args, **kwargs)
                raise TerminatedError

        def run(*args: Any, **kwargs: Any) -> None:
            trainer.control.should_training_stop |= trainer.state.global_step >= trainer.state.max_steps
            if not trainer.control.should_training_stop:
                run_epoch(*args, **kwargs)

        with patch_attribute(trainer, names[0], finish), patch_attribute(trainer, names[1], run):
            yield


def train(argv: Sequence[str], method: Method = SFT, *, callbacks: Sequence[TrainerCallback] | None = None) -> Any:
    """Parse, load, train and save in this process, without a launcher; return the trainer.

    ``train(["--config", "sft.yaml", "--max_steps", "3"])``. An option of `accelerate launch` is a `UserError` too.
    """
    with preparing():
        arguments = parse(argv, method, may_launch=False)
    return train_parsed(arguments, callbacks=callbacks)


def train_parsed(arguments: Arguments, callbacks: Sequence[TrainerCallback] | None = None) -> Any:
    """Load, train and save as `train` does, from parsed arguments.

    SIGTERM ends a run of one process that saves checkpoints with the step in which it arrives, and saves that step:
    `TerminatedError` says how to resume it.
    """
    training, ending, trainer = arguments.training, _Ending(), None
    output = Path(str(training.output_dir))
    missing = [path for path in (output, *output.parents) if not path.exists()]  # innermost first
    # Processes of one run would end in different steps, and a handler of the user stays.
    handles = training.save_strategy != "no" and training.world_size == 1
    handles &= signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and current_thread() is main_thread()
    training.enable_jit_checkpoint &= not handles  # transformers' own saves a step with the generators of the next
    with ending.handling_sigterm() if handles else nullcontext():
        try:
            # Resuming and the packing check are part of the preparation; a failing step keeps its traceback.
            with naming_keys(vars(training)), preparing(finished=lambda: ending.has_begun):
                trainer = make_trainer(arguments, [*(callbacks or ()), ending])
                with naming_data(data_name(arguments.script, arguments.mixture)), ending.ending_steps(trainer):
                    trainer.train(resume_from_checkpoint=training.resume_from_checkpoint)
        except BaseException as error:
            for callback in () if trainer is None else trainer.callback_handler.callbacks:
                for bar in filter(None, map(vars(callback).get, ("prediction_bar", "training_bar"))):
                    bar.close()  # a message gets a line of its own
            with suppress(OSError):  # `Trainer.__init__` makes the folder; one with files stays
                for path in missing:
                    path.rmdir()
            if isinstance(error, KeyboardInterrupt):
                raise type(error)(how_to_resume(arguments, trainer.state.global_step if trainer else 0)) from None
            raise
        _finish(trainer, arguments)
    return trainer


def how_to_resume(arguments: Arguments, step: int) -> str:
    """Return what a run that was interrupted after `step` has saved, and the command that resumes it."""
    if not step and not arguments.training.resume_from_checkpoint:
        return "before the end of its first step: nothing was saved"
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
    run, parts, log = trainer.fastpack_run, list[str](), trainer.state.log_history
    if sum("loss" in row for row in log) < 2 and log and "train_loss" in log[-1]:
        parts.append(f"mean loss {log[-1]['train_loss']:.3f} (logging_steps: 1 shows its course)")
    for name, key in (("loss", "loss"), ("held-out loss", "eval_loss")):
        losses = [row[key] for row in log if key in row]
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
