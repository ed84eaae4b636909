from __future__ import annotations

import pytest
import torch

from azureml_strategy.tracking.clocks import CudaClock, HostClock


def test_host_clock_measures_what_it_reads() -> None:
    readings = iter([1.5, 4.0])
    clock = HostClock(lambda: next(readings))
    start, end = clock.now(), clock.now()
    assert clock.has_passed(end)
    assert clock.seconds(start, end) == 2.5


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_cuda_clock_measures_the_gpu_and_does_not_wait() -> None:
    clock = CudaClock()
    torch.cuda.synchronize()
    start = clock.now()
    torch.cuda._sleep(500_000_000)  # cycles: a quarter of a second at 2 GHz
    end = clock.now()
    assert not clock.has_passed(end)
    clock.wait_for(end)
    assert clock.has_passed(end)
    assert 0.1 < clock.seconds(start, end) < 2.0
