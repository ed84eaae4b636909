from __future__ import annotations

import re

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from azureml_strategy.strategies.zero.strategy import agreed_size, check_divides, section


class Planned(nn.Module):
    def __init__(self, plan: dict[str, str]) -> None:
        super().__init__()
        self.plan = plan

    def tensor_parallel_plan(self) -> dict[str, str]:
        return self.plan


def test_a_plan_in_deepspeeds_words() -> None:
    plan = {"layers.*.up": "colwise", "layers.*.down": "rowwise", "head": "colwise_gather_output"}
    up, down, head = section(Planned(plan))["partition_config"]["layer_specs"]
    assert [each["partition_type"] for each in (up, down, head)] == ["column", "row", "column"]
    assert head["gather_output"] is True


@pytest.mark.parametrize(
    ("name", "matches"),
    [
        ("layers.0.up.weight", True),
        ("module.layers.11.up.bias", True),
        ("layers.0.up", False),
        ("layers.0.mlp.up.weight", False),
        ("layers.0.upper.weight", False),
        ("my_layers.0.up.weight", False),
    ],
)
def test_a_star_is_one_part_of_a_name(name: str, matches: bool) -> None:
    (pattern,) = section(Planned({"layers.*.up": "colwise"}))["partition_config"]["layer_specs"][0]["patterns"]
    assert bool(re.match(pattern, name)) is matches


@pytest.mark.parametrize(
    ("config", "asked", "size"),
    [({}, 1, 1), ({}, 4, 4), ({"autotp_size": 2}, 1, 2), ({"autotp_size": 0}, 4, 4), ({"preset_model": "llama"}, 4, 4)],
)
def test_the_size_by_configuration_or_argument(config: dict[str, object], asked: int, size: int) -> None:
    assert agreed_size({"tensor_parallel": config}, asked) == size


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Linear has no tensor_parallel_plan\(\)"):
        section(nn.Linear(1, 1))
    with pytest.raises(ValueError, match="'layers': 'sequence', but DeepSpeed has only colwise"):
        section(Planned({"layers": "sequence"}))
    with pytest.raises(
        MisconfigurationException, match=r"tensor_parallel_size=4, but the DeepSpeed configuration says .*=2"
    ):
        agreed_size({"tensor_parallel": {"autotp_size": 2}}, 4)
    check_divides(8, 4)
    with pytest.raises(ValueError, match="tensor_parallel_size=3 does not divide the 8 processes"):
        check_divides(8, 3)
