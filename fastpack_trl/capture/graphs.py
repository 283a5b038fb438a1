"""The backbone of a model from CUDA graphs: its forward is one graph, its backward another; the same for all trainers.

The decoder layers launch nearly all kernels of a micro-batch. A row is copied into static tensors
(`packing.static_batch`), the forward graph is replayed, and the head reads the hidden states of the row. The backward
graph adds to the gradients of the parameters. Head, loss, metrics, clipping and optimizer stay eager: the host launches
head and loss while the device runs the forward graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from operator import itemgetter
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor, nn
from transformers import TrainerCallback

from fastpack_trl.capture.decision import FEATURE, IdleRule
from fastpack_trl.capture.device import CudaGraphs
from fastpack_trl.capture.slot import GradientBuffers, Key, Open, Slot, of_row
from fastpack_trl.errors import PackingError, close_frames, describe, first_cause
from fastpack_trl.model.hooks import HookWatch, hook_on_a_gradient, replaced_methods, trained_parameters
from fastpack_trl.model.upstream import BaseTunerLayer
from fastpack_trl.packing.buckets import Bucket, Buckets
from fastpack_trl.packing.packed_batch import PackedBatch
from fastpack_trl.packing.static_batch import Form
from fastpack_trl.run import Run
from fastpack_trl.step.hostwork import ModelContents
from fastpack_trl.step.loss import ROUTER_LOGITS, RowOutputs

logger = get_logger(__name__)

WARM_ROWS = 1
"""Rows of a bucket that run eagerly in its static shapes: they load and tune kernels, which cannot be recorded. One
more if a recording fails after them."""
MAX_RERECORDINGS = 3
"""How often graphs are recorded again because the model was changed."""
LOSS_METHODS = ("compute_loss", "training_step")
"""Methods of a trainer that may keep hidden states, which the next replay overwrites, or differentiate twice."""
_training = itemgetter("training")


class ModelState:
    """The host's side of a model, compared from one micro-step to the next.

    Addresses of parameters and buffers (a swap of ``.data``, an average of weights, a move), which of them train
    (frozen layers), edits of those with a dense copy, modes, dropout, replaced forwards, adapters (active, merged,
    disabled, scaled), and, through `ModelContents`, modules and parameters that were put in. Values of what trains are
    not compared: a graph reads them anew.

    Args:
        contents: lists the model again when it has changed.
    """

    def __init__(self, contents: ModelContents) -> None:
        self._contents = contents
        self._version: int | None = None

    def now(self, model: nn.Module) -> tuple[Any, ...]:
        """Return a value that equals an earlier one as long as nothing of the above has changed.

        Costs a tenth of a microsecond per module and parameter.
        """
        if self._version != self._contents.refresh(model):
            self._version = self._contents.version
            modules = self._contents.modules
            self._buffers = [module._buffers for module in modules if module._buffers]
            self._modes = [vars(module) for module in modules if "training" in vars(module)]
            self._adapters = [module for module in modules if isinstance(module, BaseTunerLayer)]
            self._dropouts = [module for module in modules if isinstance(module, nn.Dropout)]
            self._own = [vars(module) for module in modules]
        return (
            self._version,
            [(parameter.data_ptr(), parameter.requires_grad) for parameter in self._contents.parameters],
            # A weight that was edited since its dense copy was made is read itself from then on.
            [copied[0]._version for own in self._own if (copied := own.get("fastpack_copied_from")) is not None],
            [0 if one is None else one.data_ptr() for buffers in self._buffers for one in buffers.values()],
            bytes(map(_training, self._modes)),
            [_adapter_state(layer) for layer in self._adapters],
            [module.p for module in self._dropouts],
            [own.get("forward") for own in self._own],
            torch.is_anomaly_enabled(),
            torch.get_default_dtype(),
        )

    @property
    def is_adapted(self) -> bool:
        """Whether adapters take part in a forward, as of the last `now`."""
        return any(not layer.disable_adapters and layer.active_adapters for layer in self._adapters)


def _adapter_state(layer: BaseTunerLayer) -> tuple[Any, ...]:
    scaling = getattr(layer, "scaling", None)  # tuners other than LoRA have none
    active = layer.active_adapters
    return (
        tuple(active), tuple(layer.merged_adapters), layer.disable_adapters,
        tuple(scaling.values()) if isinstance(scaling, dict) else None,
    )  # fmt: skip


def plan_lacks_room(run: Run) -> str:
    """Return why the activation plan, which may be made for each step, leaves too little for a graph, or ``""``."""
    held, left = run.step.activation_bytes, run.step.activations_left
    if left is None or left >= held:
        return ""
    return f"graphs need {held / 2**30:.1f} GiB on top of an eager step; the plan leaves {left / 2**30:.1f}"


class _Backbone:
    """What is compared of one backbone from call to call."""

    def __init__(self, module: nn.Module) -> None:
        self.contents = ModelContents()
        self.state, self.hooks = ModelState(self.contents), HookWatch(module)
        self.recorded: dict[bool, tuple[Any, ...]] = {}
        """State when its graphs were made, with gradients and without."""


class BackboneGraphs(TrainerCallback):
    """Decides for each call of a backbone whether it runs eagerly, is recorded, or is replayed, and runs it.

    Args:
        run: whose trainer trains.
        device: records and replays.
        why_not: returns why calls cannot be captured as things are now; empty if they can.
        insists: nothing is weighed, and a run without a recording is told.
        share: of the layers of a step that are recorded.

    Attributes:
        has_ended: all that follows runs eagerly.
    """

    def __init__(
        self, run: Run, device: CudaGraphs, why_not: Callable[[], str], *, insists: bool, share: float = 1.0
    ) -> None:
        self._run, self._device, self._why_not = run, device, why_not
        self._buckets, self._insists = Buckets(), insists
        self._rule = IdleRule(run, device, self._buckets, pays=insists, share=share)
        self._anchor = torch.empty(0, device=run.device, requires_grad=True)
        self._backbones: dict[int, _Backbone] = {}
        self._open: weakref.ref[Open] | None = None
        self._watching = ExitStack()
        self.has_ended, self._lacked = False, ""
        self._warmed = self._recorded = self._changes = 0
        self._forget()

    def _forget(self) -> None:
        self._slots: dict[Key, Slot] = {}
        self._buffers: GradientBuffers | None = None
        self._levels: tuple[object, ...] | None = None
        for backbone in self._backbones.values():
            backbone.recorded.clear()

    @property
    def held(self) -> int:
        """Bytes of the graphs."""
        return self._device.held if self.graphs else 0

    @property
    def graphs(self) -> int:
        """Number of graphs."""
        return sum(slot.graphs for slot in self._slots.values())

    def run(
        self, backbone: Any, batch: PackedBatch, tokens: Tensor, others: Mapping[str, Any],
        positions: Tensor | None = None,
    ) -> RowOutputs | None:  # fmt: skip
        """Return the outputs of a row, or None if the caller has to run it eagerly.

        Args:
            backbone: the decoder without its head.
            batch: of the row.
            tokens: (1, total_tokens) ids, or (1, total_tokens, hidden) embeddings.
            others: keywords of the call besides those of a row.
            positions: of embeddings; None: those of `batch`.
        """
        trains = torch.is_grad_enabled()
        if self.has_ended or not self._run.model.training:
            return None
        watched = self._watched(backbone)
        self._look_for_watchers(watched, begins=trains and self._rule.begins_step())
        # Without effect are None, False, and the named outputs that PEFT's reward models ask for.
        given = ((name == "return_dict", value) for name, value in others.items() if name != ROUTER_LOGITS)
        if self.has_ended or any(value is not None and value is not plain for plain, value in given):
            return None
        bucket = self._bucket(batch)
        if bucket is None or (trains and self._is_open):
            return None
        state = watched.state.now(backbone)
        if not trains and watched.state.is_adapted:
            return None  # the fast LoRA layers read casts of the last forward with gradients: a graph has its own
        if watched.recorded.setdefault(trains, state) != state:
            self._model_changed()
            return None
        key = Key(id(backbone), trains, bool(others.get(ROUTER_LOGITS)), bucket, Form.of(tokens, positions))
        is_recorded = key in self._slots and self._slots[key].forward is not None
        if not is_recorded and not self._rule.pays_for(bucket, 1 + len(self._freed_by(bucket))):
            return None
        if not is_recorded and self._lacks_room():
            return None
        if key not in self._slots:
            self._slots[key] = Slot(self._run, backbone, key, others, WARM_ROWS)
        filled = self._slots[key].inputs.copy_row(batch, tokens, positions)
        outputs = self._run_slot(self._slots[key], key, tokens, filled if key.form.trains else None)
        return None if outputs is None else RowOutputs(outputs[0], outputs[1:] or None)

    def _look_for_watchers(self, watched: _Backbone, begins: bool) -> None:
        """Disable the feature if user code added since the last check can see layers, gradients or losses."""
        hook, trainer = watched.hooks.look(), self._run.trainer
        if begins:
            hook = hook or hook_on_a_gradient(trainer.model, trained_parameters(trainer.optimizer))
            hook = hook or replaced_methods(trainer, LOSS_METHODS)
        if hook:
            self.disable(f"{hook} does not run in a replay: remove it to have steps captured")

    def _watched(self, backbone: nn.Module) -> _Backbone:
        if id(backbone) not in self._backbones:
            made = self._backbones[id(backbone)] = _Backbone(backbone)
            self._watching.enter_context(made.contents.watched())
        return self._backbones[id(backbone)]

    @property
    def _is_open(self) -> bool:
        """Whether a forward with gradients waits for its backward: its row and activations have to stay."""
        return self._open is not None and self._open() is not None

    def _opened(self) -> Open:
        held = Open()
        self._open = weakref.ref(held)
        return held

    def _bucket(self, batch: PackedBatch) -> Bucket | None:
        """Return the shapes of a row; None if it runs eagerly in its own."""
        if not self._rule.is_settled or not self._run.step.is_recordable:
            return None
        if not self.graphs and self._lacks_room():
            return None
        bucket = self._buckets.find(Bucket.of(batch))  # also while it waits for the rule: the largest are known then
        if not self._rule.pays:
            return None
        if self._run.step.levels != self._levels:  # layers run otherwise since: kept, offloaded
            if why := self._why_not():
                self.disable(why)
                return None
            self.drop()
            self._levels = self._run.step.levels
        return None if bucket is None or self._run.refuses_static(bucket) else bucket

    def _lacks_room(self) -> bool:
        """Return whether nothing can be recorded now, though it may be in another step."""
        self._lacked = plan_lacks_room(self._run) if self._run.step.by_step else ""
        return bool(self._lacked)

    def _run_slot(self, slot: Slot, key: Key, tokens: Tensor, filled: Tensor | None) -> tuple[Tensor, ...] | None:
        """Run the row that was copied into `slot`; None if that has to be done eagerly.

        `filled` are embeddings with the tail, if they need a gradient.
        """
        if slot.forward is None and slot.warm >= slot.needs and (self._buffers is not None or not key.trains):
            self._record(slot)
            if self.has_ended:
                return None
        if slot.forward is not None:
            return slot.replay(self._anchor, self._opened() if slot.backward else Open(), self._buffers, tokens)
        slot.warm += 1
        self._warmed += 1
        try:
            outputs = slot.run_eagerly(filled)
        except PackingError as error:
            self.disable(str(error))
            return None
        if outputs[0].grad_fn is not None:
            outputs[0].grad_fn.metadata["fastpack_open"] = self._opened()
        return of_row(outputs, tokens.shape[1])

    def _freed_by(self, bucket: Bucket) -> list[Slot]:
        """Return the slots whose graphs are recorded again after a bucket is: all if that is the largest."""
        recorded = [slot for slot in self._slots.values() if slot.graphs]
        is_largest = all(slot.inputs.bucket.tokens < bucket.tokens for slot in recorded)
        return recorded if is_largest and not self._is_open else []  # a backward that is due replays one of them

    def _record(self, slot: Slot) -> None:
        """Record a slot; a failure is tried once more after another row, then reported.

        The largest bucket so far frees the graphs of all others, which are recorded again in the memory of its own.
        """
        freed = self._freed_by(slot.inputs.bucket)
        for other in freed:
            other.reset()
        if freed:
            self._device.forget()
        if lacks := plan_lacks_room(self._run) or ("" if self._recorded else self._device.lacks_room()):
            self.disable(lacks)
            return
        try:
            with self._rule.timed():
                slot.record(self._device, self._buffers)
        except torch.OutOfMemoryError as error:
            close_frames(error)
            self.disable("no memory for a graph in addition to eager steps")
        except Exception as error:
            logger.debug(f"{FEATURE}: {error}", exc_info=True)
            close_frames(error)
            slot.needs = slot.warm + 1
            if slot.warm > WARM_ROWS:  # the same rows ran eagerly in these shapes: recording is what fails
                self.disable(f"a micro-step cannot be recorded: {describe(first_cause(error))}")
        else:
            self._recorded += 1
            self._tell()

    def _model_changed(self) -> None:
        """Drop the recordings of a model that has changed since."""
        self._changes += 1
        if self._changes > MAX_RERECORDINGS:
            self.disable("the model is changed again and again (weights moved, frozen or merged, modes)")
        else:
            self.drop()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the gradients of an eager step as those that graphs add to; all of its backward passes are over."""
        self._open = None  # the frames of an error may hold the tensors of a forward whose backward is over
        if why := self._rule.end_step():
            self.disable(why)
        if not self.has_ended and self._warmed and self._buffers is None:
            # A tower stays without gradients in a step without images: to an optimizer zeros are not None.
            inside = (parameter for each in self._backbones.values() for parameter in each.contents.parameters)
            self._buffers = GradientBuffers(inside)

    def disable(self, reason: str) -> None:
        """Run all that follows eagerly; reported once."""
        if not self.has_ended:
            self.has_ended = True
            self._run.disable(FEATURE, "eager", reason)
        self.drop()

    def reclaim(self) -> bool:
        """Free the memory of the graphs after a step ran out of it; False if there are none."""
        held = self.graphs > 0
        if held:
            self.disable("a step ran out of memory while graphs were held")
        return held

    def finish(self) -> None:
        """Report the run, and drop the graphs."""
        self._rule.close()
        if not self.has_ended and (self.graphs or (self._recorded and not self._lacked)):
            self._tell()
        elif not self.has_ended:
            unpaid = "recording would not be paid back" if self._rule.declined else self._lacked
            steps = self._rule.steps_done
            why = f"no graph is left after {steps} steps" if self._recorded else f"no row was recorded in {steps} steps"
            why += unpaid and f": {unpaid}"
            if self._insists:
                self._run.disable(FEATURE, "eager", why)
            else:
                self._run.set_status(FEATURE, "off", "eager", why)
        self.drop()
        self._watching.close()

    def _tell(self) -> None:
        """Report what there is."""
        declined = len(self._rule.declined)
        unpaid = f"not recorded, as it would not be paid back: {declined} sizes of rows" if declined else ""
        memory = f"{self.graphs} graph{'s' * (self.graphs != 1)} of {self.held / 2**30:.2f} GiB"
        self._run.set_status(
            FEATURE, "on", "captured", "; ".join(filter(None, (self._rule.note, memory, unpaid, self._lacked)))
        )

    def drop(self) -> None:
        """Drop all graphs; they are recorded again from the rows that follow."""
        if not self._is_open:  # else its graphs go with it
            for slot in self._slots.values():
                slot.reset()
        self._device.forget()
        self._forget()
