from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from azureml_strategy.profiling.trace_summary import main, summarize

MAIN, WORKER, STREAM, COMM = 1, 2, 7, 20


def event(cat: str, name: str, start: float, end: float, tid: int = MAIN, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": tid, "args": args}


def summary_of(*events: dict[str, Any]) -> dict[str, Any]:
    return summarize({"traceEvents": [*events, {"ph": "M", "name": "process_name"}]})


def in_us(summary: dict[str, Any], *names: str) -> list[float]:
    return [round(1e6 * summary[name], 3) for name in names]


PARTS = ("window_s", "compute_s", "exposed_communication_s", "copy_s", "idle_s", "data_wait_s")


def test_parts_of_a_step_on_a_cpu() -> None:
    summary = summary_of(
        event("user_annotation", "ProfilerStep#7", 0, 100),
        event("user_annotation", "enumerate(DataLoader)#_Single.__next__", 0, 10),
        event("cpu_op", "aten::stack", 2, 6),  # makes up the batch: no computing
        event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 20, 80),
        event("cpu_op", "MmBackward0", 21, 79),
        event("cpu_op", "aten::mm", 22, 50),
        event("cpu_op", "aten::t", 23, 25),
        event("cpu_op", "c10d::allreduce_", 50, 52),
        event("user_annotation", "gloo:all_reduce", 51, 70, WORKER),
        event("cpu_op", "aten::add_", 60, 65),
        event("cpu_op", "aten::mm", 200, 300),  # after the step
    )
    assert summary["steps"] == [7]
    assert in_us(summary, *PARTS) == [100, 28 + 5, 10 + 5, 0, 52, 10]
    (reduced,) = summary["collectives"]
    assert (reduced["name"], reduced["calls"]) == ("all_reduce", 1)
    assert in_us(reduced, "total_s", "exposed_s") == [20, 15]
    own = {each["name"]: round(1e6 * each["self_s"], 3) for each in summary["operators"]}
    assert own["aten::mm"] == 26
    assert own["MmBackward0"] == 58 - 28 - 2 - 5


def test_parts_of_two_steps_on_a_gpu() -> None:
    summary = summary_of(
        event("user_annotation", "ProfilerStep#3", 0, 40),
        event("user_annotation", "ProfilerStep#4", 40, 60),
        event("gpu_user_annotation", "ProfilerStep#3", 30, 80, STREAM),  # the GPU is behind the host
        event("gpu_user_annotation", "ProfilerStep#4", 80, 130, STREAM),
        event("cpu_op", "aten::mm", 0, 60),
        event("user_annotation", "enumerate(DataLoader)#_Multi.__next__", 100, 120),
        event("kernel", "sm90_gemm", 30, 60, STREAM),
        event("gpu_memcpy", "Memcpy HtoD", 55, 65, 9),
        event("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 50, 90, COMM),
        event("kernel", "ncclDevKernel_SendRecv", 90, 100, COMM, **{"Collective name": "all_to_allv"}),
        event("kernel", "elementwise", 80, 100, STREAM),
        event("kernel", "sm90_gemm", 120, 130, STREAM),
    )
    assert summary["device"] == "gpu"
    assert in_us(summary, *PARTS) == [100, 30 + 20 + 10, 20, 0, 20, 20]
    assert in_us(summary, "overlapped_communication_s") == [30]
    assert [(each["name"], round(1e6 * each["exposed_s"])) for each in summary["collectives"]] == [
        ("all_reduce", 20),
        ("all_to_all", 0),
    ]
    own = {each["name"]: (round(1e6 * each["self_s"]), each["calls"]) for each in summary["operators"]}
    assert own["sm90_gemm"] == (40, 2)
    assert "aten::mm" not in own


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reduce_scatter"),
        ("ncclDevKernel_AllGather_RING_LL", "all_gather"),
        ("ncclKernel_Broadcast_RING_LL_Sum_int8_t", "broadcast"),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL", "reduce"),
        ("ncclDevKernel_SendRecv", "send_recv"),
        # On symmetric memory: of NCCL 2.27, and of later ones; torch's own.
        ("ncclSymDevKernel_AllReduce_RSxLD_AGxST_sum_bf16(ncclSymDevArgs)", "all_reduce"),
        ("ncclSymkDevKernel_AllReduce_RSxLDMC_AGxSTMC_sum_bf16(ncclSymkDevWorkArgs4K)", "all_reduce"),
        ("ncclSymkDevKernel_AllGather_LLMC(ncclSymkDevWorkArgs4K)", "all_gather"),
        ("ncclSymDevKernel_ReduceScatter_LDMC_sum_f16(ncclSymDevArgs)", "reduce_scatter"),
        ("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)", "all_reduce"),
    ],
)
def test_names_of_collectives(name: str, said: str) -> None:
    (found,) = summary_of(event("kernel", name, 0, 1), event("kernel", "gemm", 1, 2))["collectives"]
    assert found["name"] == said


def test_a_gpu_that_waits_for_the_host_is_idle() -> None:
    """Kernels of a small model under names of public traces, between which the host launches the next one."""
    summary = summarize(json.loads((Path(__file__).parent / "samples/launch_bound_gpu.json").read_text()))
    assert in_us(summary, *PARTS) == [20_000, 680, 120 + 40, 10, 20_000 - 680 - 160 - 10, 400]
    assert [(each["name"], round(1e6 * each["exposed_s"])) for each in summary["collectives"]] == [
        ("all_reduce", 120),
        ("all_gather", 40),
    ]


def test_a_trace_without_events() -> None:
    assert summary_of()["window_s"] == 0


def test_own_times_are_those_of_torch(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    with profile(activities=[ProfilerActivity.CPU]) as recorded, record_function("ProfilerStep#0"):
        layer = torch.nn.Linear(64, 64)
        layer(torch.randn(8, 64)).square().mean().backward()
    path = tmp_path / "trace.json"
    recorded.export_chrome_trace(str(path))
    theirs = {each.key: each.self_cpu_time_total for each in recorded.key_averages()}

    done = subprocess.run(
        [sys.executable, "-m", "azureml_strategy.profiling.trace_summary", str(path), str(tmp_path / "summary.json")],
        check=True,
    )

    assert done.returncode == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["operators"]
    for each in summary["operators"]:
        assert 1e6 * each["self_s"] == pytest.approx(theirs[each["name"]], rel=0.05, abs=5)
    assert not path.exists()
    with gzip.open(tmp_path / "trace.json.gz") as file:
        assert json.load(file)["traceEvents"]


def test_a_file_that_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.json"
    path.write_text("[1, 2]")
    assert main([str(path)]) == 1
    assert "is no trace in Chrome's format" in capsys.readouterr().err


def test_it_imports_neither_torch_nor_lightning() -> None:
    code = "import sys, azureml_strategy.profiling.trace_summary; print({'torch', 'lightning'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "set()"
