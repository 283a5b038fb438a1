"""What is wrong with a command of the benchmarks is said in one line, with the remedy, before anything is measured."""

from __future__ import annotations

import json
import runpy
import sys
import warnings

import pytest
import torch

from benchmarks.command import in_one_line, record_of
from benchmarks.results_folder import RESULTS
from fastpack_trl.cli.main import EXIT_USER_ERROR

OTHER = RESULTS / "fp8_steps_cuda_2026-11-23.json"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("benchmarks --case colator", "there is no case 'colator'; did you mean 'collator'?"),
        ("benchmarks.side_by_side --rows nosuch", "there is no row 'nosuch'"),
        ("benchmarks.side_by_side --sides unsloth --unsloth /nosuch/python", "'/nosuch/python' is no program"),
        ("benchmarks.by_itself metdata", "there is no optimisation 'metdata'; did you mean"),
        ("benchmarks.by_itself reload --rows nosuch", "there is no row 'nosuch'"),
        ("benchmarks.by_itself reload --report /nosuch.json", "'/nosuch.json' cannot be read"),
        ("benchmarks.row_profile --rows nosuch", "there is no row 'nosuch'"),
        ("benchmarks.memory_caps nosuch", "there is no row 'nosuch'"),
        ("benchmarks.first_step nosuch", "there is no row 'nosuch'"),
        ("benchmarks.equal_memory", "it needs a CUDA device"),
        (f"benchmarks.first_step --report {OTHER}", "is a record of fp8_steps: name one of first_step"),
        ("benchmarks.several_gpus", "torch sees 0 CUDA devices, and 2 are needed"),
        ("benchmarks.several_gpus --rows nosuch", "there is no row 'nosuch'"),
    ],
)
def test_a_wrong_command_ends_in_one_line(
    arguments: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *rest = arguments.split()
    monkeypatch.delenv("FASTPACK_TRACEBACK", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", [program, *rest])
    with pytest.raises(SystemExit) as ended, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the module is imported already, and runs a second time
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    shown = capsys.readouterr()
    printed = shown.err if ended.value.code == EXIT_USER_ERROR else str(ended.value.code)  # as Python prints a text
    assert shown.out == ""
    assert said in printed
    assert len(printed.splitlines()) == 1


def test_the_traceback_is_there_for_who_asks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FASTPACK_TRACEBACK", "1")
    assert in_one_line("name", lambda: record_of("/nosuch.json", "fp8_steps") and 0) == EXIT_USER_ERROR
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1].startswith("name: error: '/nosuch.json'")
    assert record_of(str(OTHER), "fp8_steps") == json.loads(OTHER.read_text(encoding="utf-8"))
