"""Tests that two processes of one training run execute, on the CPU under gloo.

A test with `two_ranks` runs in two forked processes, in the folder of the test; the second one's ``dist.get_rank()`` is
1. `fork_ranks` runs a function of a test file so, and `run_ranks` under a launcher; `fsdp2` shards a trainer.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import forks

HERE = Path(__file__).parent
BASE: dict[str, Any] = {"packing": True, "per_device_train_batch_size": 1, "eval_strategy": "no"}
"""Fields of short runs: packed rows, one per process and micro-batch."""


def two_ranks(case: Callable[..., None]) -> Callable[..., None]:
    """Let two processes run a test; its arguments can be written as JSON."""

    @functools.wraps(case)
    def test(*, tmp_path: Path, **arguments: Any) -> None:
        fork_ranks(case, tmp_path, **arguments)

    folder = inspect.Parameter("tmp_path", inspect.Parameter.KEYWORD_ONLY)
    own = inspect.signature(case)
    test.__signature__ = own.replace(parameters=[*own.parameters.values(), folder])  # type: ignore[attr-defined]
    return test


def fork_ranks(
    case: Callable[..., None], folder: Path, *, count: int = 2, timeout: float = 900, waits: bool = False,
    **arguments: Any,
) -> None:  # fmt: skip
    """Run a function of a module in two processes, or `count`; fail unless all end well.

    Args:
        waits: let all end by themselves after one has failed.
    """
    command = command_of(case, folder, **arguments)
    start_ranks(forks.python(), *command, count=count, timeout=timeout, waits=waits)


def start_ranks(*command: str, count: int = 2, timeout: float, waits: bool = False) -> None:
    """Run processes of a command with torchrun's variables, without torchrun's own process."""
    size = str(count)
    where = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = map(str, range(count))
    _run(list(command), [where | {"RANK": rank, "LOCAL_RANK": rank} for rank in ranks], timeout, waits)


def command_of(case: Callable[..., None], folder: Path, **arguments: Any) -> list[str]:
    """Return the words for an interpreter that runs a function of a module."""
    return [__file__, inspect.getfile(case), case.__name__, str(folder), json.dumps(arguments)]


def torchrun(*command: str, timeout: float = 400) -> None:
    """Run ``torchrun --nproc_per_node 2`` for a script or a module; fail unless both processes end well.

    Launcher and processes are forked. Not `accelerate launch --cpu`: it starts one process.
    """
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port(), "--no_python")
    run_ranks(forks.python(), *launcher, forks.python(), *command, timeout=timeout)


def run_ranks(*command: str, timeout: float, **more: str) -> None:
    """Run a launcher with `more` in its environment, which has no rank of another; fail unless it ends well."""
    _run(list(command), [more], timeout)


def _run(command: list[str], variables: list[dict[str, str]], timeout: float, waits: bool = False) -> None:
    """Run a command once for each set of variables; one that fails ends all unless it `waits`."""
    with tempfile.TemporaryFile("w+") as log:
        given = {"stdout": log, "stderr": log}
        processes = [subprocess.Popen(command, **given, env=_environment() | more) for more in variables]
        end = monotonic() + timeout
        try:
            while None in (codes := [process.poll() for process in processes]) and (waits or not any(codes)):
                if monotonic() > end:
                    raise TimeoutError(f"{' '.join(command)}: no end after {timeout} s")
                sleep(0.02)
        finally:
            for process in processes:
                process.terminate()  # unlike a kill, this lets a launcher end its two processes
                process.wait()
        log.seek(0)
        assert not any(codes), log.read()[-3000:]


@contextmanager
def fsdp2(trainer: Any, **plugin: Any) -> Iterator[Any]:
    """Let `trainer` train under FSDP 2 with fields of accelerate's plugin; the process is as before afterwards.

    accelerate chooses FSDP on accelerators only. Its state is told here, once the trainer is made, what ``accelerate
    launch --use_fsdp --fsdp_version 2`` would have; all that follows is accelerate's and torch's own.
    """
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    plugin = {"cpu_ram_efficient_loading": False, "state_dict_type": "FULL_STATE_DICT"} | plugin
    chosen = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **plugin)
    whole, part = AcceleratorState._shared_state, PartialState._shared_state
    before = part["distributed_type"]
    part["distributed_type"] = whole["distributed_type"] = DistributedType.FSDP
    whole["fsdp_plugin"] = chosen
    trainer.is_fsdp_enabled = True
    assert trainer.accelerator.is_fsdp2
    try:
        yield trainer
    finally:
        part["distributed_type"] = whole["distributed_type"] = before
        whole["fsdp_plugin"] = None


def free_port() -> str:
    """Return a port that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def _environment() -> dict[str, str]:
    drop = ("WORLD_SIZE", "LOCAL_RANK", "RANK", "ACCELERATE_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    kept |= {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return kept | {"PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE), kept.get("PYTHONPATH", "")])}


def _main(file: str, name: str, folder: str, arguments: str) -> None:
    """Run a function in this process; write the traceback of its error to ``said0``, ``said1``, ..."""
    spec: Any = importlib.util.spec_from_file_location(Path(file).stem, file)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    os.chdir(folder)
    try:
        spec.loader.exec_module(module)
        inspect.unwrap(getattr(module, name))(**json.loads(arguments))
    except Exception as error:
        Path(f"said{os.environ['RANK']}").write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        raise
    # Once all have come here, and not through the interpreter's end: threads of gloo may outlive their process
    # group there, which aborts the process ("terminate called without an active exception").
    import torch.distributed

    torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
