"""`FastSFTTrainer`: wires the features around `trl.SFTTrainer`; nothing is computed here."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from torch import Tensor
from torch.utils.data import DataLoader
from trl import SFTTrainer

from fastpack_trl.attention.backends import RIGHT_PADDED, Choice, choose
from fastpack_trl.attention.install import PackedAttention, packed_attention
from fastpack_trl.attention.proof import PackingProof
from fastpack_trl.attention.trial import failure
from fastpack_trl.attention.verify_packing import prove, prove_stock, stock_is_right
from fastpack_trl.checkpointing.retry import RetryingTrainer
from fastpack_trl.config import setting_of
from fastpack_trl.errors import DataError, PackingError
from fastpack_trl.features import EARLY_SWITCHES, SWITCHES, enter
from fastpack_trl.lora.report import LoraReport
from fastpack_trl.model.facts import asked_for, read_features
from fastpack_trl.model.preflight import check_given
from fastpack_trl.model.saved_files import choose_checkpoint
from fastpack_trl.moe.quantised import quantize_experts
from fastpack_trl.packing import dataset as dataset_facts
from fastpack_trl.packing.batching import (
    fast_view,
    is_stock_collator,
    missing_seams,
    packing_collator,
    plan_batches,
    vocabulary,
)
from fastpack_trl.packing.dataset import is_token_lists
from fastpack_trl.packing.source import check_source
from fastpack_trl.report import FeatureReport, disabled_by_environment
from fastpack_trl.step.sync_free import SyncFreeStep
from fastpack_trl.step.trainer import SyncFreeTrainer

logger = get_logger(__name__)

_DISABLED = "FASTPACK_DISABLE is set"

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _documented_as(stock: Callable[..., Any]) -> Callable[[_Method], _Method]:
    """Give a method the signature and the docstring of stock's: people read them in their editor."""

    def decorate(method: _Method) -> _Method:
        return cast("_Method", functools.wraps(stock, assigned=("__doc__", "__name__"))(method))

    return decorate


class FastSFTTrainer(SyncFreeTrainer, RetryingTrainer):
    """`trl.SFTTrainer` with the waste of packed fine-tuning removed: same arguments, loss, log keys and files.

    `args` may be a `trl.SFTConfig`, a `FastSFTConfig` or None. What cannot be used on this model, data or machine runs
    as stock, with the reason in `fastpack_report`. ``FASTPACK_DISABLE=1`` gives plain stock.

    Attributes:
        fastpack_report: what runs and why; `FeatureReport.to_dict()` for machines. Complete once training has started.
        fastpack_proof: the packing proof of the last training start; None where none ran.
        fastpack_trains: whether what runs, or ran last, is `train` and not an evaluation by itself.
        fastpack_lora: what `apply_lora` did to the model in training; None outside of it.

    Raises:
        ValueError: beside those of `SFTTrainer`: an attention that would be wrong for the model, token ids outside of
            the vocabulary, labels of another length than the tokens, an empty data set.
    """

    data_collator: Any  # set by transformers' Trainer; swapped while a loader is built

    @_documented_as(SFTTrainer.__init__)
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(SFTTrainer.__init__).bind(self, *args, **kwargs).arguments
        self.fastpack_report = FeatureReport()
        self.fastpack_proof: PackingProof | None = None
        self._fastpack_facts: dataset_facts.DatasetFacts | None = None
        self.fastpack_trains = False
        self.fastpack_lora: LoraReport | None = None
        self._fastpack_entered = False
        self._fastpack_shown = ""
        self._fastpack_own_collator = given.get("data_collator") is not None
        missing = missing_seams()
        self._fastpack_disabled = (
            _DISABLED if disabled_by_environment() else f"torch, transformers or trl lacks {missing}" if missing else ""
        )
        if self._fastpack_disabled:
            super().__init__(*args, **kwargs)
            self.fastpack_report.add("fastpack", "off", "stock", self._fastpack_disabled)
            return
        check_given(given)
        super().__init__(*args, **kwargs)
        self._fastpack_quantize(self.model)  # where nobody has moved the model
        if setting_of(self.args, "sync_free") != "off":
            self.fastpack_step = SyncFreeStep(self.model)  # before accelerate wraps the model
        by_name = (self.args.model_init_kwargs or {}).get("attn_implementation")
        self._fastpack_choice = choose(
            setting_of(self.args, "packed_attention"),
            read_features(self.model, self.fastpack_compute_dtype),
            stock_requested=asked_for(self.model, by_name if isinstance(given["model"], str) else None),
            attempt=failure,
        )
        self._fastpack_describe()

    def _move_model_to_device(self, model: Any, device: torch.device) -> None:
        # Called while stock constructs. Packed on their way, expert stacks need not fit the device as dense ones.
        self._fastpack_quantize(model, device)
        super()._move_model_to_device(model, device)

    def _fastpack_quantize(self, model: Any, device: torch.device | None = None) -> None:
        if self._fastpack_disabled or setting_of(self.args, "moe_quantize_experts") != "on":
            return
        done, facts = quantize_experts(model, device), self.fastpack_report.facts
        facts.setdefault("quantised experts", str(done))  # a second call finds nothing left to do

    @property
    def _fastpack_limit(self) -> float:
        return float(setting_of(self.args, "padded_rows_limit"))

    @property
    def fastpack_compute_dtype(self) -> torch.dtype | None:
        """The autocast dtype of the run; None where it computes in the dtype of the weights."""
        return torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None

    def _fastpack_describe(self) -> None:
        """Plan the batches, check the data once on the host, fill the report."""
        choice, report = self._fastpack_choice, self.fastpack_report
        plan = self._fastpack_plan = plan_batches(self, choice.path)
        active = plan.kind != "stock"
        report.add(
            "packed_attention", "on" if active else "off", choice.path if active else "stock",
            choice.reason if active else plan.reason if choice.path != "off" else choice.reason,
        )  # fmt: skip
        report.add("batches", "on" if active else "stock", plan.kind.replace("_", "-"), plan.reason)
        report.facts |= self._fastpack_data_facts()
        if not active or not isinstance(self.train_dataset, Dataset) or choice.path != RIGHT_PADDED:
            return
        rows = self.args.per_device_train_batch_size
        cost = dataset_facts.highest_padding_cost(self.train_dataset, rows, self.args.seed)
        report.facts["padded tokens per token"] = f"up to {cost:.2f} (padded_rows_limit {self._fastpack_limit:g})"
        if cost <= self._fastpack_limit:
            return
        over = f"padded_rows would compute up to {cost:.1f} padded tokens per real token, over "
        over += f"padded_rows_limit={self._fastpack_limit:g} ({choice.reason})"
        if setting_of(self.args, "packed_attention") == "auto" and stock_is_right(self.model):
            self._fastpack_choice = Choice("off", f"{over}; stock keeps this model's documents apart, proven")
            self._fastpack_describe()
            return
        raise ValueError(
            f"{over}: train with packing=False, pack documents of similar length, or raise padded_rows_limit"
        )

    def _fastpack_data_facts(self) -> dict[str, Any]:
        facts, args = self._fastpack_facts, self.args
        if facts is None:
            return {"truncated tokens": "unknown (streamed or prepared elsewhere)"}
        out: dict[str, Any] = {"documents": f"{facts.documents:,} ({facts.tokens:,} tokens)"}
        if facts.empty_documents:
            out["skipped empty documents"] = facts.empty_documents
        if facts.fill is not None:
            out["packing fill"] = f"{facts.fill:.1%} of {facts.rows:,} rows x {args.max_length} tokens"
        out["truncated tokens"] = facts.truncation(args.max_length)
        if not facts.loss_tokens:
            out["loss tokens"] = "none: no token of this data set is counted by the loss, nothing will be learnt"
        return out

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, packing: bool, formatting_func: Any, dataset_name: str
    ) -> Any:
        if (
            self._fastpack_disabled
            or self._fastpack_own_collator
            or isinstance(dataset, IterableDataset)
            or dataset.format["type"] == "custom"
            or not len(dataset)
        ):
            return super()._prepare_dataset(dataset, processing_class, args, packing, formatting_func, dataset_name)
        check_source(dataset, args.dataset_text_field, formatted=formatting_func is not None, name=dataset_name)
        # In two passes of stock's own preparation, so that the lengths before truncation can be read in between.
        whole = copy.copy(args)
        whole.max_length, whole.shuffle_dataset = None, False
        documents = super()._prepare_dataset(dataset, processing_class, whole, False, formatting_func, dataset_name)
        if not dataset_facts.is_token_lists(documents, ("input_ids", "labels")):
            return super()._prepare_dataset(documents, processing_class, args, packing, None, dataset_name)
        dataset_facts.check_lengths(documents, dataset_name)
        documents, empty = dataset_facts.drop_empty(documents)
        if not len(documents):
            raise DataError(f"the {dataset_name} data set has no token: all {empty} documents are empty")
        prepared = super()._prepare_dataset(documents, processing_class, args, packing, None, dataset_name)
        if self._fastpack_facts is None and dataset_name == "train":  # an evaluation set may have that name too
            if not len(prepared):
                raise DataError(dataset_facts.why_none_is_left(documents, args.max_length))
            self._fastpack_facts = dataset_facts.measure(
                documents,
                prepared,
                max_length=args.max_length,
                strategy=args.packing_strategy if packing else None,
                empty_documents=empty,
            )
        return prepared

    def _get_dataloader(self, dataset: Any, description: str, *args: Any, **kwargs: Any) -> DataLoader[Any]:
        if not self._fastpack_collates(dataset, kwargs.get("is_training", False), description):
            return super()._get_dataloader(dataset, description, *args, **kwargs)
        stock: Any = self.data_collator
        self.data_collator = packing_collator(self)
        try:
            return super()._get_dataloader(fast_view(self, dataset), description, *args, **kwargs)
        finally:
            self.data_collator = stock

    def _fastpack_collates(self, dataset: Any, is_training: bool, description: str) -> bool:
        """Whether a loader gets our collator. Evaluation that returns predictions keeps the shapes stock gives it."""
        if self._fastpack_disabled or not self._fastpack_entered or self._fastpack_plan.kind == "stock":
            return False
        if not is_stock_collator(self.data_collator):  # set by the user during the run
            name = type(self.data_collator).__name__
            if self.fastpack_report["batches"].status == "on":
                self.fastpack_report.add("batches", "stock", "stock", f"data_collator was replaced by {name}")
                logger.warning(f"batches: stock (data_collator was replaced by {name})")
            return False
        if is_training or self._fastpack_plan.kind == "packed":
            return True
        # The mean of the evaluation losses is over batches, so flattening changes no figure; a data set without a
        # length would be counted by the first dimension of its batches.
        return self.compute_metrics is None and description.lower() != "test" and isinstance(dataset, Dataset)

    @_documented_as(SFTTrainer.train)
    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if not self._fastpack_disabled:
            resume_from_checkpoint, note = choose_checkpoint(resume_from_checkpoint, self.args.output_dir)
            if note:
                logger.warning(note)
        with self._fastpack_features(announce=True):
            return super().train(resume_from_checkpoint, *args, **kwargs)

    @_documented_as(SFTTrainer.evaluate)
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with self._fastpack_features():
            return super().evaluate(*args, **kwargs)

    @_documented_as(SFTTrainer.predict)
    def predict(self, *args: Any, **kwargs: Any) -> Any:
        with self._fastpack_features():
            return super().predict(*args, **kwargs)

    @contextlib.contextmanager
    def _fastpack_features(self, announce: bool = False) -> Iterator[None]:
        if self._fastpack_disabled or self._fastpack_entered:
            yield  # evaluation inside of training: installed already
            return
        with contextlib.ExitStack() as stack:
            self.fastpack_trains = announce
            if plan_batches(self, self._fastpack_choice.path) != self._fastpack_plan:
                self._fastpack_describe()  # a hook, a method or a collator came since this trainer was made
                logger.warning(str(self.fastpack_report["batches"]))
            for switch in EARLY_SWITCHES:
                enter(stack, switch, self)
            if self._fastpack_plan.kind != "stock":
                self._fastpack_install(stack, start=announce)
            elif announce and self.padding_free:
                prove_stock(self)
            elif announce:
                self.fastpack_report.add("verify_packing", "off", "not run", "a row is one document")
            for switch in SWITCHES:
                enter(stack, switch, self)
            if announce:
                self._fastpack_announce()
            self._fastpack_entered = True
            stack.callback(setattr, self, "_fastpack_entered", False)
            yield

    def _fastpack_announce(self) -> None:
        """The banner, once per content: `train` may be called many times."""
        table = self.fastpack_report.table()
        if self.is_world_process_zero() and table != self._fastpack_shown:
            print(table, flush=True)
        self._fastpack_shown = table

    def _fastpack_install(self, stack: contextlib.ExitStack, *, start: bool) -> None:
        """Install the chosen attention; where `auto` chose it and the proof fails, padded rows take over, named."""
        if start and isinstance(self.train_dataset, Dataset) and is_token_lists(self.train_dataset, ("input_ids",)):
            dataset_facts.check_vocabulary(self.train_dataset, vocabulary(self.model))
        choice = self._fastpack_choice
        attempt = stack.enter_context(contextlib.ExitStack())
        attention = attempt.enter_context(self._fastpack_attention(choice.path))
        if not start:
            return
        try:
            prove(self, attention)
        except PackingError as error:
            if setting_of(self.args, "packed_attention") != "auto" or choice.path == RIGHT_PADDED:
                raise
            attempt.close()
            reason = f"{choice.path} failed its proof: {error}"
            self._fastpack_choice = Choice(RIGHT_PADDED, reason)
            self._fastpack_describe()
            if self._fastpack_plan.kind != "stock":
                prove(self, stack.enter_context(self._fastpack_attention(RIGHT_PADDED)))

    @contextlib.contextmanager
    def _fastpack_attention(self, path: str) -> Iterator[PackedAttention]:
        # A prepared data set was measured as a whole: no batch of it stops a run that is under way.
        limit = float("inf") if isinstance(self.train_dataset, Dataset) else self._fastpack_limit
        compute_dtype = self.fastpack_compute_dtype
        with packed_attention(self.model, path, padded_rows_limit=limit, compute_dtype=compute_dtype) as attention:
            attention.batch_check.tell = functools.partial(self.fastpack_report.remark, "packed_attention")
            yield attention

    @_documented_as(SFTTrainer.training_step)
    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        # What was derived from the batch is dropped after its backward pass.
        try:
            return super().training_step(model, inputs, *args, **kwargs)
        finally:
            _clear(inputs)

    @_documented_as(SFTTrainer.prediction_step)
    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().prediction_step(model, inputs, *args, **kwargs)
        finally:
            _clear(inputs)


def _clear(inputs: Any) -> None:
    batch = inputs.get("packed_batch")
    if batch is not None:
        batch.clear_derived()
