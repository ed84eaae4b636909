"""Waiting for the host inside forward and backward, by traces that are made up, and in one that torch writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from tests.gpu.launch_waits import launch_waits
from tests.gpu.parts import compare_waits
from tests.gpu.watching import Annotations, LaunchWaits

from azureml_strategy.tracking import ThroughputCallback

STRATEGY = "[Strategy]AzureMLDDPStrategy"


class Trace:
    """What a host and its GPU do, in microseconds. A kernel starts when it is launched, or after the one before."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "ts": 0.0}]
        self.free = 0.0
        self.count = 0

    def kernel(self, at: float, lasts: float, name: str = "gemm", latency: float = 0.0, gap: float = 0.0) -> None:
        self.count += 1
        shared: dict[str, Any] = {"ph": "X", "args": {"correlation": self.count}}
        start = max(at + latency, self.free + gap)
        self.events.append({**shared, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": at, "dur": 3.0})
        self.events.append({**shared, "cat": "kernel", "name": name, "ts": start, "dur": lasts})
        self.free = start + lasts

    def span(self, name: str, start: float, end: float, category: str = "user_annotation") -> None:
        self.events.append({"ph": "X", "cat": category, "name": name, "ts": start, "dur": end - start})

    def step(self, at: float, held: bool = False) -> None:
        """A forward of 100 that waits for 80, a backward of 100 that waits for 40, and an optimizer that waits."""
        if held:
            self.kernel(at, 150, name="spin_kernel(long)")
        self.kernel(at, 5, name="copy")  # the copy of the batch
        self.span(f"{STRATEGY}.training_step", at + 100, at + 200)
        self.span(f"{STRATEGY}.training_step", at + 120, at + 130, "gpu_user_annotation")
        self.kernel(at + 130, 20)
        self.span(f"{STRATEGY}.backward", at + 200, at + 300)
        self.kernel(at + 220, 30)
        self.kernel(at + 260, 30)
        self.span("[LightningModule]Boring.optimizer_step", at + 50, at + 990)
        self.kernel(at + 900, 10)

    def sums(self) -> dict[str, float]:
        return launch_waits({"traceEvents": self.events})


def test_only_the_waits_of_forward_and_backward_count() -> None:
    trace = Trace()
    for step in range(3):
        trace.step(1000.0 * step)
    found = trace.sums()
    assert found == pytest.approx({"steps": 3, "span_s": 600e-6, "waited_s": 360e-6})
    # Most of the step the GPU is idle, but elsewhere.
    shares = {"forward": 0.02, "backward": 0.06, "host": 0.12, "optimizer": 0.8}
    assert compare_waits(shares, found) == (True, "of forward and backward, host 60%; torch.profiler: 60% in 3 steps")
    assert compare_waits({**shares, "backward": 0.03, "communication": 0.03}, found)[0]
    right, words = compare_waits({**shares, "backward": 0.09, "host": 0.09}, found)
    assert (right, words) == (False, "of forward and backward, host 45%; torch.profiler: 60% in 3 steps")


def test_a_gpu_behind_its_host_comes_later_to_a_span_and_does_not_wait() -> None:
    """The spans end when their kernels do; the gaps between queued kernels are the GPU's own."""
    trace = Trace()
    trace.kernel(0, 1000)
    trace.span(f"{STRATEGY}.training_step", 10, 20)
    trace.kernel(12, 100, gap=2)
    trace.span(f"{STRATEGY}.backward", 20, 40)
    trace.kernel(25, 200, gap=2)
    trace.kernel(35, 200, gap=2)
    assert trace.sums() == pytest.approx({"steps": 1, "span_s": 506e-6, "waited_s": 0.0})


def test_a_held_step_and_those_that_make_up_for_it_are_left_out() -> None:
    trace = Trace()
    for step in range(12):
        trace.step(1000.0 * step, held=step == 2)
    assert trace.sums() == pytest.approx({"steps": 3, "span_s": 600e-6, "waited_s": 360e-6})
    trace = Trace()
    trace.step(0.0, held=True)
    assert compare_waits({"forward": 0.5}, trace.sums()) == (
        False,
        "each recorded step was held, or follows one that was",
    )


def test_a_run_that_never_waits_has_no_such_part_and_one_without_any_is_wrong() -> None:
    never: dict[str, float] = {"steps": 1, "span_s": 1.0, "waited_s": 0.0}
    assert compare_waits({"forward": 0.5, "backward": 0.5}, never)[0]
    assert not compare_waits({"forward": 0.5, "backward": 0.5}, {**never, "waited_s": 0.5})[0]
    assert compare_waits({}, never) == (False, "the breakdown has no part `forward`: []")


@pytest.mark.parametrize("first", [True, False])
def test_a_real_trace_has_the_spans_of_the_window_that_is_told(tmp_path: Path, first: bool) -> None:
    waits, throughput = LaunchWaits(str(tmp_path / "waits.json"), last=40, steps=20), ThroughputCallback()
    callbacks: list[Callback] = [waits, throughput] if first else [throughput, waits]
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=42,
        limit_val_batches=0,
        log_every_n_steps=20,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
        profiler=Annotations(),
    )
    trainer.fit(BoringModel())
    found = json.loads((tmp_path / "waits.json").read_text())
    assert found["seen"]["steps"] == 20
    assert found["seen"]["waited_s"] == pytest.approx(found["seen"]["span_s"])  # nothing runs on a GPU
    assert found["seen"]["span_s"] > 0
    assert sum(found["told"].values()) == pytest.approx(1)
