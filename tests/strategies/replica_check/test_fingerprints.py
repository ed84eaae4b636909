"""Hashes of samples tell values, whatever the type and layout, and do not depend on what lies beside them."""

from __future__ import annotations

import torch
from torch import Tensor

from azureml_strategy.strategies.equal_buffers import fingerprint
from azureml_strategy.strategies.replica_check.fingerprints import Fingerprints

TYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn)


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    numbers = [torch.randint(0, 2, (7, 5), generator=generator).to(each) for each in TYPES]
    return [*numbers, torch.randn(30, 40, generator=generator).t(), torch.randn(20_000, generator=generator)]


def test_small_tensors_are_hashed_whole() -> None:
    made = tensors()
    plain = [fingerprint(each).item() for each in made[: len(TYPES)]]
    assert Fingerprints(made).values()[: len(TYPES)] == plain


def test_other_tensors_beside_it_change_nothing() -> None:
    made = tensors()
    expected = Fingerprints(made).values()
    assert Fingerprints(made[::-1]).values() == expected[::-1]
    assert Fingerprints(made[3:]).values()[:-1] == expected[3:-1]


def test_a_change_is_seen_by_a_later_look_at_the_same_tensors() -> None:
    made = tensors()
    before = Fingerprints(made).values()
    made[0][3, 2] += 1
    made[-2].add_(1e-3)
    made[-1].add_(1e-3)
    changed = [a != b for a, b in zip(before, Fingerprints(made).values(), strict=True)]
    assert [place for place, moved in enumerate(changed) if moved] == [0, len(made) - 2, len(made) - 1]
