"""Tied weights are one tensor in each file of a checkpoint, as in a file of Lightning's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tests.strategies.local_sgd.test_refusals import Module, fit
from torch import Tensor, nn

from azureml_strategy.checkpoint import JobCheckpoint
from azureml_strategy.strategies.local_sgd.checkpoint import cloned

TIED = ("layer.0.weight", "layer.1.weight")


class Tied(Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.layer[1].weight = self.layer[0].weight


def places(state: dict[str, Any]) -> list[int]:
    return [state[name].untyped_storage().data_ptr() for name in TIED]


def test_tied_weights(tmp_path: Path) -> None:
    """Nobody changes the file, whether the Trainer writes it at once or a thread does later."""
    for name, saver in (
        ("plain", ModelCheckpoint(tmp_path / "plain", "last", every_n_train_steps=20)),
        ("job", JobCheckpoint(tmp_path / "job", "last", every_n_train_steps=20)),
    ):
        fit(Tied(), callbacks=[saver], enable_checkpointing=True)
        files = [tmp_path / name / "last.ckpt" / file for file in ("averaged.ckpt", "rank_00000.pt")]
        states = [torch.load(file, weights_only=True)["state_dict"] for file in files]
        for state in states:
            assert len(set(places(state))) == 1, name
            assert len({each.untyped_storage().data_ptr() for each in state.values()}) == 3, name
            assert set(state) == set(Tied().state_dict())
        assert torch.equal(*(state[TIED[0]] for state in states))


def test_copies_share_memory_as_their_sources_do() -> None:
    module = Tied()
    module.register_buffer("view", module.layer[0].weight.detach()[1:3])
    state: dict[str, Any] = {**module.state_dict(), "extra": {"a": 1}}
    before = {name: each.clone() for name, each in state.items() if isinstance(each, Tensor)}
    copies = cloned(state)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(7.0)
    for name, each in before.items():
        assert torch.equal(copies[name], each), name
    assert len(set(places(copies))) == 1
    copies["view"].zero_()
    assert torch.equal(copies[TIED[1]][1:3], torch.zeros(2, 4))
    assert copies["extra"] == {"a": 1}
