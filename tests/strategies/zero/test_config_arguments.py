from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from azureml_strategy.strategies.zero.config import strategy_arguments


@pytest.mark.parametrize(("stage", "expected"), [(None, 2), (0, 0), (1, 1), (3, 3)])
def test_stage_two_is_the_default(stage: int | None, expected: int) -> None:
    assert strategy_arguments(stage, None, None, {"timeout": 1}) == {"stage": expected, "timeout": 1}


def test_a_configuration_stands_beside_what_it_has_no_place_for() -> None:
    others = {"load_full_weights": True, "logging_level": 10}
    assert strategy_arguments(None, "ds.json", None, others) == {"config": "ds.json", **others}


@pytest.mark.parametrize(
    ("stage", "config", "nvme", "others", "words"),
    [
        (4, None, None, {}, "stage=4 is no stage of ZeRO"),
        ("3", None, None, {}, "stage='3' is no stage"),
        (3, {}, None, {}, "Both config and stage were given"),
        (None, {}, "/disk", {}, "Both config and offload_nvme"),
        (None, {}, None, {"offload_optimizer": True}, "Both config and offload_optimizer"),
        (2, None, "/disk", {}, "offload_nvme needs ZeRO stage 3, and this is stage 2"),
    ],
)
def test_what_is_refused(stage: Any, config: Any, nvme: Any, others: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        strategy_arguments(stage, config, nvme, others)


def test_nvme_takes_both_to_the_disk() -> None:
    arguments = strategy_arguments(3, None, Path("/disk"), {})
    assert arguments["nvme_path"] == "/disk"
    assert {arguments[f"offload_{part}_device"] for part in ("optimizer", "params")} == {"nvme"}
    assert arguments["offload_optimizer"] is arguments["offload_parameters"] is True
