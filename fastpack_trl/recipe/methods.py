"""The commands that train: each is a TRL script with our trainer and configuration."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

from fastpack_trl.config import OnlineSettings, RowSettings, Settings
from fastpack_trl.errors import check_name
from fastpack_trl.recipe.formats import DataArguments
from fastpack_trl.recipe.sources import config_of


@dataclass(frozen=True, slots=True)
class Method:
    """A command that trains: ``Method("dpo", "DPO", ...)`` is ``trl/scripts/dpo.py`` with `FastDPOTrainer`."""

    command: str
    prefix: str
    """Of the names of its classes: ``DPO`` for ``FastDPOTrainer`` and ``FastDPOConfig``."""
    what: str
    settings: type = RowSettings
    """The fields that our configuration adds to TRL's."""

    @property
    def classes(self) -> tuple[Any, Any]:
        """Our trainer and its configuration: imported here, which takes seconds."""
        return self._classes("fastpack_trl", "Fast")

    @property
    def of_trl(self) -> tuple[Any, Any]:
        """TRL's own trainer and configuration."""
        return self._classes("trl")

    def _classes(self, package: str, start: str = "") -> tuple[Any, Any]:
        module, name = import_module(package), start + self.prefix
        return getattr(module, f"{name}Trainer"), getattr(module, f"{name}Config")

    @property
    def scores_rewards(self) -> bool:
        """Whether its trainer is given reward functions."""
        return self.command in ("grpo", "rloo")

    def options(self) -> set[str]:
        """Return the names of its options."""
        return {own.name for kind in self.dataclasses(quick=True) for own in fields(kind)}

    def dataclasses(self, quick: bool = False) -> list[Any]:
        """Return what TRL's script parses into, with our configuration and our options of the data.

        `quick`: the configuration is made from the source of TRL's, which is not imported.
        """
        from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments

        of_trl = import_module(f"trl.scripts.{self.command}")
        script = getattr(of_trl, f"{self.prefix}ScriptArguments", ScriptArguments)  # GRPO and RLOO name rewards
        config = None
        if quick:
            with suppress(LookupError, OSError, SyntaxError, TypeError, ValueError):  # sources of another form
                config = config_of(f"{self.prefix}Config", self.command, self.settings)
        config = config or self.classes[1]
        return [script, config, ModelConfig, DatasetMixtureConfig, DataArguments]


_METHODS = SFT, *_ = (
    Method("sft", "SFT", "supervised fine-tuning", Settings),
    Method("dpo", "DPO", "preference optimization (DPO)"),
    Method("reward", "Reward", "reward modeling"),
    Method("kto", "KTO", "preference optimization (KTO)"),
    Method("grpo", "GRPO", "online learning from rewards (GRPO)", OnlineSettings),
    Method("rloo", "RLOO", "online learning from rewards (RLOO)", OnlineSettings),
)
METHODS: Mapping[str, Method] = {method.command: method for method in _METHODS}


def method_of(keys: Iterable[str], named: str | None = None) -> Method:
    """Return the method that a YAML with these keys is for: `named`, else the first that knows the most of them.

    ``["max_length", "packing"]`` -> SFT; ``["max_length", "beta"]`` -> DPO. Raises `UserError` for an unknown name.
    """
    if named is not None:
        check_name("--trainer", named, METHODS, "trainers")
        return METHODS[named]
    return max(METHODS.values(), key=lambda method: len(method.options().intersection(keys)))


def add_trainer(parser: ArgumentParser) -> None:
    """Add ``--trainer``, and `more` for the options of training commands, which their own parser reads."""
    trainer = "the training command of the YAML (sft, dpo, ...), if its keys do not identify it"
    form = "--trainer={}".format
    parser.add_argument("--trainer", metavar="NAME", dest="more", action="append", type=form, default=[], help=trainer)
