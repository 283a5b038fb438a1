"""Two processes of one training run, on the CPU under gloo: `torchrun` or `fork_ranks` starts, `leave` ends them."""

from __future__ import annotations

import gc
import os
import pkgutil
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import forks

HERE = Path(__file__).parent
IMPORTS = "torch.distributed.fsdp,trl:SFTTrainer,peft,fastpack_trl:FastSFTTrainer"


def torchrun(*command: str, timeout: float = 400) -> None:
    """Run ``torchrun --nproc_per_node 2`` for a script or a module; fail unless both processes end well.

    Launcher and processes are forked. Not `accelerate launch --cpu`: it starts one process.
    """
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", free_port(), "--no_python")
    run_ranks(forks.python(), *launcher, forks.python(), *command, timeout=timeout)


def fork_ranks(script: Path, *arguments: str, imports: str = IMPORTS, timeout: float = 400) -> None:
    """Run two processes of a script as torchrun does, forked from one that has imported the modules `imports`.

    They take most of the time of a short run; torchrun would import them in each process.
    """
    run_ranks(forks.python(), str(HERE / "ranks.py"), free_port(), imports, str(script), *arguments, timeout=timeout)


def free_port() -> str:
    """Return a port that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def run_ranks(*command: str, timeout: float, **more: str) -> None:
    """Run a launcher with `more` in its environment, which has no rank of another; fail unless it ends well."""
    drop = ("WORLD_SIZE", "LOCAL_RANK", "RANK", "ACCELERATE_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")])
    environment |= {
        "PYTHONPATH": path, "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "", **more,
    }  # fmt: skip
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


def _fork(port: str, imports: str, script: str, *arguments: str) -> NoReturn:
    """Import, fork twice, and end with 0 once both have ended with 0, else end the other and then with 1."""
    for name in imports.split(","):
        pkgutil.resolve_name(name)
    gc.collect()
    gc.freeze()  # a collection in each training would copy all of it
    ranks: set[int] = set()

    def end(*_: object) -> NoReturn:
        for rank in ranks:
            os.kill(rank, signal.SIGTERM)
        os._exit(1)

    for rank in range(2):
        process = os.fork()
        if not process:
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }  # fmt: skip
            sys.argv = [script, *arguments]
            runpy.run_path(script, run_name="__main__")
            sys.exit("the script ended without `leave`")
        ranks.add(process)
    signal.signal(signal.SIGTERM, end)
    while ranks:
        process, status = os.wait()
        ranks.remove(process)
        if status:
            end()
    os._exit(0)


if __name__ == "__main__":
    _fork(*sys.argv[1:])
