"""Several trainers' own `train` in one process, one optimizer step at a time, in any order.

A training loop cannot be left and entered again from outside. So each runs in a thread of its own and stops at the end
of each optimizer step until it is told to go on: never more than one of them runs.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import TrainerCallback, set_seed

from fastpack_trl.errors import UserError

Around = Callable[[Any], AbstractContextManager[Any]]


class _Ended(BaseException):
    """Unwinds a training that goes no further; nothing that handles errors of a step may take it for one."""


def kept_state(trainer: Any) -> Callable[[], None]:
    """Return a call that restores what trainings of one process share and would disturb, as it is now: random numbers,
    and accelerate's flags (sync of gradients, the loader that is being read)."""
    flags, device = trainer.accelerator.gradient_state.__dict__, torch.device(trainer.args.device)
    kept = dict(flags)
    states: list[tuple[Callable[[Any], object], Any]] = [
        (random.setstate, random.getstate()), (torch.set_rng_state, torch.get_rng_state()),
        (np.random.set_state, np.random.get_state()),  # noqa: NPY002 - the global one
    ]  # fmt: skip
    if device.type == "cuda":
        states.append((partial(torch.cuda.set_rng_state, device=device), torch.cuda.get_rng_state(device)))

    def restore() -> None:
        flags.clear()
        flags.update(kept)
        for put_back, state in states:
            put_back(state)

    return restore


class Training(TrainerCallback):
    """One trainer's `train`, advanced from outside.

    ```python
    training = Training(trainer)
    training.begin()  # up to the first step
    training.advance()  # one optimizer step: its micro-batches, clipping, the optimizer, callbacks, the log
    training.close()
    ```

    A step lasts from the end of one to the end of the next, so that logging, fetching and callbacks belong to it.

    The trainer's ``max_steps`` must be enough. `around` is entered in the training's thread before `train`, and left
    after it, also after an exception.
    """

    def __init__(self, trainer: Any, around: Around = contextlib.nullcontext) -> None:
        self.trainer = trainer
        self._around = around
        self._go, self._stopped = threading.Semaphore(0), threading.Event()
        self._finished = self._closing = False
        self._error: BaseException | None = None
        self._inside: AbstractContextManager[Any] = contextlib.nullcontext()
        self._open = contextlib.ExitStack()
        self._restore = kept_state(trainer)
        # A thread that cannot be stopped must not keep the process alive after a second interrupt.
        self._thread = threading.Thread(target=self._train, daemon=True)

    def begin(self) -> None:
        """Start `train` and let it run up to its first step; raise what it raises."""
        self._thread.start()
        self._wait()
        self._restore = kept_state(self.trainer)

    def seed(self, seed: int) -> None:
        """Seed the random numbers of the next step."""
        set_seed(seed)
        self._restore = kept_state(self.trainer)

    def advance(self, inside: AbstractContextManager[Any] | None = None) -> None:
        """Run one optimizer step; raise what it raises.

        Args:
            inside: entered in the training's thread when the step begins, left when it ends.

        Raises:
            UserError: training ended by itself.
        """
        self._inside = inside if inside is not None else contextlib.nullcontext()
        self._restore()
        self._stopped.clear()
        self._go.release()
        self._wait()
        self._restore = kept_state(self.trainer)
        if self._finished:
            raise UserError(
                f"training ended by itself after {self.trainer.state.global_step} steps: a callback or an empty data "
                "set stopped it; take that away for the measurement"
            )

    def close(self) -> None:
        """End the training where it is or, in the middle of a step, when that is done; leave what it has entered, and
        wait for it. May be called again."""
        if not self._thread.ident:
            return
        self._closing = True
        self._go.release()
        self._thread.join()

    def _wait(self) -> None:
        self._stopped.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _train(self) -> None:
        self.trainer.add_callback(self)
        try:
            if torch.device(self.trainer.args.device).type == "cuda":
                torch.cuda.set_device(self.trainer.args.device)  # of this thread
            with self._around(self.trainer):
                self.trainer.train()
        except _Ended:
            pass
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits for it
            self._error = error
        finally:
            self._leave()
            self.trainer.remove_callback(self)
            self._finished = True
            self._stopped.set()

    def _leave(self) -> None:
        try:
            self._open.close()
        except BaseException as error:  # noqa: BLE001 - as above
            self._error = self._error or error

    def _stop(self) -> None:
        """Wait, in the training's thread, until it is told to go on."""
        self._leave()
        self._stopped.set()
        self._go.acquire()
        if self._closing:
            raise _Ended
        self._open.enter_context(self._inside)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop before the first step: all is prepared."""
        self._stop()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop after an optimizer step."""
        self._stop()
