"""Names of kernels as public traces of NVIDIA and AMD GPUs have them, and names that nobody should trust."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.profiling.kernel_names import LONGEST, kernel_name, shorten
from azureml_strategy.profiling.trace_summary import summarize
from azureml_strategy.profiling.writer import _print

SAMPLE = json.loads((Path(__file__).parent / "samples/launch_bound_gpu.json").read_text())
CUTLASS = "cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_128x256_32x3_tn_align8"
ATEN = "at::native::"
LAMBDA = (
    f"{ATEN}direct_copy_kernel_cuda(at::TensorIteratorBase&)::{{lambda()#3}}::operator()() const::{{lambda(int)#1}}"
)


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        (f"void cutlass::Kernel2<{CUTLASS}>({CUTLASS}::Params)", "cutlass_80_tensorop_bf16_s16816gemm (CUTLASS)"),
        (
            f"void {ATEN}vectorized_elementwise_kernel<4, {ATEN}FillFunctor<float>, std::array<char*, 1ul> >(int, "
            f"{ATEN}FillFunctor<float>, std::array<char*, 1ul>)",
            "FillFunctor vectorized_elementwise (torch)",
        ),
        (
            f"void {ATEN}vectorized_elementwise_kernel<(int)4, {ATEN}AUnaryFunctor<float, float, float, "
            f"{ATEN}binary_internal::MulFunctor<float>>, std::array<char *, (unsigned long)2>>(int, T2, T3)",
            "MulFunctor vectorized_elementwise (torch)",
        ),
        (
            f"void {ATEN}elementwise_kernel<128, 4, {ATEN}gpu_kernel_impl_nocast<{LAMBDA}>(at::TensorIteratorBase&, "
            f"{LAMBDA} const&)::{{lambda(int)#1}}>(int, {ATEN}gpu_kernel_impl_nocast<{LAMBDA}>)",
            "direct_copy elementwise (torch)",
        ),
        (
            f"void {ATEN}reduce_kernel<512, 1, {ATEN}ReduceOp<float, {ATEN}func_wrapper_t<float, {ATEN}sum_functor"
            "<float>::operator()(at::TensorIterator&)::{lambda(float, float)#1}>, unsigned int, float, 4> >(int)",
            "sum_functor reduce (torch)",
        ),
        (
            f"void {ATEN}<unnamed>::multi_tensor_apply_kernel<{ATEN}<unnamed>::TensorListMetadata<(int)2>, "
            f"{ATEN}<unnamed>::UnaryOpFunctor<c10::BFloat16, (int)2, (int)1, (int)1>, {ATEN}Copy<c10::BFloat16, "
            "c10::BFloat16>>(T1, T2, T3...)",
            "Copy multi_tensor_apply (torch)",
        ),
        (
            f"void {ATEN}(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>(int, float const*)",
            "vectorized_layer_norm_kernel (torch)",
        ),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_TNT", "nvjet_tst (cuBLAS)"),
        ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", "ampere_bf16_s16816gemm_bf16 (cuBLAS)"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, __half>(__half const*)", "splitKreduce_kernel (cuBLAS)"),
        (
            "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>(cudnnTensorStruct, float)",
            "bn_fw_tr_1C11_kernel_NCHW (cuDNN)",
        ),
        (
            "void cutlass__5x_cudnn::Kernel<cutlass_tensorop_bf16_s16816dgrad_optimized_bf16_128x128_32x3_nhwc>()",
            "cutlass_tensorop_bf16_s16816dgrad (cuDNN)",
        ),
        (
            "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, cutlass::half_t>, "
            "false>(pytorch_flash::Flash_fwd_params)",
            "flash_fwd_kernel (FlashAttention)",
        ),
        (
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::Main<2> > > >(X)",
            "FlashAttnFwdSm90 (FlashAttention)",
        ),
        ("triton_poi_fused_mul_silu_2", "triton_poi_fused_mul_silu_2 (Triton)"),
        (
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL (NCCL)",
        ),
        ("Memcpy HtoD (Pinned -> Device)", "Memcpy HtoD (Pinned -> Device)"),
        ("Memset (Device)", "Memset (Device)"),
        ("void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu>(int) [clone .kd]", "act_and_mul_kernel (vllm)"),
        ("std::enable_if<true, void>::type own::Box<int>::step<float>(int)", "step (own)"),
        # Mangled, as torch leaves a name that its demangler gives up.
        (
            "_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalIN4cute5tupleIJiiiiEEENS1_10collective13Collect"
            "iveMmaIiEEEEEEvNT_6ParamsE",
            "GemmUniversal (CUTLASS)",
        ),
        (
            "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_",
            "FillFunctor vectorized_elementwise (torch)",
        ),
        ("Cijk_Alik_Bljk_HHS_BH", "Cijk_Alik_Bljk_HHS_BH (Tensile)"),
        ("my_kernel", "my_kernel"),
    ],
)
def test_a_kernel_has_its_own_name_and_its_library(raw: str, name: str) -> None:
    assert kernel_name(raw) == name
    assert len(name) <= LONGEST


def test_kernels_of_one_compiled_graph_stay_apart() -> None:
    first, second = (kernel_name(f"triton_poi_fused__unsafe_view_clone_transpose_view_{each}") for each in (14, 15))
    assert first != second
    assert {len(first), len(second)} == {LONGEST}


@pytest.mark.parametrize(
    "piece", ["<", ">", "(", "::", "a::", "void ", "<a", "_ZN9999", "multimem_", "\x1b[31m", "a<b>::", "\n"]
)
def test_a_hostile_name_is_a_short_line(piece: str) -> None:
    for raw in (piece * 1_000_000, f"_Z{piece * 3000}", f"void at::{piece * 3000}<{piece * 3000}>"):
        (shown,) = summarize({"traceEvents": [{"ph": "X", "cat": "kernel", "name": raw, "ts": 0, "dur": 1, "tid": 1}]})[
            "operators"
        ]
        assert len(shown["name"]) <= LONGEST
        assert shown["name"].isprintable()


@given(st.text(alphabet=st.one_of(st.sampled_from("<>():, _ZN1a"), st.characters())))
def test_any_text_is_a_short_line(raw: str) -> None:
    assert len(kernel_name(raw)) <= LONGEST
    assert kernel_name(raw).isprintable()


def test_both_ends_of_a_long_name_are_kept() -> None:
    assert shorten("beginning_of_a_long_name", 15) == "beginn...g_name"
    assert shorten("short", 15) == "short"


def test_the_table_of_a_profile_has_a_line_for_each_kernel(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On 80 columns; kernels that differ in their tiles alone share a line, and markup in a name is text."""
    summary = summarize(SAMPLE)
    names = {each["name"]: (round(1e6 * each["self_s"]), each["calls"]) for each in summary["operators"]}
    assert names["nvjet_tst (cuBLAS)"] == (200, 3)
    assert names["cutlass_80_tensorop_bf16_s16816gemm (CUTLASS)"] == (100, 2)
    assert names["FillFunctor vectorized_elementwise (torch)"] == (10, 2)
    summary["operators"][0]["name"] = "[red]gemm[/red] " + "x" * 1000
    for name, value in (("COLUMNS", "80"), ("FORCE_COLOR", "1"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    _print(summary, "step 12", Path("trace.json.gz"))
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 80
    for each in [*list(names)[1:7], "[red]gemm[/red]"]:
        assert sum(each in line for line in lines) == 1, each
    rows = [line for line in lines if line.startswith("│")]
    assert len(rows) == 1 + 5 + len(summary["collectives"]) + 8, "no row is broken into two lines"
