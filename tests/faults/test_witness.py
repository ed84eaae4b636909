from __future__ import annotations

import numpy as np
import torch
from tests.faults.scripts.witness import fingerprint, fingerprints


def test_every_bit_counts() -> None:
    state = {"weights": torch.zeros(3), "groups": [{"lr": 0.1}, {"lr": 0.2}], "array": np.zeros(2), "of": object()}
    found = fingerprints(state)
    assert found.keys() == {"weights", "groups.0.lr", "groups.1.lr", "array", "of"}
    assert fingerprints({**state, "weights": torch.zeros(3)}) == found
    for other in (torch.tensor([0.0, 0.0, -0.0]), torch.zeros(3, 1), torch.tensor([0.0, 0.0, 1e-45])):
        assert fingerprints({**state, "weights": other})["weights"] != found["weights"]


def test_numbers_are_told_to_the_last_bit() -> None:
    assert fingerprints({"lr": 0.1 + 0.2}) != fingerprints({"lr": 0.3})


def test_batches_of_any_shape() -> None:
    batch = {"a": (torch.ones(2), torch.zeros(1)), "b": [torch.ones(2)]}
    assert fingerprint(batch) == fingerprint({"a": (torch.ones(2), torch.zeros(1)), "b": [torch.ones(2)]})
    assert fingerprint(batch) != fingerprint({"a": (torch.ones(2), torch.ones(1)), "b": [torch.ones(2)]})
