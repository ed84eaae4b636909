from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from azureml_strategy.checkpoint.random_state import random_state, set_random_state
from azureml_strategy.control.gather import gather


def _draw() -> tuple[list[float], list[float], list[float]]:
    return torch.randn(5).tolist(), np.random.normal(size=5).tolist(), [random.gauss(0, 1) for _ in range(3)]


def test_the_same_numbers_follow_after_a_way_through_a_safe_file(tmp_path: Path) -> None:
    _draw()  # of a pair of normal numbers the second waits
    torch.save(random_state(), tmp_path / "state.pt")
    expected = _draw()
    assert _draw() != expected
    set_random_state(torch.load(tmp_path / "state.pt", weights_only=True))
    assert _draw() == expected


def test_without_a_group_there_is_one_rank() -> None:
    assert gather("mine") == ["mine"]
