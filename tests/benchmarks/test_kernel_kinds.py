"""Kernels by what they are for: names as torch, cuBLAS, CUTLASS, bitsandbytes, Inductor and Liger give them."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernel_kinds import (
    ATTENTION,
    BASE,
    COPIES,
    DEQUANTISE,
    EXPERTS,
    GLUE,
    HEAD,
    OPTIMIZER,
    ROUTING,
    THIN,
    UNKNOWN,
    Facts,
    Launch,
    by_kind,
    kind_of,
    largest,
    launches_of,
)
from benchmarks.step_bounds import Device, Work, bound_seconds, products_seconds

DENSE, SPARSE = Facts(151_936), Facts(201_088, slots=16_384)
NVJET = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT"
NAMES = {
    NVJET: BASE,
    "nvjet_tst_64x64_64x16_4x1_v_bz_splitK_TNN": BASE,
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel"
    "__5x_cublas": BASE,
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x256_32x3_tn_align8>(cutlass_80)": BASE,
    "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn": BASE,
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>": BASE,
    "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float>": BASE,
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 128, 64, 4>>": ATTENTION,
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash::Flash_bwd_kernel>": ATTENTION,
    "void pytorch_flash::flash_bwd_convert_dq_kernel<pytorch_flash::Flash_bwd_kernel_traits<128>>": ATTENTION,
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass>)": ATTENTION,
    "fmha_cutlassB_bf16_aligned_128x64_k128_sm80(PyTorchMemEffAttention::AttentionBackwardKernel)": ATTENTION,
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1": ATTENTION,
    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloop>>>": ATTENTION,
    "void kDequantizeBlockwise<__nv_bfloat16, 512, 64, 8, 2>(float*, unsigned char*, float*, int)": DEQUANTISE,
    "_dequantise_kernel": DEQUANTISE,
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float>>": OPTIMIZER,
    "void at::native::lpnorm_cleanup<float, (at::native::NormType)1, float>": OPTIMIZER,
    "Memcpy HtoD (Pinned -> Device)": COPIES,
    "Memset (Device)": COPIES,
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::"
    "direct_copy_kernel_cuda(at::TensorIteratorBase&)::{lambda()#3}>>": COPIES,
    "void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16tofloat32_copy_kernel_cuda(float)>": COPIES,
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy_alignedK_contig<c10::BFloat16, unsigned int>": COPIES,
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2": GLUE,
    "triton_poi_fused_mul_silu_3": GLUE,
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>, std::array>": GLUE,
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>>>": GLUE,
    "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long, unsigned int>": GLUE,
    "_rms_norm_forward_kernel": GLUE,
    "_swiglu_backward_kernel": GLUE,
    "_triton_rope": GLUE,
    "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float, float, long>": HEAD,
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, c10::BFloat16, float, float>": HEAD,
    "liger_cross_entropy_kernel": HEAD,
    "triton_red_fused__log_softmax_nll_loss_forward_5": HEAD,
    "my_new_kernel": UNKNOWN,
}
ONLY_WITH_EXPERTS = {
    "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cutlass::gemm::GroupProblemShape<cute::tuple>>>":
        EXPERTS,
    "void at::cuda::detail::prepare_grouped_gemm_data<cutlass::bfloat16_t>": EXPERTS,
    "_combine_kernel": ROUTING,
    "_forward_kernel": ROUTING,
    "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<at_cuda_detail::cub::Policy>": ROUTING,
    "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>": ROUTING,
    "void at::native::indexing_backward_kernel<c10::BFloat16, 4>": ROUTING,
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), NAMES.items())
def test_a_name_alone_says_what_a_kernel_is_for(name: str, kind: str) -> None:
    assert kind_of(Launch(name, 1.0), DENSE) == kind_of(Launch(name, 1.0), SPARSE) == kind


@pytest.mark.parametrize(("name", "kind"), ONLY_WITH_EXPERTS.items())
def test_kernels_of_experts_are_told_by_name(name: str, kind: str) -> None:
    assert kind_of(Launch(name, 1.0), SPARSE) == kind


@pytest.mark.parametrize(
    ("operator", "shapes", "facts", "kind"),
    [
        ("aten::mm", ((4096, 4096), (4096, 12288)), DENSE, BASE),
        ("aten::addmm", ((12288,), (4096, 4096), (4096, 12288)), DENSE, BASE),
        ("aten::mm", ((4096, 4096), (4096, 16)), DENSE, THIN),
        ("aten::addmm_", ((4096, 12288), (4096, 64), (64, 12288)), DENSE, THIN),
        ("aten::mm", ((48, 4096), (4096, 12288)), DENSE, THIN),
        ("aten::mm", ((1024, 4096), (4096, 151_936)), DENSE, HEAD),
        ("aten::bmm", ((32, 512, 128), (32, 128, 512)), DENSE, ATTENTION),
        ("aten::_grouped_mm", ((16_384, 2880), (32, 2880, 5760), (32,)), SPARSE, EXPERTS),
        ("aten::baddbmm", ((32, 2880, 5760), (32, 2880, 16), (32, 16, 5760)), SPARSE, EXPERTS),
    ],
)
def test_products_are_told_apart_by_shape(
    operator: str, shapes: tuple[tuple[int, ...], ...], facts: Facts, kind: str
) -> None:
    assert kind_of(Launch(NVJET, 1.0, operator, shapes), facts) == kind


def test_what_is_no_product_is_told_by_the_operators_around_it_and_by_its_sides() -> None:
    add = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
    assert kind_of(Launch(add, 1.0, "aten::add", ((4096, 4096),)), SPARSE) == GLUE
    assert kind_of(Launch(add, 1.0, "aten::add", ((0, 4096),)), DENSE) == GLUE
    assert kind_of(Launch(add, 1.0, "aten::add", ((16_300, 2880),)), SPARSE) == ROUTING
    assert kind_of(Launch(add, 1.0, "aten::add", ((512, 151_936),)), DENSE) == HEAD
    assert kind_of(Launch(add, 1.0, "aten::embedding", ((151_936, 4096), (1, 4096))), DENSE) == GLUE
    assert kind_of(Launch(add, 1.0, "aten::add", ((64, 8),), ("fastpack::varlen_attention",)), DENSE) == ATTENTION
    assert kind_of(Launch(add, 1.0, "aten::add", ((64, 8),), ("fastpack::experts",)), SPARSE) == ROUTING
    assert kind_of(Launch(add, 1.0, "aten::mul", (), ("Optimizer.step#AdamW.step",)), DENSE) == OPTIMIZER


def test_the_bound_of_a_product_is_that_of_operations_or_of_bytes() -> None:
    device = Device(flops=1e12, bandwidth=1e12)
    large = Launch("", 1.0, "aten::mm", ((1000, 1000), (1000, 1000)))
    thin = Launch("", 1.0, "aten::mm", ((1000, 1000), (1000, 1)))
    second = Launch("", 1.0, "aten::mm", ((1000, 1000), (1000, 1000)), first=False)
    grouped = Launch("", 1.0, "aten::_grouped_mm", ((100, 10), (4, 10, 20), (4,)))
    assert products_seconds([large, second], device) == pytest.approx(2e9 / 1e12)
    assert products_seconds([thin], device) == pytest.approx(2 * (1_000_000 + 1000 + 1000) / 1e12)
    assert grouped.product == (1, 100, 10, 20)
    assert grouped.operands == 100 * 10 + 4 * 10 * 20 + 100 * 20


def test_bounds_of_the_other_kinds_are_the_bytes_that_have_to_move() -> None:
    work = Work(
        tokens=10, layers=2, hidden=4, rotated=6, inner=8, slots=0, expert_inner=0, vocabulary=100,
        attention_flops=5e12, trained_bytes=7, packed_elements=40,
    )  # fmt: skip
    device = Device(flops=1e12, bandwidth=1.0)
    expected = {
        GLUE: 2 * 10 * 2 * (16 * 4 + 4 * 6 + 8 * 8), HEAD: 4 * 10 * 100, OPTIMIZER: 56, DEQUANTISE: 200, COPIES: 0,
        UNKNOWN: 0, ATTENTION: 5,
    }  # fmt: skip
    for kind, seconds in expected.items():
        assert bound_seconds(kind, [], 2, work, device) == seconds, kind


def test_launches_are_grouped_by_kind_and_the_largest_named() -> None:
    launches = [Launch("a_rms_norm", 1.0), Launch("a_rms_norm", 2.0), Launch("Memset (Device)", 1.0)]
    found = by_kind(launches, DENSE)
    assert list(found) == [GLUE, COPIES]
    assert largest(found[GLUE], 1) == [["a_rms_norm", 3.0, 2]]


@pytest.mark.cuda
def test_on_a_gpu_a_product_is_known_by_its_operator_and_in_a_replayed_graph_by_its_name() -> None:
    rows, thin, wide = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((256, 512), (512, 16), (512, 1024))
    )

    def products() -> None:
        _ = rows @ thin, rows @ wide, rows.float()

    products()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products()
    for run, kinds in ((products, {THIN, BASE, COPIES}), (graph.replay, {BASE, COPIES})):
        with torch.profiler.profile(record_shapes=True) as seen:
            run()
            torch.cuda.synchronize()
        found = by_kind(launches_of(seen.events() or (), "cuda"), Facts(9999))
        assert found.keys() == kinds
        sizes = {launch.product for kind in (THIN, BASE) for launch in found.get(kind, ())}
        assert sizes == ({(1, 256, 512, 16), (1, 256, 512, 1024)} if run is products else {None}), found
        assert all(launch.seconds > 0 for launches in found.values() for launch in launches)
