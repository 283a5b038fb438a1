"""Which records are of older code: by the rooms that their rows use, and the hashes in the record."""

from __future__ import annotations

import ast
import io
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from benchmarks import by_itself, stale
from benchmarks.record_commands import command_of
from benchmarks.results_folder import load_results
from benchmarks.stale import OPTIMISATIONS, ROOMS, reason, rooms_of
from fastpack_trl.measure import code_hash
from fastpack_trl.measure.code_hash import BENCHMARKS, code_hashes, code_of, hashes_of
from fastpack_trl.measure.record import make_record

ROOT = Path(__file__).parents[2]


def a_record(case: str = "side_by_side", model: str = "qwen3-8b") -> dict[str, Any]:
    return make_record(case=case, settings={}, rows=[{"model": model}], complete=True, threads=1, seed=0)


def changed(path: str, text: str) -> dict[str, str]:
    """Hashes of this checkout with more text at the end of one file."""
    package = ROOT / "fastpack_trl"
    room = (package / path).parent
    files = {file.relative_to(package).as_posix(): file.read_bytes() for file in room.rglob("*.py")}
    files[path] += text.encode()
    return {**code_hashes(), **hashes_of(files)}


@pytest.mark.parametrize(
    ("path", "text", "case", "model", "stale_room"),
    [
        ("lora/linear.py", "X = 1\n", "side_by_side", "qwen3-8b", "lora"),
        ("lora/linear.py", "X = 1\n", "collator", "qwen3-8b", None),
        ("lora/linear.py", "# said better\n", "side_by_side", "qwen3-8b", None),
        ("moe/routing.py", "X = 1\n", "side_by_side", "qwen3-8b", None),
        ("moe/routing.py", "X = 1\n", "side_by_side", "gpt-oss-20b", "moe"),
        ("cli/doctor.py", "X = 1\n", "side_by_side", "gpt-oss-20b", None),
    ],
)
def test_a_record_is_stale_once_a_room_that_it_uses_has_other_code(
    path: str, text: str, case: str, model: str, stale_room: str | None
) -> None:
    why = reason(a_record(case, model), changed(path, text))
    assert (why is None) == (stale_room is None), why
    assert stale_room is None or why.endswith(f": {stale_room}")


def test_a_record_of_one_optimisation_uses_the_rooms_of_that_one() -> None:
    for name, rooms in OPTIMISATIONS.items():
        assert set(rooms) <= set(ROOMS["by_itself"])
        assert rooms_of({"case": "by_itself", "settings": {"optimisation": name}}) == rooms
    assert OPTIMISATIONS.keys() == by_itself.OPTIMISATIONS.keys()


def test_what_is_said_is_not_code() -> None:
    source = '"""A module."""\n\nX = """kept"""  # why\n\n\ndef f():\n    """Say."""\n    return "# kept"  # why\n'
    assert code_of(source.encode()) == 'X = """kept"""\ndef f():\n    return "# kept"'


def test_a_record_without_hashes_is_of_older_code() -> None:
    record = a_record("moe")
    today = record.pop("code")
    record["source"] = {"commit": "0123456789", "modified": False}
    assert reason(record, today) == "of commit 0123456, when records had no hashes of their code"
    record["source"]["commit"] = None
    assert reason(record, today) == "of unknown code"
    record |= {"settings": {"rounds": 3}, "rows": [{"model": "small", "tokens": 64, "sides": {}}]}
    (found,) = stale.stale({"one.json": record, "two.json": a_record()}, today)
    assert (found.name, found.command) == ("one.json", command_of(record))
    assert stale.summed_up(1, 2) == "1 of 2 records are of older code: run these commands again"
    assert stale.summed_up(0, 2) == "0 of 2 records are of older code"


@cache
def hashes_at(commit: str) -> dict[str, str]:
    """Hashes of the package's rooms at a commit, by git."""
    archive = subprocess.run(["git", "-C", str(ROOT), "archive", commit, "fastpack_trl"], capture_output=True).stdout
    if not archive:
        return {}  # a clone without its history
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        members = [member for member in files if member.name.endswith(".py")]
        return hashes_of(
            {member.name.removeprefix("fastpack_trl/"): files.extractfile(member).read() for member in members}  # type: ignore[union-attr]
        )


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="no checkout")
def test_every_record_is_of_code_that_is_known() -> None:
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))]
    for name, record in load_results().items():
        source, code = record["source"], record.get("code")
        history = source["commit"]
        if history is None:  # measured where there was no git
            assert code, f"{name} has neither its commit nor hashes of its code"
            history, but_for = source["tree"], {Path(source.get("but_for", "")).parts[:1]}
            then = hashes_at(history) or code
            assert {(room,) for room in then if code.get(room) != then[room]} == but_for - {()}, name
        elif "landed_as" in source:
            quoting = [page for page in pages if f"benchmarks/results/{name}" in page]
            for page in quoting:
                assert f"{source['commit'][:7]}, which is not in the history" in " ".join(page.split()), name
            history = source["landed_as"]
        asked = ["git", "-C", str(ROOT), "merge-base", "--is-ancestor", history, "HEAD"]
        shallow = (ROOT / ".git" / "shallow").exists()
        assert shallow or subprocess.run(asked, check=False).returncode == 0, f"{name}: {history} is not in the history"


def test_a_record_says_which_benchmarks_measured_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert a_record()["code"][BENCHMARKS] == code_hashes()[BENCHMARKS]
    assert BENCHMARKS not in rooms_of(a_record("cuda_tests")), "the table of one case makes no record of another old"
    installed = tmp_path / "fastpack_trl" / "measure" / "code_hash.py"
    for file in (installed, tmp_path / "benchmarks" / "of_others.py"):
        file.parent.mkdir(parents=True)
        file.write_text("X = 1\n", encoding="utf-8")
    monkeypatch.setattr(code_hash, "__file__", str(installed))
    assert code_hashes.__wrapped__().keys() == {"measure"}


def test_every_record_has_rooms_that_exist_and_a_command() -> None:
    for name, record in load_results().items():
        assert set(rooms_of(record)) <= code_hashes().keys(), name
        assert command_of(record).startswith("python "), name
        assert " --json FILE" in command_of(record), name


def test_a_command_names_the_models_that_its_record_has_a_figure_of() -> None:
    assert command_of(load_results()["moe_cuda_2026-11-20_gpt-oss-20b.json"]) == (
        "python -m benchmarks.moe --rows gpt-oss-20b --rounds 7 --json FILE"
    )


def test_a_case_can_reach_the_rooms_that_it_is_said_to_use() -> None:
    for case, rooms in ROOMS.items():
        assert set(rooms) <= {Path(*file.parts[1:2]).name for file in reached(_module_of(case))}, case


def _module_of(case: str) -> Path:
    return Path("benchmarks", f"{case}.py")


def reached(start: Path) -> set[Path]:
    """Files of the package that a file imports, at its top or in functions, itself or through others."""
    todo, seen = [start], set()
    while todo:
        path = todo.pop()
        if path not in seen:
            seen.add(path)
            todo += imported(path)
    return {path for path in seen if path.parts[0] == "fastpack_trl"}


@cache
def imported(path: Path) -> tuple[Path, ...]:
    return tuple(_imported(path))


def _imported(path: Path) -> Iterator[Path]:
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import) and any(alias.name == "fastpack_trl" for alias in node.names):
            yield Path("fastpack_trl/trainer.py")  # by a name of the package
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(("fastpack_trl", "benchmarks")):
            for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names)):
                file = Path(*name.split(".")).with_suffix(".py")
                if name == "fastpack_trl.FastSFTTrainer":
                    file = Path("fastpack_trl/trainer.py")
                elif name == "fastpack_trl.run":  # a room whose `__init__` has its names
                    file = Path("fastpack_trl/run/run.py")
                if (ROOT / file).is_file():
                    yield file
