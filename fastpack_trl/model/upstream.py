"""Private and deep names of torch, transformers, trl, peft and accelerate that this package uses.

`TABLE` has them all: where each is used, and what happens without it. Names of a feature (`NEEDS`) are looked up before
the feature runs: where a version has moved one, stock runs in its place, named. The others are asked for where they
are used. ``fastpack-trl doctor`` looks all of them up, `docs/upstream.md` lists them.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
import re
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from peft.tuners.lora.layer import Linear as LoraLinear
    from peft.tuners.lora.layer import LoraLayer
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.pytorch_utils import Conv1D
    from transformers.trainer_callback import CallbackHandler
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

__all__ = [
    "CallbackHandler", "Conv1D", "DataCollatorForLanguageModeling", "FakeTensor", "FakeTensorMode",
    "GradientCheckpointingLayer", "LoraLayer", "LoraLinear", "TorchDispatchMode", "found", "is_there", "lacks",
    "look_up", "missing_names", "tree_leaves",
]  # fmt: skip

_HOMES = {
    "CallbackHandler": "transformers.trainer_callback.CallbackHandler",
    "Conv1D": "transformers.pytorch_utils.Conv1D",
    "DataCollatorForLanguageModeling": "trl.trainer.sft_trainer.DataCollatorForLanguageModeling",
    "BaseTunerLayer": "peft.tuners.tuners_utils.BaseTunerLayer",
    "FakeTensor": "torch._subclasses.fake_tensor.FakeTensor",
    "FakeTensorMode": "torch._subclasses.fake_tensor.FakeTensorMode",
    "GradientCheckpointingLayer": "transformers.modeling_layers.GradientCheckpointingLayer",
    "LoraLayer": "peft.tuners.lora.layer.LoraLayer",
    "LoraLinear": "peft.tuners.lora.layer.Linear",
    "TorchDispatchMode": "torch.utils._python_dispatch.TorchDispatchMode",
    "tree_leaves": "torch.utils._pytree.tree_leaves",
}
"""Classes and functions imported from here by their last name; `Absent` if the library has none."""


class Upstream(NamedTuple):
    """Names with the same use.

    Attributes:
        names: ``package.module.name``, or ``package.Class.name`` of what its instances have.
        rooms: folders and files of this package that use them.
        without: what happens where one is missing.
        part: of `NEEDS`, where the names are looked up before anything runs.
        partly: the part is a feature that runs all the same: it has other work, and leaves out what needs the names.
    """

    names: tuple[str, ...]
    rooms: tuple[str, ...]
    without: str
    part: str = ""
    partly: bool = False


def _used(names: str, rooms: str, without: str, part: str = "", *, partly: bool = False) -> Upstream:
    """Read one line of the table: ``"package.module: name name; package.Class: name"``."""
    homes = (group.split(": ") for group in names.split("; "))
    every = tuple(f"{home}.{name}" for home, found in homes for name in found.split())
    return Upstream(every, tuple(rooms.split()), without, part, partly)


TABLE: tuple[Upstream, ...] = (
    _used("trl.trainer.sft_trainer: DataCollatorForLanguageModeling; transformers.Trainer: _get_dataloader; "
        "trl.SFTTrainer: _prepare_dataset; transformers.PreTrainedModel: _can_set_attn_implementation; "
        "torch.utils.hooks.RemovableHandle: next_id; torch.nn.modules.module: _global_forward_pre_hooks "
        "_global_forward_hooks _global_backward_pre_hooks _global_backward_hooks", "model packing trainer trainers",
        "the stock trainer", "batches"),
    _used("transformers.masking_utils: ALL_MASK_ATTENTION_FUNCTIONS AttentionMaskInterface", "attention",
        "documents in padded rows", "packed_attention"),
    _used(
        "torch.ops.aten: _flash_attention_forward _flash_attention_backward", "attention", "`per_document`", "varlen"),
    _used("transformers.models.qwen3_next.modeling_qwen3_next: causal_conv1d_fn torch_chunk_gated_delta_rule; "
        "transformers.models.falcon_h1.modeling_falcon_h1: mamba2_chunk_scan mamba2_split_conv1d_scan_combined; "
        "transformers.activations: ACT2FN", "recurrent", "hybrid models of that family in padded rows, named"),
    _used("torch.ops.aten: _scaled_dot_product_flash_attention_for_cpu "
        "_scaled_dot_product_flash_attention_for_cpu_backward", "attention",
        "plain torch per document", "per_document on the CPU"),
    _used("trl.kernels: ChunkedLogProbFunction chunked_logprob; transformers.Trainer: _maybe_log_save_evaluate "
        "_finalize_training", "step trainer", "loss and metrics as stock", "sync_free", partly=True),
    _used("peft.tuners.lora.layer: LoraLayer Linear; torch: _foreach_add_ _foreach_mul _foreach_mul_ _foreach_copy_; "
        "torch.ops.aten: _unsafe_view", "lora", "PEFT's own forward", "lora"),
    _used("torch._subclasses.fake_tensor: FakeTensor FakeTensorMode", "lora recipe",
        "`doctor --gpu` counts weights and no activations"),
    _used("torch.UntypedStorage: _cdata", "checkpointing", "as the names above"),
    _used("torch: _scaled_mm", "kernels", "`frozen_base='fp8'` is refused", "frozen_base", partly=True),
    _used("transformers.integrations.finegrained_fp8.FP8Linear: weight_scale_inv block_size activation_scheme", "lora",
        "FP8 checkpoints: PEFT's own forward over transformers' layers, named"),
    _used("transformers.integrations.moe: ALL_EXPERTS_FUNCTIONS ExpertsInterface", "moe", "stock's experts", "moe"),
    _used("transformers.modeling_layers: GradientCheckpointingLayer; torch.utils._python_dispatch: TorchDispatchMode; "
        "torch.utils._pytree: tree_leaves", "checkpointing", "as `gradient_checkpointing` says", "activation_memory"),
    _used("transformers.modeling_layers: GradientCheckpointingLayer", "checkpointing",
        "layer inputs stay on the device", "checkpoint_offload"),
    _used("transformers.modeling_layers: GradientCheckpointingLayer; torch.nn.Module: _call_impl", "compile",
        "layers run eager", "layer_compile"),
    _used(
        "trl.trainer.utils: get_peak_flops", "callbacks bench", "no MFU and HFU, unless `peak_flops` is given", "mfu"),
    _used("transformers.Trainer: _clip_grad_norm _get_grad_norm", "step trainer",
        "clipping walks over all modules in each step"),
    _used("transformers.modeling_layers.GradientCheckpointingLayer: _gradient_checkpointing_func", "model",
        "no layer is checkpointed where we look: offload refuses, routing plans are made again, layers run eager"),
    _used("torch.nn.Module: _forward_hooks _forward_pre_hooks _backward_hooks _backward_pre_hooks _modules _parameters",
        "capture lora model moe step",
        "the feature that reads them stops with an error; torch.nn has had them from its first version"),
    _used("torch.Tensor: _backward_hooks _post_accumulate_grad_hooks _version", "checkpointing compile lora model",
        "as the names above"),
    _used("torch.nn.Module: _is_replica", "lora", "copies of DataParallel are taken for plain ones"),
    _used("torch._C: _SetExcludeDispatchKeyGuard", "kernels",
        "backward of hybrid models and of experts stops with an error: packed_attention='off' and moe='off'"),
    _used("torch._C: _current_graph_task_id", "model",
        "a recompute is not told from a forward: a hook that comes between them fails the checkpoint's own check"),
    _used("torch._C._autograd: _top_saved_tensors_default_hooks", "compile",
        "a checkpoint under saved-tensor hooks of others is compiled with its layer, and runs eager"),
    _used(
        "torch._dynamo.config: specialize_float; torch._dynamo.exc: FailOnRecompileLimitHit; torch._dynamo.decorators: "
        "_dynamo_weak_dynamic_indices", "compile", "a second trace where a float changed; sizes marked again"),
    _used("torch._dynamo.config: skip_tensor_guards_with_matching_dict_tags", "compile",
        "torch decides what of a parameter a graph is compared with: all of it from 2.13 on"),
    _used("torch._inductor.async_compile: maybe_warm_pool", "compile",
        "the processes that compile kernels start when the first graph is traced"),
    _used("torch._inductor.runtime.cache_dir_utils: cache_dir; torch._inductor.config: force_disable_caches", "compile",
        "layers that an earlier run has compiled are taken to cost what they cost without a cache"),
    _used("torch._dynamo.exc: TorchDynamoException; torch._dynamo: maybe_mark_dynamic mark_static; torch.nn.Module: "
        "_compiled_call_impl", "checkpointing compile", "layers run eager, named as unreadable"),
    _used(
        "torch._dynamo.eval_frame.OptimizedModule: _orig_mod", "model", "a model compiled as a whole is not unwrapped"),
    _used("transformers.utils.output_capturing: _active_collector", "compile",
        "a layer that records router logits is compiled where torch can trace it"),
    _used("torch.ops.aten: _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_for_cpu _flash_attention_forward "
        "_efficient_attention_forward _cudnn_attention_forward _grouped_mm _scaled_mm", "checkpointing",
        "`selective` computes their results again"),
    _used("torch._ops.OpOverload: _schema", "checkpointing measure", "nothing is kept by operator"),
    _used(
        "torch.ops.aten: _local_scalar_dense _index_put_impl_ _to_copy _unique _unique2; torch.utils._python_dispatch: "
        "TorchDispatchMode; torch.overrides: TorchFunctionMode", "measure",
        "`doctor --audit` does not see that kind of sync"),
    _used("transformers.PreTrainedConfig: _attn_implementation", "attention bench cli model",
        "the trainer stops with an error: no feature can know what stock would run"),
    _used("transformers.PreTrainedConfig: _experts_implementation", "moe", "stock's experts, named"),
    _used("transformers.PreTrainedConfig: _attn_implementation_internal _experts_implementation_internal",
        "attention moe", "a model keeps our name after the run, which then computes as stock's"),
    _used("transformers.PreTrainedModel: _supports_sdpa _require_grads_hooks", "measure model",
        "stock's default is taken for the user's choice; counted FLOPs may leave out gradients of the embeddings"),
    _used("transformers.integrations.moe: _apply_gate _is_expert_parallel", "moe",
        "no module is taken for experts; sharded ones are not told from whole ones"),
    _used("transformers.Trainer: _inner_training_loop _run_epoch _prepare_inputs _prepare_context_parallel_inputs "
        "_get_collator_with_removed_columns _get_train_sampler "
        "_get_eval_sampler", "model packing",
        "a subclass that overrides its successor is not seen, and gets packed batches"),
    _used("transformers.Trainer: _get_num_items_in_batch _track_num_input_tokens", "attention packing",
        "a subclass that overrides its successor is not seen, and gets packed batches"),
    _used("transformers.models.mixtral.modeling_mixtral: load_balancing_loss_func", "step",
        "experts under rows of families stop with an error: FASTPACK_DISABLE=1 runs stock"),
    _used("transformers.Trainer: _prepare_input", "model trainer",
        "a subclass that overrides its successor is not seen; several processes on a CPU find loss positions anew"),
    _used("transformers.Trainer: _tr_loss _globalstep_last_logged", "step", "the NaN filter as stock"),
    _used("torch.optim.Optimizer: _optimizer_step_pre_hooks _optimizer_step_post_hooks; torch.optim.optimizer: "
        "_global_optimizer_pre_hooks _global_optimizer_post_hooks", "step",
        "under FSDP 2 the optimizer steps over DTensors"),
    _used("trl.DPOTrainer: _compute_loss _precompute_ref_logps; trl.KTOTrainer: _compute_kl_logps", "packing trainers",
        "a subclass that overrides its successor is not seen, and gets rows; stock's padded batches of the reference"),
    _used("trl.GRPOTrainer: _buffered_inputs _entropy_bonus_enabled _generate_and_score_completions", "trainers",
        "GRPO and RLOO stop with an error: FASTPACK_DISABLE=1 runs stock"),
    _used("trl.GRPOTrainer: _generate_single_turn _calculate_rewards _step", "bench",
        "`bench` cannot make up completions: GRPO and RLOO stop with an error"),
    _used("trl.trainer.utils: FusedCausalLMOutput", "step", "rows of families run as stock pads them"),
    _used("torch.nn.modules.dropout: _DropoutNd", "attention trainers", "shared prefixes and rows of families stop"),
    _used("torch.nn.parallel.DistributedDataParallel: _set_params_and_buffers_to_ignore_for_model", "recipe",
        "`ignore_bias_buffers` of `dpo` stops with an error"),
    _used("peft.tuners.tuners_utils: BaseTunerLayer; peft.tuners.lora.layer: LoraLayer; peft.utils.other: "
        "AuxiliaryTrainingWrapper; peft.tuners.tuners_utils.BaseTunerLayer: _disable_adapters; peft.PeftModel: "
        "_adapters_disabled; transformers.Trainer: _clip_grad_norm _get_grad_norm", "trainers",
        "adapters are switched off for a reference by PEFT's own walks over the model"),
    _used("transformers.Trainer: _move_model_to_device", "trainers",
        "expert stacks are quantised after the model has moved to the device"),
    _used("trl.SFTTrainer: _metrics _total_train_tokens _tp_size", "checkpointing step",
        "loss and metrics as stock; a step that is run again counts its tokens twice"),
    _used("trl.SFTTrainer: _is_vision_dataset _loss_shifts_labels", "packing",
        "vision data and losses that shift are not told from others"),
    _used("peft.tuners.tuners_utils: BaseTunerLayer; torch: _foreach_copy_ _foreach_zero_", "capture packing",
        "micro-steps run eager", "cuda_graph"),
    _used("torch.nn.parallel.DistributedDataParallel: _sync_buffers _get_ddp_logging_data", "capture",
        "captured steps of several processes stop with an error: cuda_graph='off' runs them eager"),
    _used("torch._C: _cuda_endAllocateToPool _cuda_releasePool", "capture",
        "after a recording that failed, cached memory is not given back: a step that lacks it stops with an error"),
    _used("trl.kernels.chunked_logprob: _forward_tile _backward_tile _forward_kernel _backward_kernel _use_triton "
        "_addmm_fp32 _BLOCK_SIZE", "step", "logits made twice, by trl's own function, named"),
    _used("peft.tuners.lora.ParamWrapper: _did_swap_in_out_features; peft.tuners.lora: bnb", "lora moe",
        "PEFT's own path for expert LoRA and for 8-bit bases"),
    _used("transformers.trainer_callback: CallbackHandler", "callbacks",
        "`ThroughputCallback` reads no facts of the data set"),
    _used("transformers.pytorch_utils: Conv1D", "lora measure",
        "GPT-2's linear layers: PEFT's own forward, FLOPs said to be inexact"),
    _used("transformers.integrations: is_deepspeed_zero3_enabled", "run", "under DeepSpeed as under ZeRO-3: stock"),
    _used("transformers.modeling_layers: GradientCheckpointingLayer", "measure",
        "hardware FLOPs do not count recomputed layers"),
    _used("transformers.trainer_callback: PrinterCallback ProgressCallback; transformers.models.auto: modeling_auto; "
        "transformers.quantizers.auto: AutoQuantizationConfig; transformers.integrations: "
        "get_available_reporting_integrations; transformers.AttentionInterface: _global_mapping; trl.scripts.utils: "
        "DatasetConfig; accelerate.commands.launch: launch_command launch_command_parser; "
        "accelerate.commands.config.config_args: default_config_file; torch.nn.modules.dropout: _DropoutNd; "
        "torch.distributed.elastic.multiprocessing.errors: ChildFailedError", "bench cli recipe",
        "the command that uses it stops with an error"),
)  # fmt: skip

NEEDS: dict[str, tuple[str, ...]] = {group.part: group.names for group in TABLE if group.part}
"""The names that each part cannot do without, beside the public interfaces."""
PARTLY = frozenset(group.part for group in TABLE if group.partly)
"""Parts that run without their names too, and leave out what needs them."""


class Absent:
    """Stands for a class that is not there: nothing is an instance of it."""


def found(path: str) -> Any:
    """Return the object at ``package.module.name``; None where there is none."""
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return None


def missing_names(part: str) -> list[str]:
    """Return the names of a part of `NEEDS` that the installed versions lack."""
    return [path for path in NEEDS.get(part, ()) if found(path) is None]


def lacks(part: str) -> str:
    """Return why a part of `NEEDS` cannot be used with the installed versions; empty where it can."""
    missing = missing_names(part)
    return f"the installed {missing[0].partition('.')[0]} has no {', '.join(missing)}" if missing else ""


def is_there(path: str) -> bool:
    """Return whether the installed versions have a name; one that only instances get is looked for in the source."""
    if found(path) is not None:
        return True
    home, _, name = path.rpartition(".")
    owner = found(home)
    for place in getattr(owner, "__mro__", (owner,)):
        try:
            if re.search(rf"\b{name}\b", _source(place)):
                return True
        except (OSError, TypeError):  # built without source, or nothing that has any
            continue
    return False


_source = functools.cache(inspect.getsource)  # for a class, Python parses the whole file it is in


def look_up() -> list[dict[str, Any]]:
    """Return `TABLE` with one row per name and use: ``name``, ``used_in``, ``without`` and whether it is ``there``."""
    return [
        {"name": name, "used_in": list(group.rooms), "without": group.without, "there": is_there(name)}
        for group in TABLE
        for name in group.names
    ]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = found(_HOMES[name])
    return Absent if value is None else value
