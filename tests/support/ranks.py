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
    with tempfile.TemporaryFile("w+") as log:
        ranks = []
        for rank in map(str, range(2)):
            environment = _environment() | where | {"RANK": rank, "LOCAL_RANK": rank}
            command = [forks.python(), str(script), *arguments]
            ranks.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment))
        try:
            end = monotonic() + timeout
            while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):
                if monotonic() > end:
                    raise TimeoutError(f"{script.name} {' '.join(arguments)}: no end after {timeout} s")
                sleep(0.02)
        finally:
            for rank in ranks:
                rank.terminate()
                rank.wait()
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


def run_ranks(*command: str, timeout: float, **more: str) -> None:
    """Run a launcher with `more` in its environment, which has no rank of another; fail unless it ends well."""
    environment = _environment() | more
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as ran:
        try:
            _, err = ran.communicate(timeout=timeout)
        finally:
            ran.terminate()  # unlike a kill, this lets it end its two processes
    assert ran.returncode == 0, err[-3000:]


def leave() -> NoReturn:
    """End this process once the other has come here too, not through the interpreter's end: threads of gloo may outlive
    their process group there, which aborts the process ("terminate called without an active exception")."""
    import torch.distributed

    torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
