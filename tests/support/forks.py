"""Python processes forked from a parent that has imported the libraries: importing takes longer than most runs.

`python()` is a command that takes ``-c CODE``, ``-m MODULE`` or ``FILE`` with arguments, as an interpreter does, with
its own input, output, folder, environment, signals and exit code. The parent has not imported this package, and has
the variables of `ENVIRONMENT`, which libraries read on import. All workers share it; the first command starts it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

FOLDER = "FASTPACK_TESTS_FORKS"
"""Variable with the folder of the parent's socket, of one test run."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": "",
    "TORCH_WARM_POOL": "0",
}  # fmt: skip
KEPT = ("PATH", "HOME", "LANG", "TMPDIR", "PYTHONDONTWRITEBYTECODE")
MODULES = (
    "torch.distributed.fsdp", "torch._dynamo", "datasets", "transformers", "accelerate", "peft",
    "trl.trainer.sft_trainer", "matplotlib",
)  # fmt: skip
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def python() -> str:
    """Return the command; that of this interpreter if a test run has no folder or processes cannot be forked."""
    folder = os.environ.get(FOLDER)
    if not folder or not sys.platform.startswith("linux"):
        return sys.executable
    command = Path(folder, "python")
    if not command.exists():
        made = command.with_name(f"python-{os.getpid()}")
        # Isolated and without `site`: it only passes on what it is given.
        made.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {__file__} {folder} "$@"\n', encoding="utf-8")
        made.chmod(0o755)
        made.rename(command)
    return str(command)


def stop(folder: Path) -> None:
    """End the parent, if one was started."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        os.kill(int((folder / "pid").read_text(encoding="utf-8")), signal.SIGTERM)


def _connect(folder: str) -> socket.socket:
    """Connect to the parent; the first command starts it, and the others wait meanwhile."""
    import fcntl
    import subprocess

    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with Path(folder, "lock").open("w") as lock, Path(folder, "log").open("a") as log:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            connection.connect(f"{folder}/socket")
        except OSError:
            parent = subprocess.Popen(
                [sys.executable, __file__, folder, "--parent"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                env={name: os.environ[name] for name in KEPT if name in os.environ} | ENVIRONMENT,
                stderr=log, start_new_session=True, cwd=folder,
            )  # fmt: skip
            if parent.stdout is None or parent.stdout.readline() != b"ready\n":
                sys.exit(f"the parent of forked processes did not start:\n{Path(log.name).read_text()[-3000:]}")
            connection.connect(f"{folder}/socket")
    return connection


def _command(folder: str, argv: list[str]) -> NoReturn:
    """Let the parent run `argv` with this process's environment, folder and files; end as it ends."""
    connection = _connect(folder)
    socket.send_fds(connection, [json.dumps([argv, dict(os.environ), str(Path.cwd())]).encode()], [0, 1, 2])
    for number in SIGNALS:
        signal.signal(number, lambda given, _: connection.sendall(bytes([given])))
    code = int(connection.recv(8) or 70)
    if code < 0:
        if -code in SIGNALS:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _parent(folder: str) -> NoReturn:
    """Import `MODULES`, then fork a process for each command: pass on its signals, return its exit code.

    If a command is gone before its process, all processes of that one's group are killed.
    """
    import gc
    import importlib
    from select import select

    import own_faults

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell ignores it
    for name in MODULES:
        importlib.import_module(name)
    own_faults.FEATURES.addFilter(own_faults.raise_fault)
    gc.collect()
    gc.freeze()  # a collection in each training would copy all of it
    Path(folder, "socket").unlink(missing_ok=True)  # of a parent that somebody killed
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(f"{folder}/socket")
    listening.listen()
    Path(folder, "pid").write_text(str(os.getpid()), encoding="utf-8")
    os.write(1, b"ready\n")
    os.dup2(0, 1)
    running: dict[socket.socket, int] = {}
    while True:
        for connection in select([listening, *running], [], [], 0.02 if running else None)[0]:
            if connection is listening:
                command, _ = listening.accept()
                request, files, _, _ = socket.recv_fds(command, 1 << 20, 3)
                running[command] = os.fork()
                if not running[command]:
                    os.setsid()
                    _become(*json.loads(request), files)
                for file in files:
                    os.close(file)
                continue
            given = connection.recv(1)
            with contextlib.suppress(ProcessLookupError):
                process = running[connection]
                os.kill(process, given[0]) if given else os.killpg(process, signal.SIGKILL)
        for connection, process in list(running.items()):
            done, status = os.waitpid(process, os.WNOHANG)
            if done:
                with contextlib.suppress(OSError), connection:
                    connection.sendall(str(os.waitstatus_to_exitcode(status)).encode())
                del running[connection]


def _become(argv: list[str], environment: dict[str, str], folder: str, files: list[int]) -> NoReturn:
    """Run `argv` as an interpreter would that has just been started."""
    import runpy
    import threading
    import traceback

    for number, file in enumerate(files):
        os.dup2(file, number)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment | ENVIRONMENT)
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    if "HF_DATASETS_CACHE" in environment:
        import datasets

        datasets.config.HF_DATASETS_CACHE = Path(environment["HF_DATASETS_CACHE"])
    argv = argv[argv[0] == "-u" :]  # torchrun's; output has lines anyway
    first, *rest = argv
    paths = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    start = {"-c": "", "-m": folder}.get(first, str(Path(first).parent))
    sys.path[:] = [start, *paths, *sys.path[1:]]
    code: Any = 0
    try:
        if first == "-c":
            sys.argv = ["-c", *rest[1:]]
            sys.modules["__main__"] = main = type(sys)("__main__")
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        elif first == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = argv
            runpy.run_path(first, run_name="__main__")
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # noqa: BLE001  # as an interpreter does
        traceback.print_exc()
        code = 1
    if isinstance(code, str):
        sys.stderr.write(code + "\n")
    code = code if isinstance(code, int) else int(code is not None)
    threading._shutdown()  # type: ignore[attr-defined]
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):  # closed
            stream.flush()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    given = sys.argv[2:]
    if given == ["--parent"]:
        _parent(sys.argv[1])
    _command(sys.argv[1], given)
