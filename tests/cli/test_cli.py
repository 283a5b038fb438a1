"""The command line before any training: help, version, exit codes, and what is imported when."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from types import ModuleType
from typing import Any

import pytest

from fastpack_trl import __version__
from fastpack_trl.cli import main as cli
from fastpack_trl.errors import UserError, preparing


def run_with(monkeypatch: pytest.MonkeyPatch, run: Any, *argv: str) -> int:
    """Call `argv` with a command ``probe`` whose `run` is given."""
    module = ModuleType("fastpack_probe_command")
    module.add_arguments = lambda parser: parser.add_argument("--steps", type=int, default=1)
    module.run = lambda args, record: run(args)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.COMMANDS, "probe", cli.Command(module.__name__, "a command of this test"))
    return cli.main(argv)


def test_the_help_is_one_page_of_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    pages = [(cli.main(words), capsys.readouterr().out) for words in (["--help"], [], ["--traceback"])]
    assert set(pages) == {(0, pages[0][1])}
    lines = pages[0][1].splitlines()
    assert all(any(name in line.split() for line in lines) for name in cli.COMMANDS)
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"fastpack-trl {__version__}"


def test_help_and_a_misspelt_command_import_no_torch() -> None:
    code = (
        "import sys; from fastpack_trl.cli.main import main; [main(words.split()) for words in sys.argv[1:]]; "
        "assert not {'torch', 'transformers', 'trl', 'datasets'} & set(sys.modules)"
    )
    commands = ["--help", "stf", "doctor --help", "verify --help", "bench --help"]
    ran = subprocess.run([sys.executable, "-c", code, *commands], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert all(option in ran.stdout for option in ("--gpu", "--rounds", "--attn", "--traceback"))


def raise_user_error(args: Namespace) -> int:
    raise UserError("steps=0 trains nothing: use 1 or more\nsecond line")


def raise_interrupt(args: Namespace) -> int:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("run", "rank", "code", "line"),
    [
        (raise_user_error, "0", 2, "error: steps=0 trains nothing: use 1 or more second line"),
        (raise_user_error, "1", 2, "error [rank 1]: steps=0 trains nothing: use 1 or more second line"),
        (raise_interrupt, "0", 130, "interrupted"),
    ],
)
def test_an_error_of_the_user_and_an_interrupt_are_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: Any, rank: str, code: int, line: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    assert run_with(monkeypatch, run, "probe") == code
    assert capsys.readouterr().err == f"fastpack-trl probe: {line}\n"


@pytest.mark.parametrize("argv", [["probe", "--traceback"], ["--traceback", "probe"], ["probe"]])
def test_traceback_asked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    monkeypatch.setenv("FASTPACK_TRACEBACK", str(int("--traceback" not in argv)))
    assert run_with(monkeypatch, raise_user_error, *argv) == 2
    err = capsys.readouterr().err
    assert "in raise_user_error" in err
    assert err.splitlines()[-1].startswith("fastpack-trl probe: error: ")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("first\n  second"), "first second"),
        (KeyError("Unexpected input keys: ['a']"), "Unexpected input keys: ['a']"),
        (FileNotFoundError(2, "No such file or directory", "x"), "[Errno 2] No such file or directory: 'x'"),
        (ImportError(), "ImportError"),
        *((bug, "") for bug in (TypeError("a bug"), RuntimeError("a bug"), KeyError("loss"), AssertionError("a bug"))),
    ],
)
def test_setting_errors_become_one_line_while_preparing_and_bugs_keep_their_traceback(
    monkeypatch: pytest.MonkeyPatch, error: Exception, line: str
) -> None:
    def raises(args: Namespace) -> int:
        raise error

    with pytest.raises(UserError if line else type(error)) as caught, preparing():
        raise error
    assert caught.value is error or (str(caught.value), caught.value.__cause__) == (line, error)
    with pytest.raises(type(error)), preparing(finished=lambda: True):
        raise error
    with pytest.raises(type(error)):
        run_with(monkeypatch, raises, "probe")
