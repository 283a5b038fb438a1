"""``python -m benchmarks``, in a checkout: measure, and write the pages from the records."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module

from fastpack_trl.errors import UserError, describe, did_you_mean

COMMANDS = {
    "run": "train each side of each row in a process of its own: SFT, preference trainers, several GPUs",
    "micro": "kernels and work of the host alone, sides in turn",
    "memory_caps": "the longest packed row under caps of device memory",
    "real_weights": "what each side learns from pretrained weights: losses, held-out loss, exact matches",
    "several_gpus": "save, resume and load under FSDP 2 or DDP; --gpus: speed per GPU",
    "tables": "write README's table and figure and RESULTS.md from the records",
}


def main(words: Sequence[str]) -> int:
    """Run a command; what the caller has to change is one line."""
    name, *rest = words or ["--help"]
    if name in ("--help", "-h", "--list"):
        print("usage: python -m benchmarks COMMAND ...; COMMAND --help lists its options\n")
        print("\n".join(f"{command:13} {text}" for command, text in COMMANDS.items()))
        return 0
    try:
        if name not in COMMANDS:
            raise UserError(f"command {name!r} is unknown{did_you_mean(name, COMMANDS)}: {', '.join(COMMANDS)}")
        return int(import_module(f"benchmarks.{name}").main(rest))
    except UserError as error:
        if os.environ.get("FASTPACK_TRACEBACK"):
            traceback.print_exc()
        print(f"python -m benchmarks {name}: error: {describe(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
