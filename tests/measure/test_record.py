"""Records: written whole, of a checkout or none, with the machine beside them."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest

from fastpack_trl.measure import record


def test_json_is_written_whole_and_without_nan(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    record.write_json(file, {"a": (1.0, math.nan), "b": {"c": math.inf}})
    assert json.loads(file.read_text()) == {"a": [1.0, "nan"], "b": {"c": "inf"}}
    with pytest.raises(TypeError):
        record.write_json(file, {"a": object()})
    assert json.loads(file.read_text())["a"] == [1.0, "nan"]
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_source_is_the_checkout_or_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package that lies in site-packages inside of another repository has no commit of its own."""
    inner = tmp_path / "site-packages" / "fastpack_trl" / "bench"
    inner.mkdir(parents=True)
    monkeypatch.setattr(record, "__file__", str(inner / "record.py"))
    assert record.source() == {"commit": None, "modified": None}
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    assert record.source() == {"commit": None, "modified": None}
    outer = tmp_path / "fastpack_trl" / "bench"
    outer.mkdir(parents=True)
    monkeypatch.setattr(record, "__file__", str(outer / "record.py"))
    found = record.source()
    assert len(found["commit"]) == 40
    assert found["modified"] is False
    for name, counts in (("benchmarks/results/lora.json", False), ("benchmarks/lora.py", True)):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        subprocess.run([*git, "add", name], check=True)
        assert record.source()["modified"] is counts, name
