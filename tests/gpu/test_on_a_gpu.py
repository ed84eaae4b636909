"""What a driver, torch.profiler and nvJPEG say on a real GPU; `make test-gpu` runs these tests."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from tests.data.photographs import encode, photograph

from azureml_strategy.profiling import ProfileSteps
from azureml_strategy.tracking.node_sampler import GPUCounters

pytestmark = pytest.mark.cuda


def test_the_driver_tells_of_this_gpu() -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    gpus, warnings, matrix = GPUCounters(), dict[str, str](), torch.ones(4096, 4096, device="cuda")
    for _ in range(200):
        matrix @ matrix
    figures = gpus.read(warnings.setdefault)
    torch.cuda.synchronize()
    gpus.close()
    assert len(gpus) >= 1
    used = max(value for name, value in figures.items() if name.endswith("memory_usage_megabytes"))
    assert used >= matrix.nbytes / 1e6
    assert all(0 <= value <= 100 for name, value in figures.items() if name.endswith("utilization_percentage"))
    assert all(0 < value < 120 for name, value in figures.items() if name.endswith("temperature_celsius"))


def test_a_profile_has_the_kernels_of_its_steps(tmp_path: Path) -> None:
    profiler = ProfileSteps("3-5", folder=tmp_path, on_request=False)
    trainer = Trainer(
        accelerator="cuda",
        devices=1,
        max_steps=8,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[profiler],
    )
    trainer.fit(BoringModel())
    summary = json.loads((tmp_path / "profile" / "summary_rank_0.json").read_text())
    assert (summary["device"], summary["steps"]) == ("gpu", [3, 4, 5])
    assert summary["operators"]
    assert 0 < summary["compute_s"] < summary["window_s"]
    parts = ("compute_s", "exposed_communication_s", "copy_s", "idle_s")
    assert sum(summary[name] for name in parts) == pytest.approx(summary["window_s"], rel=1e-3)


def test_nvjpeg_decodes_as_a_cpu_does() -> None:
    pytest.importorskip("torchcodec", reason="torchcodec is not installed")
    from tests.data.test_image_batches import _Records

    from azureml_strategy.data import EvaluationImages
    from azureml_strategy.data.gpu_decoding import EncodedImages, decode_on_gpu

    images = EvaluationImages(_Records([encode(photograph(90, 70, seed)) for seed in range(4)]), image_size=32)
    decoded, labels = decode_on_gpu(EncodedImages(images).__getitems__(range(4)), torch.device("cuda"))
    expected = images.__getitems__(range(4))
    assert torch.equal(labels.cpu(), expected.labels)
    apart = np.abs(decoded.cpu().numpy().astype(int) - expected.images.numpy().astype(int))
    # nvJPEG rounds its inverse transform and upsamples colours in its own way.
    assert apart.mean() < 3
