"""A state that is taken after any step goes on bit for bit, and holds no number that nobody has written."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from azureml_strategy.strategies.local_sgd import fragments as parts
from azureml_strategy.strategies.local_sgd.averaging import PeriodicAveraging
from azureml_strategy.strategies.local_sgd.exchange import Exchanges
from azureml_strategy.strategies.local_sgd.period import Rules

STEPS, RATE = 13, 0.1
OUTER: dict[str, Any] = {"outer_learning_rate": 0.7, "outer_momentum": 0.9}
RULES: dict[str, Rules] = {
    "averages": Rules(period=4),
    "outer": Rules(period=4, **OUTER),
    "fragments": Rules(period=6, fragments=3, **OUTER),
    "under way": Rules(period=6, fragments=3, delay=2, **OUTER),
    "mixed": Rules(period=6, fragments=2, delay=2, mixing=0.4, **OUTER),
    "no momentum": Rules(period=4, fragments=2, outer_learning_rate=0.7, outer_momentum=0.0),
    "compressed": Rules(period=4, fragments=2, compression="int8", **OUTER),
}


pytestmark = pytest.mark.usefixtures("nan_in_fresh_memory")


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "_MOST_ELEMENTS", 7)


@pytest.fixture
def exchanges() -> Iterator[Exchanges]:
    started = Exchanges(None, torch.device("cpu"))
    yield started
    assert started.close(wait_s=60)


class Replica:
    """A module that learns by itself, and is averaged."""

    def __init__(self, rules: Rules, exchanges: Exchanges) -> None:
        torch.manual_seed(0)
        self.module = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        self.module[2].bias.requires_grad_(False)
        self.averaging = PeriodicAveraging(self.module, rules, exchanges)

    def train(self, first: int, last: int) -> list[Tensor]:
        """Take the steps after `first`, up to `last`; the parameters after each."""
        after = []
        self.averaging.start(RATE)
        for step in range(first + 1, last + 1):
            if step == 5:  # in the middle of a period
                self.module[2].bias.requires_grad_(True)
            self.averaging.before_step()
            rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            self.module.zero_grad()
            self.module(rows).pow(2).mean().backward()
            with torch.no_grad():
                for each in self.module.parameters():
                    if each.grad is not None:
                        each.sub_(RATE * each.grad)
            self.averaging.after_step(RATE)
            after.append(torch.cat([each.detach().flatten() for each in self.module.parameters()]))
        return after

    def state(self) -> Any:
        averaging = self.averaging
        return copy.deepcopy((averaging.shared_state(), averaging.local_state(), self.module.state_dict()))

    def load(self, state: Any) -> None:
        shared, own, weights = copy.deepcopy(state)
        self.module.load_state_dict(weights)
        self.module[2].bias.requires_grad_("2.bias" in {**shared["anchor"], **dict.fromkeys(shared["names"])})
        self.averaging.load(shared, own)


@pytest.mark.parametrize("name", RULES)
def test_after_each_step(exchanges: Exchanges, name: str) -> None:
    whole = Replica(RULES[name], exchanges).train(0, STEPS)
    for step in range(1, STEPS):
        saved = Replica(RULES[name], exchanges)
        saved.train(0, step)
        state = saved.state()
        assert all(each.isfinite().all() for kind in ("anchor", "momentum") for each in state[0][kind].values())
        resumed = Replica(RULES[name], exchanges)
        resumed.load(state)
        rest = resumed.train(step, STEPS)
        assert all(torch.equal(*pair) for pair in zip(rest, whole[step:], strict=True)), f"from step {step}"
