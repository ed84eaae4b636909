from __future__ import annotations

import pytest

from azureml_strategy.cluster.environ import LaunchError
from azureml_strategy.cluster.launch import Launch
from azureml_strategy.cluster.launchers import detect_launch

NODE_1 = {
    "AZUREML_RUN_ID": "quirky_plum",
    "RAY_ADDRESS": "10.0.0.4:6379",
    "AZUREML_NODE_COUNT": "2",
    "AZUREML_CR_NODE_RANK": "1",
    "AZ_BATCHAI_JOB_MASTER_NODE_IP": "10.0.0.4",
}


def test_one_process_on_each_node() -> None:
    assert detect_launch(NODE_1) == Launch("ray", 1, 2, 0, 1, 1, 2, "10.0.0.4", 6105)


def test_the_ranks_that_ray_train_gives_its_workers_win() -> None:
    worker = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "NODE_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    rendezvous = {"MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "41234"}
    expected = Launch("pytorch", 5, 8, 1, 4, 1, 2, "10.0.0.4", 41234)
    assert detect_launch(NODE_1 | worker | rendezvous) == expected


@pytest.mark.parametrize("lost", ["AZUREML_NODE_COUNT", "AZUREML_CR_NODE_RANK"])
def test_an_unknown_place_is_refused_by_name(lost: str) -> None:
    with pytest.raises(LaunchError, match=f"{lost} is not set"):
        detect_launch({name: value for name, value in NODE_1.items() if name != lost})
