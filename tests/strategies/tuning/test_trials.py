"""What a rank may do in a trial before it knows that all others do the same."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule

from azureml_strategy.strategies.tuning.trials import RefusalError, TrialBench


class Module(LightningModule):
    """Has a loss for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))


class Trials:
    """As much of a `TrialGroup` as a bench needs: the other rank says something else."""

    group = object()

    def __init__(self, other: tuple[bool, bool]) -> None:
        self._other = other

    def together(self, trial: Callable[[], Any], forget: Callable[[], None]) -> list[Any]:
        return [trial(), self._other]


@pytest.mark.parametrize(
    ("other", "why"), [((False, False), "returned no loss"), ((True, False), "does not train its own parameters")]
)
def test_no_rank_waits_in_a_step_for_one_that_has_nothing_to_train(
    other: tuple[bool, bool], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the other rank is in no step, and would be waited for")

    monkeypatch.setattr(dist, "barrier", refuse)
    module: Any = Module()
    wrapped: Any = SimpleNamespace(no_sync=nullcontext, reducer=None, logger=None, parameters=module.parameters)
    bench = TrialBench(module, (), {}, lambda *_: wrapped, lambda *_: module.weight * 2)
    bench._copy, bench._trials = module, Trials(other)  # type: ignore[assignment]
    with pytest.raises(RefusalError, match=why):
        bench.alone(1)
