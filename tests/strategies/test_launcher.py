"""The command and the variables of the processes that a strategy starts; that they train is in tests/multiprocess."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

import pytest
from hydra import compose, initialize_config_module
from hydra.core.hydra_config import HydraConfig
from lightning.fabric.plugins.environments import LightningEnvironment
from omegaconf import OmegaConf
from tests.strategies.conftest import EnterJob

from azureml_strategy.cluster.environment import AzureMLEnvironment
from azureml_strategy.cluster.launchers import detect_launch
from azureml_strategy.strategies.launcher import NodeLauncher, _command
from azureml_strategy.training.resolvers import register_resolvers

SetProgram = Callable[..., None]


@pytest.fixture
def set_program(monkeypatch: pytest.MonkeyPatch) -> SetProgram:
    """Seem to be started as `python SCRIPT ...`, or as `python -m MODULE ...`."""

    def set_to(*arguments: str, module: object = None) -> None:
        monkeypatch.setattr(sys, "argv", list(arguments))
        monkeypatch.setattr(sys.modules["__main__"], "__spec__", module)

    return set_to


@pytest.fixture
def hydra_job() -> Iterator[Callable[..., None]]:
    """Seem to run inside a Hydra application, in one job of a sweep."""
    register_resolvers()

    def enter(*overrides: str) -> None:
        with initialize_config_module("azureml_strategy.recipes", version_base="1.3"):
            config = compose("resnet50_synthetic", list(overrides), return_hydra_config=True)
        OmegaConf.set_readonly(config, False)
        config.hydra.runtime.output_dir = "/out/my run/1"
        config.hydra.runtime.cwd = "/home/me"
        config.hydra.job.name = "app"
        HydraConfig.instance().set_config(config)

    yield enter
    HydraConfig.instance().cfg = None


@pytest.mark.parametrize(
    ("arguments", "module", "command"),
    [
        (["train.py", "--lr", "1", "a=b"], None, ["{cwd}/train.py", "--lr", "1", "a=b"]),
        (["/opt/train.py"], None, ["/opt/train.py"]),
        (["/opt/my/app.py", "-x"], os.__spec__, ["-m", "os", "-x"]),
    ],
)
def test_the_same_command_again(
    set_program: SetProgram, arguments: list[str], module: object, command: list[str]
) -> None:
    set_program(*arguments, module=module)
    expected = [sys.executable, *(part.format(cwd=os.getcwd()) for part in command)]
    assert _command() == (expected, None)


def test_a_job_of_a_sweep_is_run_once_more_and_not_the_sweep(
    set_program: SetProgram, hydra_job: Callable[..., None]
) -> None:
    hydra_job("seed=2", "data.batch_size=4", "hydra.mode=MULTIRUN", "hydra.job.chdir=true")
    set_program("bin/app", "train", "mine.yaml", "-m", "seed=1,2", "data.batch_size=4", "hydra.job.chdir=true")
    command, folder = _command()
    assert command[:4] == [sys.executable, "/home/me/bin/app", "train", "mine.yaml"]
    assert sorted(command[4:6]) == ["data.batch_size=4", "seed=2"]
    assert not {"-m", "seed=1,2"} & set(command)
    assert command.index("hydra.mode=RUN") > command.index("hydra.mode=MULTIRUN"), "the last one counts"
    assert "hydra.job.chdir=true" in command
    assert command[-3:] == ["hydra.run.dir='/out/my run/1'", "hydra.output_subdir=null", "hydra.job.name=app"]
    assert folder == "/home/me"


def test_a_time_and_the_number_of_the_job_are_the_same_on_all_ranks(
    set_program: SetProgram, hydra_job: Callable[..., None]
) -> None:
    hydra_job("+vars.at='${now:%S%f}'", "+vars.name='${seed}'", "hydra.job.num=3", "hydra.job.id=app_3")
    set_program("bin/app")
    command, _ = _command()
    assert command == _command()[0]
    assert "+vars.name='${seed}'" in command
    assert not [each for each in command if "now" in each]
    assert {"hydra.job.num=3", "hydra.job.id=app_3"} <= set(command[command.index("hydra.mode=RUN") :])


def test_in_a_job_each_process_gets_its_true_rank(enter_job: EnterJob, monkeypatch: pytest.MonkeyPatch) -> None:
    enter_job(2, 1)
    environment = AzureMLEnvironment()
    environment.start_processes(3)
    launcher = NodeLauncher(environment, 3, 2)
    for local_rank in range(3):
        launch = detect_launch({**os.environ, **launcher._variables(local_rank)})
        assert launch is not None
        assert (launch.rank, launch.world_size) == (3 + local_rank, 6)
        assert (launch.local_rank, launch.node_rank) == (local_rank, 1)
        assert (launch.launcher, launch.main_address, launch.main_port) == ("pytorch", "10.0.0.4", 6105)


def test_outside_a_job_they_are_lightnings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MASTER_ADDR": "10.1.1.1", "MASTER_PORT": "5000", "NODE_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert NodeLauncher(LightningEnvironment(), 2, 2)._variables(1) == {
        "MASTER_ADDR": "10.1.1.1",
        "MASTER_PORT": "5000",
        "NODE_RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
    }
