"""The package stands alone: it knows nothing of the benchmarks beside it and holds none of their results."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from benchmarks.__main__ import COMMANDS

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "fastpack_trl"


def test_the_package_imports_nothing_of_the_benchmarks() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.Import(names=names):
                    modules = [name.name for name in names]
                case ast.ImportFrom(module=str(module)):
                    modules = [module]
                case _:
                    continue
            assert not [name for name in modules if name.partition(".")[0] == "benchmarks"], (path, node.lineno)


def test_no_result_lies_in_the_package() -> None:
    data = [path.name for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc", ".typed")]
    assert [name for name in data if name.endswith((".json", ".png", ".csv"))] == []


def test_the_benchmarks_run_from_a_checkout_and_list_every_command() -> None:
    command = [sys.executable, "-m", "benchmarks", "--help"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stderr
    assert [line.split()[0] for line in ran.stdout.splitlines()[2:]] == [*COMMANDS]
