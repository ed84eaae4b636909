"""Which states are kept of each rank. That they are restored is in tests/multiprocess/test_kept_state.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from azureml_strategy.checkpoint import rank_states
from azureml_strategy.checkpoint.rank_states import states_of_ranks

LARGE = torch.zeros(1 << 19)


class OfUser:
    """What a user keeps, and pickle refuses."""

    def __init__(self) -> None:
        self.function: Callable[[], None] = lambda: None


@pytest.mark.parametrize(
    ("mine", "theirs", "kept"),
    [
        ({"a": {"seen": 1}, "b": {"seen": 1}}, {"a": {"seen": 2}, "b": {"seen": 1}}, {"callbacks/a"}),
        ({"a": {"mean": torch.ones(2)}}, {"a": {"mean": torch.zeros(2)}}, {"callbacks/a"}),
        ({"a": {"seen": 1}}, {}, {"callbacks/a"}),
        ({"a": {"mean": LARGE}}, {"a": {"mean": LARGE + 1}}, set()),
        ({"a": {"text": "1" * (1 << 21)}}, {"a": {"text": "2" * (1 << 21)}}, set()),
        ({"a": {"own": OfUser()}}, {"a": {"own": OfUser()}}, set()),
        ({"a": {"seen": 1}}, {"a": {"seen": 1}}, set()),
    ],
)
def test_small_states_that_differ(
    monkeypatch: pytest.MonkeyPatch, mine: dict[str, Any], theirs: dict[str, Any], kept: set[str]
) -> None:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    given: list[dict[str, str]] = []

    def of_another(value: Any) -> list[Any]:
        given.append(value)
        return [value]

    monkeypatch.setattr(rank_states, "gather_sound", of_another)
    assert states_of_ranks(trainer, {"callbacks": theirs}) == []
    digests = given[0]
    monkeypatch.setattr(rank_states, "gather_sound", lambda value: [value, digests])
    found = states_of_ranks(trainer, {"callbacks": mine})
    assert (set(found[0]) if found else set()) == kept
    for key in kept:
        assert found[0][key] is mine[key.removeprefix("callbacks/")]
