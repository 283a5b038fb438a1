"""Rewards of the commands that learn online: functions of TRL or of the user by name, and a reward model."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fastpack_trl.errors import DataError, UserError, describe, did_you_mean, short_repr
from fastpack_trl.recipe.paths import model_folder

_OF_TRL = ("accuracy_reward", "reasoning_accuracy_reward", "think_format_reward", "get_soft_overlong_punishment")
_GIVEN = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments"}
"""What TRL calls a reward function with, beside the columns of the data."""

Reward = str | Callable[..., Any]


def load_rewards(script: Any) -> list[Reward]:
    """Return the rewards that ``reward_funcs`` and ``reward_model_name_or_path`` name, as ``trl/scripts/grpo.py`` does.

    Raises:
        UserError: none is named, or a name that leads to no function.
    """
    found: list[Reward] = []
    if script.reward_model_name_or_path:
        found.append(model_folder("reward_model_name_or_path", script.reward_model_name_or_path))
    found += [_function(name) for name in script.reward_funcs or ()]
    if not found:
        raise UserError(
            f"no reward: set reward_funcs to some of {', '.join(_OF_TRL)} or to functions of yours (my_module.reward), "
            "or reward_model_name_or_path to a model"
        )
    return found


def check_reward_columns(rewards: Collection[Reward], columns: Collection[str]) -> None:
    """Check that the data have the columns that the functions take by name; raise `DataError` if one is missing."""
    for reward in rewards:
        for name in () if isinstance(reward, str) else _columns_of(reward):
            if name not in columns:
                said = getattr(reward, "__name__", str(reward))
                raise DataError(
                    f"the reward function {said!r} takes {name!r}, and the data have no such column: they have "
                    f"{', '.join(columns)}; rename one, or give the argument a default"
                )


def _columns_of(reward: Callable[..., Any]) -> Iterator[str]:
    for name, parameter in inspect.signature(reward).parameters.items():
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if named and parameter.default is parameter.empty and name not in _GIVEN:
            yield name


def _function(name: str) -> Callable[..., Any]:
    import trl.rewards

    if name in _OF_TRL:
        if name.endswith("accuracy_reward") and find_spec("math_verify") is None:
            raise UserError(f"reward_funcs: {name} needs math-verify: pip install 'trl[math_verify]'")
        found: Callable[..., Any] = getattr(trl.rewards, name)
        return found(max_completion_len=1280, soft_punish_cache=256) if name.startswith("get_") else found
    module, dot, function = name.rpartition(".")
    if not dot:
        remedy = did_you_mean(name, _OF_TRL) or f": use one of {', '.join(_OF_TRL)}"
        raise UserError(
            f"reward_funcs: {short_repr(name)} does not exist{remedy}, or my_module.{name} for one of yours"
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as TRL's scripts do: a module beside the YAML is meant
    try:
        loaded = import_module(module)
    except ImportError as error:
        raise UserError(
            f"reward_funcs: {short_repr(name)}: {describe(error)}: name a function by its module, in {here} or "
            "installed"
        ) from error
    own: Any = getattr(loaded, function, None)
    if callable(own):
        return own
    meant = did_you_mean(function, (key for key, value in vars(loaded).items() if callable(value)))
    raise UserError(f"reward_funcs: {loaded.__file__} has no function {function!r}{meant}")
