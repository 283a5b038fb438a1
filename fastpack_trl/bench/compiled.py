"""Stock with its decoder layers compiled, as accelerate compiles them: the baseline that is called tuned."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def compiled_regions(trainer: Any, backend: str = "inductor") -> Iterator[None]:
    """What ``torch_compile=True`` with accelerate's regional compilation makes of the model that is prepared inside.

    Not through the arguments: accelerate keeps them for the process, and the other sides would be compiled too.

    Args:
        trainer: its accelerator prepares the model.
        backend: of `torch.compile`.
    """
    from accelerate.utils import TorchDynamoPlugin

    state = trainer.accelerator.state
    before = state.dynamo_plugin
    state.dynamo_plugin = TorchDynamoPlugin(backend=backend, use_regional_compilation=True)
    try:
        yield
    finally:
        state.dynamo_plugin = before


def compiled_path(attention: str, backend: str) -> str:
    """What that side runs, for people."""
    return f"{attention}, layers compiled by accelerate{'' if backend == 'inductor' else f' ({backend} backend)'}"
