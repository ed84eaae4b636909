from __future__ import annotations

import pytest
import torch

from azureml_strategy.tracking.values import readable_later


def test_a_number_stays_and_a_tensor_is_read() -> None:
    tensor = torch.tensor([1.5])
    value = readable_later(tensor)
    tensor.zero_()
    assert (readable_later(2), float(value)) == (2, 1.5)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_value_is_read_later_and_does_not_change_until_then() -> None:
    tensor = torch.full((1,), 1.5, device="cuda")
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    behind = torch.cuda.Event()
    value = readable_later(tensor)
    behind.record()
    assert not behind.query()  # nobody waited for the GPU
    tensor.zero_()
    assert float(value) == 1.5
