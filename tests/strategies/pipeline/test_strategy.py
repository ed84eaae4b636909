"""Arguments of the strategy, and its names. What it does is in tests/multiprocess/test_pipeline.py."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch import Trainer

import azureml_strategy  # noqa: F401 - registers the names
from azureml_strategy.strategies import PipelineStrategy
from azureml_strategy.strategies.pipeline import PipelineError


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_stages": 0}, "num_stages=0 is out of range: it must be 1 or more"),
        ({"micro_batches": 0}, "micro_batches=0"),
        ({"activation_checkpointing": -1}, "activation_checkpointing=-1"),
        ({"zero_stage": 2}, "zero_stage=2 is out of range: it must be 0 or 1"),
        ({"partition": "profile"}, "'profile' is unknown"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(PipelineError, match=words):
        PipelineStrategy(**arguments)


def test_the_name_makes_one() -> None:
    trainer = Trainer(
        strategy="azureml_deepspeed_pipeline", accelerator="cpu", logger=False, enable_checkpointing=False
    )
    assert isinstance(trainer.strategy, PipelineStrategy)
    assert (trainer.strategy.num_stages, trainer.strategy.micro_batches) == (2, 4)


@pytest.mark.parametrize("world", [2, 4, 6, 8])
def test_stages_of_one_replica_read_the_same_samples_and_replicas_different_ones(world: int) -> None:
    shares = []
    for rank in range(world):
        environment = LightningEnvironment()
        environment.set_world_size(world)
        environment.set_global_rank(rank)
        shares.append(PipelineStrategy(num_stages=2, cluster_environment=environment).distributed_sampler_kwargs)
    replicas = world // 2
    assert shares == [{"num_replicas": replicas, "rank": rank % replicas} for rank in range(world)]
