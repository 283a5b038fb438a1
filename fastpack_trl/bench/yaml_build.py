"""The trainers of a comparison from a YAML of ``fastpack-trl sft``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastpack_trl.errors import preparing
from fastpack_trl.recipe.make_trainer import make_trainer, short_run_arguments


def yaml_build(config: str, flags: Sequence[str], folder: str) -> Callable[..., Any]:
    """Return a `build` for `compare`: each call reads the YAML and loads its model and data anew."""

    def build(trainer_class: Any, _config_class: Any, **changes: Any) -> Any:
        words = [word for name, value in changes.items() for word in (f"--{name}", str(value))]
        arguments = short_run_arguments(config, folder, *flags, "--output_dir", folder, *words)
        with preparing():
            return make_trainer(arguments, None, trainer_class)

    return build
