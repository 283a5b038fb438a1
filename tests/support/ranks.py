"""Two processes of one training run, on the CPU under gloo: `torchrun` or `fork_ranks` starts, `leave` ends them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic, sleep
from typing import NoReturn

import forks

HERE = Path(__file__).parent


def torchrun(*command: str, timeout: float = 400) -> None:
    """Run ``torchrun --nproc_per_node 2`` for a script or a module; fail unless both processes end well.

    Launcher and processes are forked. Not `accelerate launch --cpu`: it starts one process.
    """
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port(), "--no_python")
    run_ranks(forks.python(), *launcher, forks.python(), *command, timeout=timeout)


def fork_ranks(script: Path, *arguments: str, timeout: float = 400) -> None:
    """Run two processes of a script as torchrun does, without torchrun's own; fail unless both end well."""
    where = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks = [where | {"RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    _run([forks.python(), str(script), *arguments], ranks, timeout)


def run_ranks(*command: str, timeout: float, **more: str) -> None:
    """Run a launcher with `more` in its environment, which has no rank of another; fail unless it ends well."""
    _run(list(command), [more], timeout)


def _run(command: list[str], variables: list[dict[str, str]], timeout: float) -> None:
    """Run a command once for each set of variables; one that fails ends all."""
    with tempfile.TemporaryFile("w+") as log:
        given = {"stdout": log, "stderr": log}
        processes = [subprocess.Popen(command, **given, env=_environment() | more) for more in variables]
        end = monotonic() + timeout
        try:
            while None in (codes := [process.poll() for process in processes]) and not any(codes):
                if monotonic() > end:
                    raise TimeoutError(f"{' '.join(command)}: no end after {timeout} s")
                sleep(0.02)
        finally:
            for process in processes:
                process.terminate()  # unlike a kill, this lets a launcher end its two processes
                process.wait()
        log.seek(0)
        assert not any(codes), log.read()[-3000:]


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


def leave() -> NoReturn:
    """End this process once the other has come here too, not through the interpreter's end: threads of gloo may outlive
    their process group there, which aborts the process ("terminate called without an active exception")."""
    import torch.distributed

    torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
