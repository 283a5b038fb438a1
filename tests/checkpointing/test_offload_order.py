"""Whatever the schedule: copies and compute are ordered both ways, values come back, every buffer is free again."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from recording_streams import COMPUTE, RaceError, RecordingStreams
from torch import Tensor

from fastpack_trl.checkpointing.offload import Mode, Offload

LAYERS = 5
pytestmark = pytest.mark.usefixtures("offloads")


@dataclass(eq=False)
class Graph:
    """Objects that autograd would hold: per layer its saved input and the values that must come back."""

    calls: list[tuple[Any, Tensor]] = field(default_factory=list)


class Model:
    """Layers that only store and read their inputs, on recording streams.

    Attributes:
        tight: the device has room for the input in use, and for none ahead of it.
    """

    def __init__(self, mode: Mode, streams: RecordingStreams, *, keep: int = 1, budget: int = 2**20) -> None:
        self.streams, self.keep = streams, keep
        self.tight = False
        self.graphs: weakref.WeakSet[Graph] = weakref.WeakSet()
        self.said: list[str] = []
        self.offload = Offload(mode, budget_bytes=budget, streams=lambda device: streams, tell=self.said.append)

    def compute(self, tokens: int) -> Tensor:
        made = self.streams.device_memory(torch.Size((tokens, 8)), (8, 1), torch.float32)
        self.streams.use(COMPUTE, made, write=True)
        return made

    def forward(self, tokens: int, layers: int) -> Graph:
        graph = Graph()
        self.graphs.add(graph)
        x = self.compute(tokens)
        for index in range(layers):
            x.copy_(torch.randn(x.shape))
            saved = self.offload.pack(index, x.detach(), keep=index >= LAYERS - self.keep)
            graph.calls.append((saved, x.clone()))
            self.streams.use(COMPUTE, x, write=False)  # the layer itself
            x = self.compute(tokens)
        return graph

    def backward(self, graph: Graph, layers: int, *, retain: bool = False) -> None:
        for done in range(min(layers, len(graph.calls))):
            # One at a time: a slice would hold what autograd has let go of by now.
            saved, expected = graph.calls[-1 - done if retain else -1]
            x = self.unpack(saved)
            self.streams.use(COMPUTE, x, write=False)
            assert torch.equal(x, expected)
            self.compute(len(expected))  # activations of the recompute, and gradients
            del saved, x
            if not retain:
                graph.calls.pop()

    def unpack(self, saved: Any) -> Tensor:
        """Unpack; on the device are at most the kept inputs of all graphs, the input in use and the next one."""
        kept = sum(not held.on_host for graph in self.graphs for held, _ in graph.calls)
        in_use = kept + saved.on_host
        prefetches = self.offload.prefetch and not self.tight
        self.streams.device_blocks = in_use if self.tight else None
        self.streams.most_blocks = 0
        x: Tensor = self.offload.unpack(saved)
        self.streams.device_blocks = None
        assert self.streams.most_blocks <= in_use + prefetches
        return x


steps = st.lists(
    st.one_of(
        st.tuples(st.just("forward"), st.integers(2, 12), st.integers(1, LAYERS)),  # fewer layers: it broke off
        st.tuples(st.just("backward"), st.integers(0, 9), st.integers(0, LAYERS)),
        st.tuples(st.just("retained"), st.integers(0, 9), st.integers(0, LAYERS)),
        st.tuples(st.just("drop"), st.integers(0, 9), st.just(0)),
        st.tuples(st.just("nested"), st.integers(2, 12), st.integers(1, LAYERS)),
    ),
    max_size=14,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    schedule=steps,
    mode=st.sampled_from(["double_buffer", "single_buffer"]),
    keep=st.integers(0, LAYERS),
    budget=st.sampled_from([0, 2**13, 2**20]),
    tight_from=st.one_of(st.none(), st.integers(0, 13)),
)
@example([("forward", 2, 2), ("forward", 2, 1), ("drop", 1, 0), ("backward", 0, 1)], "double_buffer", 0, 0, None)
@example([("forward", 2, 3), ("retained", 0, 1), ("backward", 0, 3)], "double_buffer", 0, 0, 2)
def test_any_schedule_is_ordered_exact_and_leaves_nothing_behind(
    schedule: list[tuple[str, int, int]], mode: Mode, keep: int, budget: int, tight_from: int | None
) -> None:
    model = Model(mode, RecordingStreams(), keep=keep, budget=budget)
    graphs: list[Graph] = []
    for number, (what, first, count) in enumerate(schedule):
        model.tight = tight_from is not None and number >= tight_from
        if what in ("forward", "nested"):
            graphs.append(model.forward(first, count))
            if what == "nested" and len(graphs) > 1:  # a whole pass in the middle of another's backward
                model.backward(graphs[-2], 1)
                model.backward(graphs[-1], count)
                model.backward(graphs[-2], 1)
        elif graphs and what == "drop":
            graphs.pop(first % len(graphs))
        elif graphs:
            model.backward(graphs[first % len(graphs)], count, retain=what == "retained")
        assert model.offload.use.pinned <= budget
    graphs.clear()
    assert model.offload.use.held == 0
    model.offload.close()
    assert model.offload.use.pinned == 0
    assert model.streams.live_blocks == 0


def test_buffers_are_free_layer_by_layer_without_the_garbage_collector() -> None:
    model = Model("double_buffer", RecordingStreams(), keep=0)
    gc.disable()
    try:
        graph = model.forward(8, LAYERS)
        left = []
        while graph.calls:
            model.backward(graph, 1)
            left.append(model.offload.use.held // 256)
    finally:
        gc.enable()
    assert left == [4, 3, 2, 1, 0]


def test_a_call_from_another_thread_waits_for_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = RecordingStreams()
    model, copy = Model("double_buffer", streams, keep=0), streams.copy
    other = Thread(target=model.forward, args=(8, 1), daemon=True)

    def meanwhile(*args: Tensor) -> None:
        if other.ident is None:
            other.start()
            other.join(0.1)
            assert other.is_alive()
        copy(*args)

    monkeypatch.setattr(streams, "copy", meanwhile)
    model.forward(8, 2)
    other.join(60)
    assert not other.is_alive()


def test_the_next_input_is_asked_for_before_the_layer_is_recomputed() -> None:
    model = Model("double_buffer", RecordingStreams(), keep=1)
    graph = model.forward(8, LAYERS)
    model.streams.log.clear()
    copies = []
    while graph.calls:
        model.backward(graph, 1)
        copies.append(len(model.streams.log))
    # The kept last layer fetches the one before it; from then on each layer finds its input on the way.
    assert copies == [1, 2, 3, 4, 4]


def test_a_second_graph_fetches_no_inputs_of_the_first() -> None:
    model = Model("double_buffer", RecordingStreams(), keep=1)
    first, second = model.forward(8, LAYERS), model.forward(8, LAYERS)
    model.streams.log.clear()
    model.backward(second, LAYERS)
    assert len(model.streams.log) <= 1  # by its last layer, whose input stays on the device in any graph
    model.backward(first, LAYERS)


@pytest.mark.parametrize("missing", ["input computed", "slot free", "copy done", "input stored"])
def test_the_recorder_finds_each_missing_wait(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks above can fail: without any one of the waits, an access is found that nothing orders."""
    streams = RecordingStreams()
    model = Model("double_buffer", streams, keep=0)
    wait, calls = streams.wait, []

    def forgetful(stream: str, event: dict[str, int]) -> None:
        backward = bool(calls)
        kind = {
            ("copy", False): "input computed", ("copy", True): "slot free",
            (COMPUTE, True): "copy done", (COMPUTE, False): "input stored",
        }[stream, backward]  # fmt: skip
        if kind != missing:
            wait(stream, event)

    monkeypatch.setattr(streams, "wait", forgetful)
    with pytest.raises(RaceError):
        graph = model.forward(8, LAYERS)
        calls.append("backward")
        model.backward(graph, LAYERS)
