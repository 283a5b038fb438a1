"""Records: written whole, of a checkout or none, with the machine beside them."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path

import pytest

from fastpack_trl.errors import short_repr
from fastpack_trl.measure import record


def test_json_is_written_whole_and_without_nan(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    record.write_json(file, {"a": (1.0, math.nan), "b": {"c": math.inf}})
    assert json.loads(file.read_text()) == {"a": [1.0, "nan"], "b": {"c": "inf"}}
    with pytest.raises(TypeError):
        record.write_json(file, {"a": object()})
    assert json.loads(file.read_text())["a"] == [1.0, "nan"]
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_file_is_replaced_whole_and_never_written_through_a_link(tmp_path: Path) -> None:
    victim, target = tmp_path / "victim", tmp_path / "report.json"
    victim.write_text("mine")
    for planted in (".report.json.partial", "report.json", f".{'0' * 16}.partial"):
        (tmp_path / planted).symlink_to(victim)
    before = os.umask(0o027)
    try:
        record.write_whole(target, "ours")
    finally:
        os.umask(before)
    assert (victim.read_text(), target.read_text(), target.is_symlink()) == ("mine", "ours", False)
    assert target.stat().st_mode & 0o777 == 0o640

    def interrupted(*_: object) -> Path:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", interrupted)
        record.write_whole(target, "half")
    assert target.read_text() == "ours"
    assert sorted(path.name for path in tmp_path.iterdir() if not path.is_symlink()) == ["report.json", "victim"]
    with pytest.raises(OSError, match=r"proc"):
        record.write_whole(Path("/proc/report.json"), "ours")


SECRETS = ("token", "hub_token", "HF_TOKEN", "api_key", "use_auth_token", "Password", "secret", "wandb-api-key")
OTHERS = ("row_tokens", "max_tokens", "num_tokens", "eos_token", "pad_token", "tokenizer", "secretary", "passwords")


@pytest.mark.parametrize("name", [*SECRETS, *OTHERS])
def test_secrets_are_left_out_by_their_whole_name_at_every_depth(name: str, tmp_path: Path) -> None:
    value = {"a": [{"b": {name: "hf_abc", "path": "/home/me/data"}}, (1, {name: "hf_abc"})], name: "hf_abc"}
    record.write_json(tmp_path / "x.json", value)
    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert text.count("hf_abc") == (0 if name in SECRETS else 3)
    assert ("hf_abc" in short_repr(value)) is (name in OTHERS)
    assert "/home/me/data" in text
    assert record.finite(value, bare=True)["a"][0]["b"]["path"] == "data"


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
