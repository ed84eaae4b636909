"""What is read of GPUs, through nvidia-ml-py, from a library in place of the driver's own."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.system_metrics.metrics import gpu_monitor

pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

# A process of its own finds the library at its start. A line is a case: what the driver says in each sample.
PROGRAM = """
import json, os, pathlib, sys
from azureml_strategy.tracking.node_sampler import GPUCounters
def driver_says(answers):
    text = "".join(f"{key} {value}\\n" for key, value in answers.items())
    pathlib.Path(os.environ["FAKE_NVML"]).write_text(text)
for line in sys.stdin:
    samples, found, warnings = json.loads(line), [], {}
    driver_says(samples[0])
    gpus = GPUCounters()
    for answers in samples:
        driver_says(answers)
        found.append(gpus.read(warnings.setdefault))
    gpus.close()
    print(json.dumps([found, warnings]), flush=True)
"""
BUSY = {
    "init": 0,
    "count": 1,
    "0.load": 97,
    "0.memory_total": 80_000_000_000,
    "0.memory_used": 60_000_000_000,
    "0.power": 650_000,
    "0.power_limit": 700_000,
    "0.sm_clock": 1980,
    "0.memory_clock": 2619,
    "0.celsius": 64,
    "0.reasons": 0x4,
    "0.memory_errors": 2,
}
Read = Callable[..., tuple[list[dict[str, float]], dict[str, str]]]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("nvml.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", source], check=True)
    return folder


@pytest.fixture
def read(driver: Path) -> Iterator[Read]:
    environ = {**os.environ, "LD_LIBRARY_PATH": str(driver), "FAKE_NVML": str(driver / "answers")}
    command, pipe = [sys.executable, "-c", PROGRAM], subprocess.PIPE
    with subprocess.Popen(command, env=environ, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(*samples: dict[str, Any]) -> Any:
            process.stdin.write(json.dumps(samples) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


def test_every_figure(read: Read) -> None:
    samples, warnings = read(BUSY)
    assert samples == [
        {
            "gpu_0_utilization_percentage": 97,
            "gpu_0_memory_usage_percentage": 75,
            "gpu_0_memory_usage_megabytes": 60_000,
            "gpu_0_power_usage_watts": 650,
            "gpu_0_power_usage_percentage": 92.9,
            "gpu_0_sm_clock_megahertz": 1980,
            "gpu_0_memory_clock_megahertz": 2619,
            "gpu_0_temperature_celsius": 64,
            "gpu_0_power_capped": 1,
            "gpu_0_throttled": 0,
            "gpu_0_uncorrectable_memory_errors": 0,  # two were there before
        }
    ]
    assert warnings == {}  # a GPU at its power limit is what one under full load looks like


def test_what_a_driver_does_not_have_or_denies_is_left_out(read: Read) -> None:
    denied = {"init": 0, "count": 2, "0.load": 50, "0.power": "!4", "1.celsius": 40, "1.load": "!3"}
    samples, warnings = read(denied)
    assert samples == [{"gpu_0_utilization_percentage": 50, "gpu_1_temperature_celsius": 40}]
    assert warnings == {}


@pytest.mark.parametrize(("reason", "text"), [(0x20, "software thermal"), (0x40, "hardware thermal"), (0x80, "brake")])
def test_a_harmful_slowdown_that_lasts_is_told(read: Read, reason: int, text: str) -> None:
    hot = BUSY | {"0.reasons": reason | 0x8, "0.sm_clock": 345, "0.celsius": 91}
    samples, warnings = read(BUSY, hot, BUSY, hot)
    assert [each["gpu_0_throttled"] for each in samples] == [0, 1, 0, 1]
    assert warnings == {}
    _, warnings = read(BUSY, hot, hot)
    (warning,) = warnings.values()
    assert warning.startswith("GPU 0 runs at lower clocks because ")
    assert text in warning
    assert "sm_clock_megahertz 345" in warning
    assert "temperature_celsius 91" in warning


@pytest.mark.parametrize("reason", [0x1, 0x2, 0x4, 0x8, 0x10, 0x100])
def test_normal_reasons_are_not_told(read: Read, reason: int) -> None:
    samples, warnings = read(*[BUSY | {"0.reasons": reason}] * 3)
    assert [each["gpu_0_throttled"] for each in samples] == [0, 0, 0]
    assert warnings == {}


def test_memory_errors_that_count_up(read: Read) -> None:
    samples, warnings = read(BUSY, BUSY | {"0.memory_errors": 5})
    assert samples[1]["gpu_0_uncorrectable_memory_errors"] == 3
    assert warnings == {"gpu 0 memory": "GPU 0 had 3 uncorrectable memory error(s) (ECC)"}


def test_an_xid_is_told_with_its_gpu(read: Read) -> None:
    _, warnings = read(BUSY | {"count": 2}, BUSY | {"count": 2, "xid": 79})
    (warning,) = warnings.values()
    assert warning.startswith("GPU 1 reported Xid 79; https://docs.nvidia.com/deploy/xid-errors/")


def test_a_gpu_that_is_lost_is_told_and_the_others_go_on(read: Read) -> None:
    lost = BUSY | {"0.load": "!15", "1.load": 88, "count": 2}
    samples, warnings = read(BUSY | {"count": 2}, lost, lost)
    assert samples[1] == samples[2] == {"gpu_1_utilization_percentage": 88}
    assert list(warnings) == ["gpu 0 lost"]


def test_the_names_of_mlflow(read: Read) -> None:
    theirs = set(re.findall(r"gpu_\{i\}_(\w+)", inspect.getsource(gpu_monitor)))
    ((ours,), _) = read(BUSY)
    assert len(theirs) == 5
    assert {f"gpu_0_{name}" for name in theirs} <= ours.keys()
