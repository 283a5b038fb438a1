"""Two processes of one training run, on the CPU under gloo: `run_ranks` starts them, `leave` ends one of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

HERE = Path(__file__).parent


def run_ranks(*command: str, timeout: float = 400) -> str:
    """Return the output of ``torchrun --nproc_per_node 2`` for a script; fail unless both processes end well.

    Not `accelerate launch --cpu`: it starts one process.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    drop = ("WORLD_SIZE", "LOCAL_RANK", "RANK", "ACCELERATE_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(drop)}
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")])
    environment |= {
        "PYTHONPATH": path, "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }  # fmt: skip
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port]
    with subprocess.Popen(
        [*torchrun, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as ran:
        try:
            out, err = ran.communicate(timeout=timeout)
        finally:
            ran.terminate()  # unlike a kill, this lets torchrun end its two processes
    assert ran.returncode == 0, err[-3000:]
    return out


def leave() -> NoReturn:
    """End this process once the other has come here too, not through the interpreter's end: threads of gloo may outlive
    their process group there, which aborts the process ("terminate called without an active exception")."""
    import torch.distributed

    torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
