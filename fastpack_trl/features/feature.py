"""`Feature`: one option of a run, the reasons against it, and the context that installs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.logging import get_logger

from fastpack_trl.errors import first_reason
from fastpack_trl.model.facts import UNREADABLE, text_model
from fastpack_trl.model.upstream import PARTLY, missing_reason
from fastpack_trl.report import Status
from fastpack_trl.run import KINDS, Kind, Run

logger = get_logger(__name__)


class Stock(str):
    """A reason with which TRL's implementation runs what the option is about: its status is ``stock``, not ``off``."""


class Met(str):
    """A reason with which nothing is left to do: a run that asks for the option by name does not stop."""


_MARKS: dict[type[str], str] = {Stock: "\x01", Met: "\x02"}
"""What the reason of another process, a text, begins with for its class."""
_NONE = "nothing here is what it is about"


@dataclass(frozen=True, slots=True)
class Feature:
    """One line of `FEATURES`: ``Feature("moe", moe.install, moe.why_not, concerns=moe.concerns)``.

    Attributes:
        name: of its field in the config, and of its line in the report.
        install: returns the context that installs it on a run's model and trainer and restores them; sets its line.
        why_not: yields the reasons against it, false ones included; the first decides for all processes. None: each one
            decides by `concerns`.
        concerns: returns whether the run has anything that the option is about; else it has no line.
        kinds: of trainers (`Run.kind`).
        in_training: it is entered by `train` only, not by `evaluate` or `predict`.
        has_off: ``off`` enters nothing. Otherwise `install` reads the field.
        falls_back: TRL's implementation runs, with a warning, if it cannot read the model or a private name is missing.
        instead: the path in its line if it is off.
        reads_data: it may read all samples, which takes as long as they take.
    """

    name: str
    install: Callable[[Run], AbstractContextManager[Any]]
    why_not: Callable[[Run], Iterator[object]] | None = None
    concerns: Callable[[Run], bool] = lambda run: True
    kinds: tuple[Kind, ...] = KINDS
    in_training: bool = False
    has_off: bool = True
    falls_back: bool = True
    instead: str = "stock"
    reads_data: bool = False

    def enter(self, run: Run, stack: ExitStack) -> None:
        """Install the feature until `stack` closes, or set its line with the reason against it.

        Raises:
            ValueError: `train` begins, the setting is explicit and the feature is unavailable; or an error of its own.
            torch.AcceleratorError: the device failed, independently of the model.
        """
        if run.kind not in self.kinds or (self.in_training and not run.training):
            return
        try:
            if (why := self.why_off(run)) == _NONE:
                return
            if why:
                status: Status = "stock" if isinstance(why, Stock) else "off"
                run.report.asked |= {self.name} if run.settings.is_explicit(self.name) else set()
                run.set_status(self.name, status, self.instead, str(why), holds=isinstance(why, Met))
            else:
                stack.enter_context(self.install(run))
        except (ValueError, torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except (*UNREADABLE, ImportError) as error:
            if not self.falls_back:
                raise
            model = type(text_model(run.model)).__name__
            reason = f"{model} cannot be read: {type(error).__name__}: {error}"
            logger.warning(f"{self.name}: stock ({reason})", exc_info=True)  # the fault may be ours, not the model's
            run.set_status(self.name, "stock", "stock", reason)

    def why_off(self, run: Run) -> str:
        """Return the first reason against it, or ``""``; jointly: processes would wait for one that leaves it out."""
        if self.why_not is None:
            return "" if self.concerns(run) else _NONE

        def own() -> str:
            why = first_reason(self._against(run))
            return _MARKS.get(type(why), "") + why

        why = run.ranks.first_reason(own)
        return next((kind(why.replace(mark, "")) for kind, mark in _MARKS.items() if mark in why), why)

    def _against(self, run: Run) -> Iterator[object]:
        looks = self.falls_back and self.name not in PARTLY and run.settings.get(self.name) != "off"
        if looks and (missing := missing_reason(self.name)):
            logger.warning(f"{self.name}: stock ({missing})")
            yield Stock(missing)
        yield not self.concerns(run) and _NONE
        yield self.has_off and run.settings.get(self.name) == "off" and "switched off"
        assert self.why_not is not None
        yield from self.why_not(run)
