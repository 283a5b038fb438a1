"""Layers that run as they are because a hook of the user reaches into them.

torch would bake the hooks of the first layer into the graph that all layers of a kind share, and see none that comes
later: its guards leave hooks out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from torch import nn

from fastpack_trl.model.hooks import HookWatch

logger = logging.getLogger(__name__)


class HookedLayers:
    """The layers that have a hook of the user, asked before each call of one.

    Args:
        names: of the layers in their model.
        on_change: called when a layer got its first hook or lost its last.
    """

    def __init__(self, names: Mapping[nn.Module, str], on_change: Callable[[], None]) -> None:
        self._watches = {layer: HookWatch(layer, name) for layer, name in names.items()}
        self._on_change = on_change
        self._said: set[str] = set()

    def __contains__(self, layer: nn.Module) -> bool:
        watch = self._watches[layer]
        before = watch.found
        found = watch.look()
        if found != before:
            self._tell(found)
            self._on_change()
        return bool(found)

    def on(self, layers: Sequence[nn.Module]) -> list[str]:
        """Return the hook that each had when it ran last; empty for none."""
        return [self._watches[layer].found for layer in layers]

    def _tell(self, found: str) -> None:
        what = found.partition(" on ")[0]
        if what and what not in self._said:
            self._said.add(what)
            logger.warning(
                f"layer_compile: {found}: layers that it reaches run eager while it is there; remove it to have them "
                "compiled, or set layer_compile='off'"
            )
