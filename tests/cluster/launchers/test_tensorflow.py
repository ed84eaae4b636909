from __future__ import annotations

import json
from typing import Any

import pytest

from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.cluster.launchers import detect_launch

WORKERS = ["10.0.0.4:2222", "10.0.0.5:2222"]


def job(cluster: Any, task_type: str = "worker", index: Any = 0, **more: str) -> dict[str, str]:
    config = {"cluster": cluster, "task": {"type": task_type, "index": index}, "environment": "cloud"}
    return {"AZUREML_RUN_ID": "quirky_plum", "TF_CONFIG": json.dumps(config), **more}


@pytest.mark.parametrize(
    ("environ", "rank", "node_rank"),
    [
        pytest.param(job({"worker": WORKERS}), 0, 0, id="first worker"),
        pytest.param(job({"worker": WORKERS}, index=1), 1, 1, id="second worker"),
        pytest.param(job({"worker": WORKERS}, index="1"), 1, 1, id="index as text"),
        pytest.param(job({"worker": WORKERS, "ps": []}, index=1), 1, 1, id="empty ps list"),
        pytest.param(job({"worker": WORKERS, "ps": None}, index=1), 1, 1, id="null ps list"),
        pytest.param(job({"worker": WORKERS, "ps": ["10.0.0.6:2222"]}, index=1), 1, 1, id="a worker beside a ps"),
        pytest.param(job({"chief": WORKERS[:1], "worker": WORKERS[1:]}, "chief"), 0, 0, id="chief"),
        pytest.param(job({"worker": WORKERS[1:], "chief": WORKERS[:1]}), 1, 1, id="worker behind a chief"),
    ],
)
def test_two_nodes(environ: dict[str, str], rank: int, node_rank: int) -> None:
    expected = Launch("tensorflow", rank, 2, 0, 1, node_rank, 2, "10.0.0.4", 6105)
    assert detect_launch(environ) == expected


def test_two_workers_on_each_node() -> None:
    workers = [f"10.0.0.{host}:{port}" for host in (4, 5) for port in (2222, 2223)]
    assert detect_launch(job({"worker": workers}, index=3)) == Launch("tensorflow", 3, 4, 1, 2, 1, 2, "10.0.0.4", 6105)


@pytest.mark.parametrize(
    ("task_type", "index"),
    [("ps", 0), ("evaluator", 0), ("worker", 2), ("worker", -1)],
)
def test_a_task_that_does_not_train_stops(task_type: str, index: int) -> None:
    with pytest.raises(LaunchError, match=f"`{task_type}` {index}, which is none of the 2 tasks that train"):
        detect_launch(job({"worker": WORKERS, "ps": ["10.0.0.6:2222"]}, task_type, index))


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "null",
        "[]",
        "{}",
        '{"cluster": {}, "task": {}}',
        '{"cluster": [], "task": {"type": "worker", "index": 0}}',
        '{"cluster": {"worker": "10.0.0.4:2222"}, "task": {"type": "worker", "index": 0}}',
        '{"cluster": {"worker": [""]}, "task": {"type": "worker", "index": 0}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": "first"}}',
        '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 1e999}}',
    ],
)
def test_a_configuration_that_cannot_be_right_is_refused(text: str) -> None:
    with pytest.raises(LaunchError):
        detect_launch({"AZUREML_RUN_ID": "quirky_plum", "TF_CONFIG": text})


def test_tasks_over_fewer_nodes_than_the_job_has_are_refused() -> None:
    with pytest.raises(LaunchError, match="the job has 3"):
        detect_launch(job({"worker": WORKERS}, AZUREML_NODE_COUNT="3"))


@pytest.mark.parametrize(
    ("given", "port"),
    [({}, 6105), ({"MASTER_PORT": "29501"}, 29501), ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "47057"}, 6105)],
)
def test_tensorflows_port_is_not_taken(given: dict[str, str], port: int) -> None:
    launch = detect_launch(job({"worker": WORKERS}) | given)
    assert launch is not None
    assert launch.main_port == port
