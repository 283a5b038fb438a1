"""Importing the package does nothing; what it promises by name exists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

import fastpack_trl
from fastpack_trl._version import REPOSITORY

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")

IMPORT_ALONE = """
import sys, socket
from importlib.machinery import PathFinder

class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {"triton", "bitsandbytes"} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Hiding
def refuse(*args, **kwargs):
    raise AssertionError("the import opened a connection")
socket.socket.connect = refuse
import fastpack_trl
heavy = {"torch", "transformers", "trl", "peft", "datasets"} & set(sys.modules)
assert not heavy, f"import fastpack_trl loaded {heavy}"
import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
import trl.trainer.sft_trainer as stock
registered = sorted(AttentionInterface._global_mapping), sorted(AttentionMaskInterface._global_mapping)
members = dict(vars(stock.SFTTrainer))
for name in fastpack_trl.__all__:
    assert getattr(fastpack_trl, name) is not None
assert registered == (sorted(AttentionInterface._global_mapping), sorted(AttentionMaskInterface._global_mapping))
assert members == dict(vars(stock.SFTTrainer)) and not torch.cuda.is_initialized()
assert not {"triton", "bitsandbytes"} & set(sys.modules)
"""


@pytest.mark.slow
def test_import_patches_nothing_and_needs_neither_triton_nor_bitsandbytes() -> None:
    run = subprocess.run([sys.executable, "-c", IMPORT_ALONE], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr


def test_public_names_exist_and_are_documented() -> None:
    assert fastpack_trl.__all__ == sorted(fastpack_trl.__all__, key=lambda name: (name.islower(), name))
    assert set(fastpack_trl.__all__) <= set(dir(fastpack_trl))
    for name in fastpack_trl.__all__:
        value = getattr(fastpack_trl, name)
        assert value is not None
        assert not callable(value) or (value.__doc__ or "").strip(), name
    with pytest.raises(AttributeError, match="no attribute 'FastSTFTrainer'"):
        _ = fastpack_trl.FastSTFTrainer


def test_tested_versions_are_within_the_promised_ranges() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.strip().split("==") for line in lines if "==" in line and not line.startswith("#"))
    pinned = {name.lower().replace("_", "-"): version for name, version in pinned.items()}
    assert pinned["torch"] == "2.13.0"
    for line in PROJECT["dependencies"]:
        requirement = Requirement(line)
        assert requirement.specifier.contains(Version(pinned[requirement.name])), line


def test_version_and_address_are_the_same_wherever_they_stand() -> None:
    version = fastpack_trl.__version__
    assert re.search(rf"^## {re.escape(version)} \((unreleased|\d{{4}}-\d\d-\d\d)\)$", CHANGELOG, re.MULTILINE)
    assert PROJECT["urls"]["Homepage"] == REPOSITORY
    assert all(url.startswith(REPOSITORY) for url in PROJECT["urls"].values())
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8").splitlines()
    assert {f"repository-code: {REPOSITORY}", f"version: {version}"} <= set(citation)


def test_the_changelog_is_short() -> None:
    entries = re.split(r"^(?=- |#|\n)", CHANGELOG, flags=re.MULTILINE)
    assert not [entry for entry in entries if len(entry.strip().splitlines()) > 2]


def test_templates_and_workflow_are_yaml_whose_commands_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    files = sorted((ROOT / ".github").rglob("*.yml"))
    assert {file.name for file in files} == {"bug.yml", "config.yml", "model.yml", "tests.yml"}
    for file in files:
        yaml.safe_load(file.read_text(encoding="utf-8"))
        for target in re.findall(r"`?make ([\w-]+)", file.read_text(encoding="utf-8")):
            assert f"\n{target}:" in makefile, target


def run(*command: object, cwd: Path, **environment: str) -> str:
    """Run a command in `cwd` without our checkout on its path; return what it prints."""
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, cwd=cwd, env=outside)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_wheel_of_the_sdist_installs_and_works_in_an_empty_folder(tmp_path: Path) -> None:
    """Nothing is downloaded; `build` makes the wheel from the sdist."""
    pytest.importorskip("build")
    pytest.importorskip("hatch_fancy_pypi_readme")
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, ROOT, cwd=empty)
    (file,) = tmp_path.glob("*.whl")
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "install", *options, "--target", site, file, cwd=empty)
    where = {"PYTHONPATH": str(site)}
    code = "import fastpack_trl; print(fastpack_trl.__version__, fastpack_trl.__file__)"
    version, place = run(sys.executable, "-c", code, cwd=empty, **where).split()
    assert (version, Path(place).parents[1]) == (fastpack_trl.__version__, site)
    for command in ([sys.executable, "-m", "fastpack_trl"], [site / "bin" / "fastpack-trl"]):  # the script of pip
        assert run(*command, "--version", cwd=empty, **where).split()[1] == version
    said = run(*command, "init", "qwen3-8b-lora-8k", cwd=empty, **where)
    assert "train: fastpack-trl sft --config qwen3-8b-lora-8k.yaml" in said
    assert (empty / "qwen3-8b-lora-8k.yaml").is_file()
    assert not {"benchmarks", "tests"} & {path.name for path in site.iterdir()}
    (metadata,) = site.glob("fastpack_trl-*.dist-info/METADATA")
    targets = re.findall(r"\]\(([^)]+)\)", metadata.read_text(encoding="utf-8"))
    files = [target for target in targets if "/OWNER/fastpack-trl/" in target]
    assert len(files) > 5
    assert all(target.startswith(("https://", "#")) for target in targets), targets
    assert all((ROOT / target.partition("/main/")[2].partition("#")[0]).exists() for target in files), files
