"""Starts the other processes of a node if the platform started only one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, cast

from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from typing_extensions import override

from azureml_strategy.cluster.environ import copied
from azureml_strategy.cluster.environment import AzureMLEnvironment
from azureml_strategy.cluster.launchers import local
from azureml_strategy.command_line import as_typed, is_override
from azureml_strategy.lightning_internals import SubprocessScriptLauncher

_TIME = re.compile(r"\$\{now:[^{}]*\}")


class NodeLauncher(SubprocessScriptLauncher):
    """Lightning's script launcher, but each process gets its true rank, and a Hydra sweep stays one sweep.

    Stock Lightning passes the RANK that Azure ML gave to the node on to every process it starts, and torch and
    DeepSpeed read it there. It also starts the processes of a sweep with `--multirun`, so that each sweeps again.
    """

    @override
    def _call_children_scripts(self) -> None:
        self._check_can_spawn_children()
        os.environ.update(self._variables(local_rank=0))
        command, folder = _command()
        self.procs = [
            subprocess.Popen(command, env={**copied(os.environ), **self._variables(local_rank)}, cwd=folder)
            for local_rank in range(1, self.num_processes)
        ]

    def _variables(self, local_rank: int) -> dict[str, str]:
        environment: ClusterEnvironment = self.cluster_environment
        if isinstance(environment, AzureMLEnvironment) and environment.in_job:
            launch = environment.launch.with_local_processes(self.num_processes, local_rank)
            return local.variables(launch)
        return {
            "MASTER_ADDR": environment.main_address,
            "MASTER_PORT": str(environment.main_port),
            "NODE_RANK": str(environment.node_rank()),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": str(self.num_processes * self.num_nodes),
        }


def _command() -> tuple[Sequence[str], str | None]:
    """Return the command line of this process and the folder to start it in."""
    import __main__  # this process's script, which is known only at run time

    module = __main__.__spec__
    program = [sys.executable, os.path.abspath(sys.argv[0])] if module is None else [sys.executable, "-m", module.name]
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    if not HydraConfig.initialized():
        return [*program, *sys.argv[1:]], None
    config: Any = HydraConfig.get()
    if module is None:
        program[1] = os.path.join(config.runtime.cwd, sys.argv[0])
    options = [argument for argument in sys.argv[1:] if not is_override(argument)]
    # Pass the running job's own overrides: those of a sweep cover all its jobs. The output folder exists already.
    return [
        *program,
        *(option for option in options if option not in ("-m", "--multirun")),
        *_at_one_time(config.overrides.task),
        *_at_one_time(config.overrides.hydra),
        "hydra.mode=RUN",
        # A run outside a sweep lacks ${hydra:job.num} and ${hydra:job.id}.
        *(f"hydra.job.{key}={config.job[key]}" for key in ("num", "id") if not OmegaConf.is_missing(config.job, key)),
        f"hydra.run.dir='{config.runtime.output_dir}'",
        "hydra.output_subdir=null",
        f"hydra.job.name={config.job.name}",
    ], config.runtime.cwd


def _at_one_time(overrides: Sequence[str]) -> list[str]:
    """Return overrides as they were typed, but with this process's time for `${now:...}`, which differs per rank."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import OmegaConf

    times, job = OmegaConf.create(), cast(Any, HydraConfig.instance().cfg)
    OmegaConf.copy_cache(job, times)  # so that a time that the job has used before is the same

    def read(found: re.Match[str]) -> str:
        times.time = found[0]
        return str(times.time)

    found = [_TIME.sub(read, each) for each in as_typed(overrides)]
    OmegaConf.copy_cache(times, job)
    return found
