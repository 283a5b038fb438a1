"""Trainers whose batches are edited after collation, on their way to the loss."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from trainer_material import callback
from trl import SFTTrainer

Edit = Callable[[Any], object]
Place = Callable[[type[SFTTrainer], Edit], type[SFTTrainer]]
"""A subclass of a trainer that edits its batches there."""


def in_method(name: str, change: Callable[[Any, Edit], object] | None = None) -> Place:
    """Edit the mapping that a method of the trainer gets; or change what it returns, after `__init__` the trainer."""

    def place(cls: type[SFTTrainer], edit: Edit) -> type[SFTTrainer]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            if change is None:
                edit(next(arg for arg in args if hasattr(arg, "keys")))
            result = getattr(cls, name)(self, *args, **kwargs)
            return (change and change(self if result is None else result, edit)) or result

        return type("Trainer", (cls,), {name: method})

    place.__name__ = change.__name__ if change else f"in_{name}"
    return place


in_compute_loss, in_training_step, in_prediction_step, in_prepare_inputs = map(
    in_method, ("compute_loss", "training_step", "prediction_step", "_prepare_inputs")
)
in_the_trainer = functools.partial(in_method, "__init__")


@functools.partial(in_method, "get_batch_samples")
def in_get_batch_samples(samples: Any, edit: Edit) -> None:
    for inputs in samples[0]:
        edit(inputs)


@functools.partial(in_method, "get_train_dataloader")
def in_a_loader(loader: Any, edit: Edit) -> Any:
    """After the batch was placed on the device."""
    methods = {
        "__getattr__": lambda self, name: getattr(loader, name),
        "__len__": lambda self: len(loader),
        "__iter__": lambda self: ((edit(inputs), inputs)[1] for inputs in loader),
    }
    return type("Loader", (), methods)()


@functools.partial(in_method, "get_train_dataloader")
def in_a_worker(loader: Any, edit: Edit) -> None:
    """Before the batch is handed over by a worker and placed."""
    collate = loader.base_dataloader.collate_fn
    loader.base_dataloader.collate_fn = lambda rows: [inputs := collate(rows), edit(inputs)][0]


@in_the_trainer
def in_a_hook(trainer: Any, edit: Edit) -> None:
    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if kwargs.get("labels") is not None:
            edit(kwargs)

    trainer.model.register_forward_pre_hook(hook, with_kwargs=True)


@in_the_trainer
def in_a_forward(trainer: Any, edit: Edit) -> None:
    inner = trainer.model.forward
    trainer.model.forward = functools.wraps(inner)(lambda *args, **kwargs: [edit(kwargs), inner(*args, **kwargs)][1])


@in_the_trainer
def in_the_outputs(trainer: Any, edit: Edit) -> None:
    """From the first step on, not before: edit what the model returns."""

    def add(state: Any, model: Any) -> None:
        if state.global_step == 0:
            trainer.model.register_forward_hook(lambda *given: edit(given[-1]))

    trainer.add_callback(callback("on_step_begin", add)())


PLACES = (in_compute_loss, in_training_step, in_prediction_step, in_prepare_inputs, in_get_batch_samples, in_a_loader)
PLACES += (in_a_hook,)
