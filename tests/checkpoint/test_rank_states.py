"""Which states are kept of each rank. That they are restored is in tests/multiprocess/test_kept_state.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from azureml_strategy.checkpoint import callback_state
from azureml_strategy.checkpoint.callback_state import restore_states, states_of_ranks

LARGE = torch.zeros(1 << 19)
CIRCLE: dict[str, Any] = {}
CIRCLE["itself"] = CIRCLE


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
        ({"a": {"best": torch.ones(2)}}, {"a": {"best": torch.ones(3)[:2]}}, set()),
        ({"a": {"part": LARGE[:4]}}, {"a": {"part": LARGE[4:8]}}, set()),
        ({"a": {"part": LARGE[:4]}}, {"a": {"part": LARGE[4:8] + 1}}, {"callbacks/a"}),
        ({"a": {"sparse": torch.eye(2).to_sparse()}}, {"a": {"sparse": torch.zeros(2, 2).to_sparse()}}, set()),
        ({"a": CIRCLE}, {"a": {"seen": 2}}, {"callbacks/a"}),
    ],
)
def test_small_states_that_differ(
    monkeypatch: pytest.MonkeyPatch, mine: dict[str, Any], theirs: dict[str, Any], kept: set[str]
) -> None:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    monkeypatch.setattr(type(trainer), "world_size", 2)
    given: list[dict[str, str]] = []

    def of_another(value: Any) -> list[Any]:
        given.append(value)
        return [value]

    monkeypatch.setattr(callback_state, "gather_sound", of_another)
    assert states_of_ranks(trainer, {"callbacks": theirs}) == []
    digests = given[0]
    monkeypatch.setattr(callback_state, "gather_sound", lambda value: [value, digests])
    found = states_of_ranks(trainer, {"callbacks": mine})
    assert (set(found[0]) if found else set()) == kept
    for key in kept:
        assert str(found[0][key]) == str(mine[key.removeprefix("callbacks/")])


def test_what_is_kept_is_on_the_host_and_no_view_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    monkeypatch.setattr(type(trainer), "world_size", 2)
    monkeypatch.setattr(callback_state, "gather_sound", lambda value: [value, {}])
    mean = torch.ones(2)
    kept = states_of_ranks(trainer, {"callbacks": {"a": {"mean": mean}}})[0]["callbacks/a"]["mean"]
    mean.zero_()
    assert kept.tolist() == [1, 1]


def test_the_state_of_a_data_module_that_is_gone_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
    restore_states(trainer, checkpoint := {"epoch": 1}, {"data module": {"seen": 1}})
    assert checkpoint == {"epoch": 1}
