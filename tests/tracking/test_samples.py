from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

from azureml_strategy.tracking.samples import count_samples

Pair = namedtuple("Pair", ["images", "labels"])


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (torch.zeros(3, 2), 3),
        ([torch.zeros(5, 2), torch.zeros(5)], 5),
        ({"input_ids": torch.zeros(7, 2), "mask": torch.zeros(7)}, 7),
        ({"name": "a", "nested": [{"x": torch.zeros(2, 9)}]}, 2),
        (Pair(torch.zeros(4, 1), torch.zeros(4)), 4),
        ([torch.tensor(1.0), torch.zeros(6, 1)], 6),  # a scalar has no samples
        (torch.zeros(0, 3), 0),
    ],
)
def test_leading_dimension_of_the_first_tensor(batch: Any, samples: int) -> None:
    assert count_samples(batch) == samples


@pytest.mark.parametrize("batch", [{"text": "abc"}, [], torch.tensor(1.0), object()])
def test_uncountable_batch_names_the_fix(batch: Any) -> None:
    with pytest.raises(TypeError, match=r"ThroughputCallback\(batch_size="):
        count_samples(batch)
