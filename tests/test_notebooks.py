"""The notebooks: stored with the outputs of their cells, and run in small on the CPU without network."""

from __future__ import annotations

import json
import os
import re
import sys
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import forks
import pytest
from stored_notebooks import METADATA, PATH, code, source, sources, text

from fastpack_trl import quickstart
from fastpack_trl._version import REPOSITORY

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "notebooks").glob("*.ipynb"))
NAMES = ["01_replace_sfttrainer", "02_three_bottlenecks", "03_gpt_oss", "04_yaml_and_cli"]
SMALLER = {
    "max_steps=60, logging_steps=20": "max_steps=2, logging_steps=1",
    "max_steps=4, logging_steps=2": "max_steps=1, logging_steps=1",
    '"max_steps": 12': '"max_steps": 3',
    '"max_length": 1024': '"max_length": 128',
    '"max_length": 512': '"max_length": 64',
    '"max_length": 256': '"max_length": 64',
    "timed=6": "timed=1, warmup=2",
    "timed=5": "timed=1, warmup=2",
    "(9, 1, 160, 6)": "(9, 1, 140, 6)",
    "--max_steps 5": "--max_steps 1 --max_length 128",
    "--steps 3 --warmup 2": "--steps 1 --warmup 1 --max_length 128",
}
"""Text of a cell -> what runs here in its place; `make notebooks` runs the whole."""


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in code(notebook) for output in cell["outputs"]]


def assert_ran(notebook: Any) -> None:
    """Each cell has run, in order, none has failed, and there is a picture."""
    cells = code(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert not [output for output in outputs(notebook) if output["output_type"] == "error"]
    assert [output for output in outputs(notebook) if "image/png" in output.get("data", {})]


@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_a_stored_notebook_has_the_outputs_of_its_cells_and_nothing_of_a_machine(file: Path) -> None:
    assert file.stem in NAMES
    notebook = json.loads(file.read_text(encoding="utf-8"))
    made_by = notebook["metadata"].pop("fastpack_trl")["sources"]
    assert made_by == sources(notebook), f"{file.name}: a cell was changed after its outputs were made: make notebooks"
    assert notebook["metadata"] == METADATA
    assert_ran(notebook)
    cells, shown = notebook["cells"], outputs(notebook)
    assert not [output for output in shown if output.get("name") == "stderr" or PATH.search(text(output))]
    assert all(part["metadata"] == {} for part in [*cells, *(one for one in shown if "data" in one)])
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert file.stat().st_size < 400_000, "too much for a page"
    assert not [source(cell) for cell in cells if PATH.search(source(cell))]
    page = f"{REPOSITORY.removeprefix('https://')}/blob/main/notebooks/{file.name}"
    badge = f"(https://colab.research.google.com/{page.replace('github.com', 'github', 1)})"
    found = (badge in source(cells[0]), f"git+{REPOSITORY}" in source(cells[1]))
    there = "/OWNER/" not in REPOSITORY
    assert found == (there, there), f"{file.name}: a badge {badge}, and git+ where there is no checkout: {there}"
    assert "OWNER" not in file.read_text(encoding="utf-8")
    for own in map(source, code(notebook)):
        # `build` is what `compare` asks its caller for.
        assert not re.search(r"^\s*(?:def(?! build\()|class|while|try)\b", own, re.MULTILINE), own
        assert len(own.splitlines()) <= 25, own


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Any]:
    """Executes a notebook, and the command in it, by processes forked of this interpreter, all in one folder."""
    for module in ("ipykernel", "matplotlib", "nbformat"):
        pytest.importorskip(module, reason="needs the extra `notebooks`")
    nbclient = pytest.importorskip("nbclient")
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager
    from jupyter_core.utils import run_sync

    folder, kernels = tmp_path_factory.mktemp("notebooks"), tmp_path_factory.mktemp("kernels")
    with pytest.MonkeyPatch.context() as patch:  # the whole text takes longer than to train on it
        part = Path(sysconfig.get_paths()["stdlib"]) / "email"
        patch.setattr(quickstart, "collect", partial(quickstart.collect, part))
        patch.setattr(quickstart, "LEAST", 50)
        for name, family in (("notebook-files", "qwen3"), ("quickstart-output", "qwen3"), ("-gpt-oss", "gpt_oss")):
            quickstart.make_inputs(folder / (f"notebook-files{name}" if name[0] == "-" else name), family)
    (kernels / "python3").mkdir()
    argv = [forks.python(), "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    spec = {"argv": argv, "display_name": "this interpreter", "language": "python"}
    (kernels / "python3" / "kernel.json").write_text(json.dumps(spec), encoding="utf-8")
    command = kernels / "fastpack-trl"
    start = f"import sys; sys.executable = '{forks.python()}'; from fastpack_trl.cli.main import main; sys.exit(main())"
    command.write_text(f'#!/bin/sh\nexec {forks.python()} -c "{start}" "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PATH": os.pathsep.join([str(kernels), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "CUDA_VISIBLE_DEVICES": "",
        "HF_DATASETS_CACHE": str(folder / "cache"),
        "IPYTHONDIR": str(folder / "ipython"),
        "OMP_NUM_THREADS": "1",
    }

    def execute(notebook: Any) -> Any:
        specs = KernelSpecManager(kernel_dirs=[str(kernels)], ensure_native_kernel=False)
        manager = AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)
        resources = {"metadata": {"path": str(folder)}}
        client = nbclient.NotebookClient(notebook, km=manager, timeout=300, resources=resources)
        try:
            return client.execute(env=environment)
        finally:
            if manager.has_kernel:  # a client ends none that it was given
                run_sync(manager.shutdown_kernel)(now=True)

    return execute


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES, ids=NAMES)
def test_a_notebook_runs_top_to_bottom_on_the_cpu(file: Path, run: Callable[[Any], Any]) -> None:
    import nbformat

    notebook = nbformat.read(file, as_version=4)
    for cell in code(notebook):
        for large, small in SMALLER.items():
            cell["source"] = cell["source"].replace(large, small)
    done = run(notebook)
    assert_ran(done)
    install = code(done)[0]
    assert install["id"] == "install"
    assert "%pip install" in source(install)
    assert install["outputs"] == [], "pip always says something: it was run, although the package is importable"
