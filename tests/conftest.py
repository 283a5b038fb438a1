"""Fixtures that several test files share."""

from __future__ import annotations

import gc
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from time import process_time
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import forks
import own_faults
import pytest
from sft_material import Material, save_model, write_jsonl

# Read when libraries are imported. To draw progress bars of `datasets` takes longer than to map a few rows; threads of
# torch that wait for work sleep instead of spinning, which makes small steps on a busy machine several times faster.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
if os.environ.get("ATEN_CPU_CAPABILITY") in ("default", "avx2"):
    # torch's attention asks oneDNN for vectors: else "pack_vnni2 is only supported when avx512 is supported" in bf16.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")
if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the processes share the cores already

import torch

# A process that sees several GPUs is given `nn.DataParallel` by transformers, which SFTTrainer refuses.
if (gpus := torch.cuda.device_count()) > 1:
    os.environ["FASTPACK_TEST_GPUS"] = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    os.environ["CUDA_VISIBLE_DEVICES"] = str(int((worker or "gw0")[2:]) % gpus)

# A machine that only runs the tests of a device may lack what the others need.
collect_ignore = [
    str(file.relative_to(Path(__file__).parent))
    for file in Path(__file__).parent.rglob("test_*.py")
    if find_spec("hypothesis") is None and "from hypothesis import" in file.read_text(encoding="utf-8")
]

if find_spec("hypothesis") is not None:
    from hypothesis import settings

    # The same examples in each run: only a change fails one. `pytest --hypothesis-profile=random` draws others.
    settings.register_profile("same", derandomize=True)
    settings.register_profile("random", derandomize=False)
    settings.load_profile("same")


def pytest_report_header() -> str | None:
    """Name what is left out: no test may be missing in silence."""
    return f"not collected without hypothesis: {', '.join(collect_ignore)}" if collect_ignore else None


def pytest_configure(config: pytest.Config) -> None:
    """Name the folder of the parent of forked processes; workers inherit it."""
    if "PYTEST_XDIST_WORKER" in os.environ or forks.FOLDER in os.environ:
        return
    folder = Path(tempfile.mkdtemp(prefix="fastpack-tests-"))
    os.environ[forks.FOLDER] = str(folder)

    def end() -> None:
        forks.stop(folder)
        shutil.rmtree(folder, ignore_errors=True)
        os.environ.pop(forks.FOLDER, None)

    config.add_cleanup(end)


_SLOW = 0.02
"""Seconds of a full collection after which what is left is frozen: a tenth of a short training."""


class _Collections:
    """Times the full collections of the garbage collector, and hides long-lived objects from it.

    Every training collects when it starts and when it ends: each time a walk over all of torch and transformers, and
    over what compiled graphs leave in caches, which would be most of the time of a test.
    """

    def __init__(self) -> None:
        self.slowest, self._began = _SLOW, 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2:
            self.slowest = max(self.slowest, process_time() - self._began if phase == "stop" else 0.0)
            self._began = process_time()

    def freeze(self) -> None:
        """Freeze what is there if a collection was slow since the last time."""
        if self.slowest >= _SLOW:
            gc.collect()
            gc.freeze()
            self.slowest = 0.0


_COLLECTIONS = _Collections()


def _leave_out(patch: pytest.MonkeyPatch) -> None:
    """Leave out work of libraries that no test reads, a third of the time of a trainer's construction.

    A data set's fingerprint is random, as that of one that cannot be hashed: it names a file in a cache that is of one
    test alone. accelerate looks for a package once. No traceback is kept for the seed of a device that is not used.
    """
    if "datasets" in sys.modules:
        from datasets import arrow_dataset, fingerprint

        def drawn(*given: Any) -> str:
            return fingerprint.generate_random_fingerprint()

        patch.setattr(arrow_dataset, "generate_fingerprint", drawn)
        for module in (arrow_dataset, fingerprint):
            patch.setattr(module, "update_fingerprint", drawn)
    if "accelerate" in sys.modules:
        from accelerate.utils import imports

        patch.setattr(imports, "_is_package_available", cache(imports._is_package_available))
    for device in (torch.cuda, torch.xpu, torch.mtia):
        patch.setattr(device, "traceback", SimpleNamespace(format_stack=list))


_FIRST = (
    "test_triton", "test_many_ranks", "test_trl_cases", "test_fsdp2", "test_users_compile", "test_ranks", "test_ddp",
    "test_notebooks", "test_two_ranks",
    "test_users_hooks", "test_capture_changes", "test_sft_command", "test_run",
    "test_nested", "test_capture", "test_capture_limits", "test_trl_examples", "test_forecast",
    "test_activation_memory", "test_without_bf16", "test_moved_names", "test_package", "test_pages",
    "test_unreadable_models", "test_packed_inputs", "test_lora_quantized", "test_gemma4", "test_quantized_experts",
    "test_moe_compile", "test_random_runs", "test_quickstart", "test_docs",
    "test_packing", "test_no_wait", "test_step_plans", "test_real_weights", "test_garbage",
)  # fmt: skip
"""Files of few tests that take 13 to 110 seconds; at the end one process would wait for another's."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long files first and short ones last; of the others, those of many tests come first. Skip what needs CUDA."""
    count = Counter(item.path for item in items)
    place = {name: index for index, name in enumerate(_FIRST)}
    items.sort(key=lambda item: (place.get(item.path.stem, len(_FIRST)), -count[item.path], item.path))
    for item in items if not torch.cuda.is_available() else ():
        if item.get_closest_marker("cuda"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Modules that the tests import."""
    patch = pytest.MonkeyPatch()
    session.config.add_cleanup(patch.undo)
    _leave_out(patch)
    _COLLECTIONS.freeze()
    gc.callbacks.append(_COLLECTIONS)
    session.config.add_cleanup(lambda: gc.callbacks.remove(_COLLECTIONS))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Let the numbers that a test draws depend on its name alone, not on the tests before it in this process."""
    seed = crc32(item.nodeid.encode())
    torch.manual_seed(seed)
    random.seed(seed)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """What a test was the first to need, once its own objects are gone."""
    _COLLECTIONS.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter collect the rest when it ends; extension modules complain where it does not."""
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def _own_faults() -> Iterator[None]:
    """End each test in which a feature fails and lets TRL run: otherwise a fault of ours passes for an odd model."""
    own_faults.FEATURES.addFilter(own_faults.raise_fault)
    yield
    own_faults.FEATURES.removeFilter(own_faults.raise_fault)


@pytest.fixture
def reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let features fail: the test plants the fault, and reads the report or the warning."""
    monkeypatch.setattr(own_faults.FEATURES, "filters", [])


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let interpreters that the package, its benchmarks or torchrun start be forked processes."""
    monkeypatch.setattr(sys, "executable", forks.python())
    monkeypatch.setenv("PYTHON_EXEC", forks.python())  # of torchrun


@pytest.fixture(scope="session")
def sft_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with its tokenizer under ``model`` and text rows in ``train.jsonl``."""
    folder = tmp_path_factory.mktemp("sft")
    save_model(folder / "model")
    write_jsonl(folder / "train.jsonl")
    return folder


@pytest.fixture
def material(sft_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Material:
    """The shared model and data, a folder of this test, and no launcher, hub or traceback request around it."""
    import datasets

    for name in ("WORLD_SIZE", "LOCAL_RANK", "RANK", "FASTPACK_TRACEBACK", "ACCELERATE_DYNAMO_USE_FULLGRAPH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return Material(sft_folder / "model", sft_folder / "train.jsonl", tmp_path)


@pytest.fixture
def offloads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layer inputs go to host memory, however small, also on a machine without a device."""
    from fastpack_trl.callbacks import async_checkpoint
    from fastpack_trl.checkpointing import offload, planned
    from fastpack_trl.features import activation_memory, checkpoint_offload

    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    for place in (activation_memory, checkpoint_offload, planned, async_checkpoint):
        monkeypatch.setattr(place, "offload_unavailable", lambda device: "")


@pytest.fixture
def varlen_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `varlen` be chosen on the CPU, where its operator runs the twin: attention that a graph can have."""
    from dataclasses import replace

    from fastpack_trl.attention.varlen import Varlen

    refuses = Varlen.refuses

    def with_a_device(self: Varlen, one: Any) -> str:
        if one.device_type == "cpu":
            one = replace(one, device_type="cuda", capability=(9, 0), compute_dtype=torch.bfloat16)
        return refuses(self, one)

    monkeypatch.setattr(Varlen, "refuses", with_a_device)
