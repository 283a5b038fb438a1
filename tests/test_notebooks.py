"""The notebooks: stored with the outputs of their cells, and run top to bottom on the CPU without network."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forks
import pytest
from stored_notebooks import METADATA, PATH, code, source, sources, text

from fastpack_trl._version import REPOSITORY

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = [file.stem for file in FILES]
SECONDS = 300  # per cell, on a busy machine

Run = Callable[..., Any]


def read(file: Path) -> dict[str, Any]:
    notebook: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return notebook


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in code(notebook) for output in cell["outputs"]]


def pictures(notebook: Any) -> list[Any]:
    return [output for output in outputs(notebook) if "image/png" in output.get("data", {})]


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_a_stored_notebook_has_the_outputs_of_its_cells_and_nothing_of_a_machine(file: Path) -> None:
    notebook = read(file)
    made_by = notebook["metadata"].pop("fastpack_trl")["sources"]
    assert made_by == sources(notebook), f"{file.name}: a cell was changed after its outputs were made: make notebooks"
    assert notebook["metadata"] == METADATA
    cells = code(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert pictures(notebook)
    assert not [output for output in outputs(notebook) if output["output_type"] == "error"]
    assert not [output for output in outputs(notebook) if output.get("name") == "stderr" or PATH.search(text(output))]
    assert all(part["metadata"] == {} for part in [*notebook["cells"], *pictures(notebook)])
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    assert file.stat().st_size < 400_000, "too much for a page"
    assert not [source(cell) for cell in notebook["cells"] if PATH.search(source(cell))]


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_a_notebook_names_the_repository_once_there_is_one_and_only_imports_and_shows(file: Path) -> None:
    assert NAMES == ["01_replace_sfttrainer", "02_three_bottlenecks", "03_gpt_oss", "04_yaml_and_cli"]
    title, install = map(source, read(file)["cells"][:2])
    page = f"{REPOSITORY.removeprefix('https://')}/blob/main/notebooks/{file.name}"
    badge = f"(https://colab.research.google.com/{page.replace('github.com', 'github', 1)})"
    found = (badge in title, f"git+{REPOSITORY}" in install)
    there = "/OWNER/" not in REPOSITORY
    assert found == (there, there), f"{file.name}: a badge {badge}, and git+ where there is no checkout: {there}"
    assert "OWNER" not in file.read_text(encoding="utf-8")
    for cell in code(read(file)):
        # `build` is what `compare` asks its caller for.
        assert not re.search(r"^\s*(?:def(?! build\()|class|while|try)\b", source(cell), re.MULTILINE), source(cell)
        assert len(source(cell).splitlines()) <= 25, source(cell)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Executes a notebook, and the command in it, by processes forked of this interpreter, all in one folder."""
    for module in ("ipykernel", "matplotlib", "nbformat"):
        pytest.importorskip(module, reason="needs the extra `notebooks`")
    nbclient = pytest.importorskip("nbclient")
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from jupyter_core.utils import run_sync

    folder, kernels = tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("kernels")
    (kernels / "python3").mkdir()
    argv = [forks.python(), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "this interpreter", "language": "python"}
    (kernels / "python3" / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
    command = kernels / "fastpack-trl"
    command.write_text(f'#!/bin/sh\nexec {forks.python()} -m fastpack_trl "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PATH": os.pathsep.join([str(kernels), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "IPYTHONDIR": str(folder / "ipython"),
        "OMP_NUM_THREADS": "1",
    }

    def execute(notebook: Any) -> Any:
        specs = KernelSpecManager(kernel_dirs=[str(kernels)], ensure_native_kernel=False)
        manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)
        resources = {"metadata": {"path": str(folder)}}
        client = nbclient.NotebookClient(notebook, km=manager, timeout=SECONDS, resources=resources)
        try:
            return client.execute(env=environment)
        finally:
            if manager.has_kernel:  # a client ends none that it was given
                run_sync(manager.shutdown_kernel)(now=True)

    return execute


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_a_notebook_runs_top_to_bottom_on_the_cpu(file: Path, run: Run) -> None:
    import nbformat

    done = run(nbformat.read(file, as_version=4))
    cells = code(done)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert cells[0]["id"] == "install"
    assert "%pip install" in source(cells[0])
    assert cells[0]["outputs"] == [], "pip always says something: it was run, although the package is importable"
    assert not [output for output in outputs(done) if output["output_type"] == "error"]
    assert pictures(done), "shows no figure"
