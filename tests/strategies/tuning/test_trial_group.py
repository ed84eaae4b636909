"""NCCL's collectives do not end by themselves when a rank has left: the others are told, and abort theirs."""

from __future__ import annotations

from types import SimpleNamespace

from azureml_strategy.strategies.tuning.trials import TrialGroup


class Store:
    """As much of a `ControlStore` as a look needs."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def get(self, key: str) -> str | None:
        return self.values.get(key)


def test_a_rank_that_is_told_of_a_fault_aborts_its_group() -> None:
    aborted: list[str] = []
    trials = TrialGroup.__new__(TrialGroup)
    store = Store()
    trials.__dict__.update(_store=store, group=SimpleNamespace(abort=lambda: aborted.append("aborted")))
    trials._abort_if_failed()
    assert aborted == []
    store.values["fault"] = "(OutOfMemoryError: why) on rank 1"
    trials._abort_if_failed()
    assert aborted == ["aborted"]
    trials.__dict__.update(group=None)
    trials._abort_if_failed()
    assert aborted == ["aborted"], "after its end there is no group"
