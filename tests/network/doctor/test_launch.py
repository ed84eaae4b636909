"""Launch and job in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from azureml_strategy.network.doctor.launch import check_launch


def test_in_a_job(tree: Any, read: Callable[..., Any], job: Callable[..., Any]) -> None:
    launch, found = check_launch(read(job(nodes=4, processes=8)))
    assert launch.text == ("pytorch: global rank 0 of 32, local rank 0 of 8, node 0 of 4; rank 0 at 10.0.0.4:6105")
    assert found.text == (
        "quirky_plum, experiment resnet50, workspace emulated, compute emulated, priority dedicated, attempt 1"
    )
    assert {launch.verdict, found.verdict} == {"ok"}


def test_a_launch_that_contradicts_itself_is_a_problem(read: Callable[..., Any], job: Callable[..., Any]) -> None:
    finding = next(check_launch(read({**job(), "WORLD_SIZE": "3"})))
    assert finding.verdict == "problem"
    assert "WORLD_SIZE" in finding.text or "world_size" in finding.text


def test_several_nodes_without_a_distribution(read: Callable[..., Any]) -> None:
    finding = next(check_launch(read({"AZUREML_RUN_ID": "run", "AZUREML_NODE_COUNT": "2"})))
    assert finding.verdict == "problem"
    assert "distribution: {type: pytorch" in finding.text


@pytest.mark.parametrize(
    ("environ", "text"),
    [({}, "not in an Azure ML job"), ({"AZUREML_RUN_ID": "run"}, "one process, without a launcher")],
)
def test_without_a_launch(environ: dict[str, str], text: str, read: Callable[..., Any]) -> None:
    finding = next(check_launch(read(environ)))
    assert finding.verdict == "ok"
    assert text in finding.text
