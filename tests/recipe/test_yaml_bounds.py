"""A YAML that stands for more than it says, or that is nested without end, is one line at once: no hang, no crash."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from fastpack_trl.errors import UserError, short_repr
from fastpack_trl.recipe.yaml import load_config

SECONDS = 60  # written out, the value of ten levels would take days


def bomb(levels: int = 10) -> str:
    """Ten lists, each with ten aliases of the one before."""
    lists = [
        f"&a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" if level else "&a0 [x, x, x]" for level in range(levels)
    ]
    return f"[{', '.join(lists)}]"


# Values are counted before anybody reads their keys.
KEYS = {"a value": "qqq: {}", "deeper": "datasets: [{{path: {}}}]", "a key": "? {}\n: 1"}
VALUES = {
    "aliases": (bomb(), "aliases make more than 100,000 values"),
    "brackets": ("[" * 5000 + "]" * 5000, "nested more than 64 levels deep"),
    "braces": ("{a: " * 5000 + "}" * 5000, "nested more than 64 levels deep"),
}


@pytest.mark.parametrize("key", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize(("value", "why"), VALUES.values(), ids=VALUES)
def test_value_without_end(tmp_path: Path, key: str, value: str, why: str) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(key.format(value), encoding="utf-8")
    started = time.monotonic()
    with pytest.raises(UserError) as caught:
        load_config(str(path))
    assert time.monotonic() - started < SECONDS / 10
    assert all(
        part in str(caught.value) for part in (f"config file {str(path)!r} line ", why, "correct the YAML there")
    )


def test_a_control_character_is_named(tmp_path: Path) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text('run_name: "a\x07b"\n', encoding="utf-8")
    with pytest.raises(UserError, match="is not YAML: unacceptable character #x0007"):
        load_config(str(path))


@pytest.mark.parametrize("value", [value for value, _ in VALUES.values()], ids=VALUES)
def test_the_command_ends_with_one_line(tmp_path: Path, value: str) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(f"datasets: {value}", encoding="utf-8")
    command = [sys.executable, "-m", "fastpack_trl", "sft", "--config", str(path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=Path(__file__).parents[2])
    assert run.returncode == 2
    assert run.stderr.startswith("fastpack-trl sft: error: config file ")
    assert len(run.stderr.splitlines()) == 1


MERGED = [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 11)]
OTHERS = [
    ("merge keys", "\n".join(["a0: &a0 {x: 1}", *MERGED]), "aliases make more"),
    ("an alias inside of itself", "a: &a [*a]", "an alias stands inside"),
    ("a date in month 13", "max_length: 64\nrun_name: 2024-13-45", "line 2, column 11: month must be in 1..12"),
    ("a number of 5,000 digits", "max_length: " + "9" * 5000, "line 1, column 13"),
]


@pytest.mark.parametrize(("text", "why"), [row[1:] for row in OTHERS], ids=[row[0] for row in OTHERS])
def test_what_pyyaml_says_nothing_about(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "sft.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=r"config file .*sft\.yaml") as caught:
        load_config(str(path))
    assert why in str(caught.value)


def test_ordinary_aliases_and_merge_keys_load_as_ever(tmp_path: Path) -> None:
    text = "a: &a {x: 1, y: [1, 2]}\nb: {<<: *a, y: 3}\nc: [*a, *a]\nd: 2024-01-02\n"
    path = tmp_path / "sft.yaml"
    path.write_text(text, encoding="utf-8")
    assert load_config(str(path)) == yaml.safe_load(text)


def test_data_in_the_place_of_the_config_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("x" * 2_000_000, encoding="utf-8")
    with pytest.raises(UserError, match="2,000,000 bytes: name the YAML"):
        load_config(str(path))


def aliased(levels: int) -> Any:
    value: Any = ["x"]
    for _ in range(levels):
        value = [value] * 10
    return value


class Listed(list[Any]):
    pass


@pytest.mark.parametrize(
    "value",
    [aliased(12), {"a": aliased(12)}, Listed([aliased(12)]), "x" * 10**6, 2**10**6, [["y" * 10**6]], {"z" * 10**6: 1}],
    ids=["lists", "mapping", "subclass", "text", "number", "nested text", "long key"],
)
def test_what_a_message_shows_of_a_value_is_short_and_quick(value: Any) -> None:
    started = time.monotonic()
    assert 0 < len(short_repr(value)) <= 200
    assert time.monotonic() - started < 1


@pytest.mark.parametrize("value", ["a'b", 5, 2.5, None, True, [64], ["a", "b"], {"a": 1}, (1, "b"), b"x"])
def test_short_values_are_shown_whole(value: object) -> None:
    assert short_repr(value) == repr(value)


def test_a_value_given_in_python_is_bounded_too() -> None:
    from fastpack_trl import FastSFTConfig

    with pytest.raises(ValueError, match=r"packed_attention=\[\[") as caught:
        FastSFTConfig(packed_attention=aliased(12), use_cpu=True, bf16=False)  # type: ignore[arg-type]
    assert len(str(caught.value)) < 500


def test_deep_json_of_a_flag_is_one_line() -> None:
    from fastpack_trl.recipe.arguments import parse

    for flag in ("--model_init_kwargs", "--accelerator_config"):
        with pytest.raises(UserError, match=f"{flag}.* is not JSON"):
            parse([flag, '{"a": ' * 50_000])
