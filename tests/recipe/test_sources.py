"""Options that are read from the libraries' sources are those of their parsers; errors come before torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import launch_command_parser

from fastpack_trl.recipe.arguments import _launch_parser, make_parser
from fastpack_trl.recipe.methods import METHODS

COMPUTED = ("log_level", "log_level_replica", "parallelism_config", "dynamo_backend", "dynamo_mode")
"""Options whose choices or types are no literals: any word is left to the libraries."""


def options(parser: Any) -> dict[str, Any]:
    """Return what the words of each option may be."""
    return {
        name: action.dest in COMPUTED
        or (action.dest, action.nargs, action.type if action.type in (int, float) else str, [*(action.choices or ())])
        for name, action in parser._option_string_actions.items()
        if action.dest != "help"
    }


@pytest.mark.parametrize("command", METHODS)
def test_what_the_sources_say_is_what_the_classes_say(command: str) -> None:
    quick, real = (make_parser(METHODS[command], quick=quick) for quick in (True, False))
    assert not any(issubclass(kind, METHODS[command].classes[1]) for kind in quick.dataclass_types), "from the source"
    assert len(options(real)) > 200
    assert options(quick) == options(real)


def test_the_launcher_has_the_options_of_accelerate() -> None:
    options_of_trl = {"--accelerate_config", "--accelerate-config"}
    quick = options(_launch_parser(make_parser(quick=True)))
    real = options(launch_command_parser())
    of_the_program = {name for name in real if real[name] is not True and real[name][0] in ("module", "no_python")}
    assert quick.keys() - options_of_trl == real.keys() - of_the_program
    assert {name: quick[name] for name in quick.keys() & real.keys()} == {
        name: real[name] for name in quick.keys() & real.keys()
    }


WRONG = {
    "max_lenght: 8": "unknown key 'max_lenght'; did you mean 'max_length'?",
    "beta: 0.1": "it is an option of dpo, kto, grpo, rloo: leave it out",
    "a: [": "is not valid YAML",
    "max_length: abc": "max_length='abc' must be a whole number",
    "learning_rate: fast": "learning_rate='fast' must be a number",
    "optim: adamw": "did you mean 'adamw_",
    "packed_attention: varlan": "did you mean 'varlen'?",
    "num_processes: 0": "num_processes=0 must be >= 1",
    "dataset_name: ./non.jsonl": "data './non.jsonl' does not exist (looked for ",
    "max_length: 0": "max_length=0 must be >= 1",
    "activation_memory_gib: -1": "activation_memory_gib=-1.0 must be a number above 0",
    "dataset_name: typo.jsonl": "the columns prompt, completon: sft needs messages, or conversations, or prompt and",
    "dataset_name: image.jsonl": "image 'a.png' does not exist (looked for ",
    "model_name_or_path: ./non": "model_name_or_path './non' is not a folder (looked for ",
}


def test_an_error_shows_before_torch_is_imported(tmp_path: Path) -> None:
    for number, line in enumerate(WRONG):
        (tmp_path / f"{number}.yaml").write_text(line, encoding="utf-8")
    (tmp_path / "typo.jsonl").write_text('{"prompt": "a", "completon": "b"}', encoding="utf-8")
    image = '{"images": ["http://a.b/c.png", "a.png"], "messages": []}'
    (tmp_path / "image.jsonl").write_text(image, encoding="utf-8")
    program = f"""
import sys
from fastpack_trl.cli.main import main
for number in range({len(WRONG)}):
    assert main(["sft", "--config", f"{{number}}.yaml"]) == 2
assert main(["bench", "--config", "0.yaml"]) == main(["doctor", "--config", "0.yaml", "--gpu", "H100"]) == 2
assert main(["sft", "--config", "missing.yaml"]) == main(["merge", "--config", "0.yaml"]) == 2
assert main(["sft", "--help"]) == 0
assert not {{"torch", "transformers.trainer"}} & {{*sys.modules}}
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert [said for said, line in zip(WRONG.values(), lines, strict=False) if said not in line] == [], lines
