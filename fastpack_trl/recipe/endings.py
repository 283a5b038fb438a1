"""What ends a run from outside: SIGTERM, a full disk, another run in its folder. Each is one line."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

from fastpack_trl.errors import TerminatedError, UserError, describe

_FULL = {errno.ENOSPC, errno.EDQUOT}
_LEAST_FREE = 1 << 26  # bytes; torch does not say why it could not write


@contextmanager
def ending_at_sigterm(trainer: Any, how: Callable[[], str]) -> Iterator[None]:
    """End a training with the step in which SIGTERM arrives, and save a checkpoint if `save_strategy` allows one.

    A second signal ends it at once. With several processes nothing is done: they would end in different steps.
    transformers' own ``enable_jit_checkpoint`` goes before.

    Args:
        how: says what was saved and how to go on.

    Raises:
        TerminatedError: once training has ended.
    """
    args = trainer.args
    main = threading.current_thread() is threading.main_thread()
    if args.world_size > 1 or getattr(args, "enable_jit_checkpoint", False) or not main:
        yield
        return
    ends = _ends(how)
    before = signal.signal(signal.SIGTERM, ends.ask)
    trainer.add_callback(ends)
    try:
        yield
    finally:
        trainer.remove_callback(ends)
        signal.signal(signal.SIGTERM, before)
    if ends.asked:
        raise TerminatedError(how())


def _ends(how: Callable[[], str]) -> Any:
    from transformers import TrainerCallback

    class Ends(TrainerCallback):
        asked = False

        def ask(self, number: int, frame: FrameType | None) -> None:
            if self.asked:
                raise TerminatedError(how())
            self.asked = True

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if self.asked:
                control.should_training_stop = True
                control.should_save = args.save_strategy != "no"

    return Ends()


@contextmanager
def naming_a_full_disk(folder: Path, how: Callable[[], str]) -> Iterator[None]:
    """Turn what the libraries raise for a full disk into one line; other errors pass.

    Args:
        folder: that is written to.
        how: says where the run has ended and how to go on.

    Raises:
        UserError: the disk is full.
    """
    try:
        yield
    except Exception as error:
        if not _is_full(error, folder):
            raise
        raise UserError(
            f"output_dir {str(folder)!r}: its disk is full ({describe(error)}): free some space, or save less often "
            f"(save_total_limit, save_only_model); the run ended {how()}"
        ) from error


def _is_full(error: BaseException, folder: Path) -> bool:
    if isinstance(error, OSError) and error.errno in _FULL:
        return True
    if "No space left" in str(error) or "Disk quota exceeded" in str(error):  # safetensors
        return True
    of_torch = isinstance(error, RuntimeError) and (
        "PytorchStreamWriter" in str(error) or "unexpected pos" in str(error)
    )
    return of_torch and shutil.disk_usage(folder).free < _LEAST_FREE


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold a folder that a run writes to; nothing is left in it.

    Raises:
        UserError: another run holds it.
    """
    if find_spec("fcntl") is None or not folder.is_dir():  # Windows has no such locks
        yield
        return
    import fcntl

    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"output_dir {str(folder)!r}: another run is writing there: name another folder, or wait for its end"
            ) from error
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)
