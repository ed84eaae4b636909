"""What is recorded of a run's configuration, in MLflow and in Hydra's files: what reproduces it, and no secret."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.resolvers import oc

from azureml_strategy.cluster.redaction import redact, remember_secrets

# Sections that say where things are, or what may differ between the attempts of a job.
_NO_HYPERPARAMETERS = ("output_dir", "resume", "global_batch", "tracking", "checkpoint", "job")


def hyperparameters(config: DictConfig) -> dict[str, Any]:
    """The configuration as hyperparameters: resolved, without what says only where things are.

    A value that comes from the environment stays as the configuration has it, `${oc.env:NAME}`: that reproduces the
    run, and a variable is where secrets are.

    Args:
        config: as it was composed; nothing in it needs to be resolved.
    """
    with _asked_environment() as asked:
        return {str(name): _recorded(config, name, asked) for name in config if str(name) not in _NO_HYPERPARAMETERS}


def keep_secrets(config: DictConfig) -> None:
    """Keep what has a secret's name in the configuration out of all that this process prints and writes from now on.

    Also out of the files in which Hydra has just written down the running job, where it has.

    Args:
        config: of the running job.

    Raises:
        OmegaConfBaseException: an interpolation cannot be resolved.
    """
    remember_secrets("", OmegaConf.to_container(config, resolve=True))
    job = HydraConfig.get()
    files = list((Path(job.runtime.output_dir) / job.output_subdir).glob("*.yaml")) if job.output_subdir else []
    if job.mode is RunMode.MULTIRUN:
        files += Path(job.sweep.dir).glob("multirun.yaml")
    for file in files:
        _hide_secrets_in(file)


def _hide_secrets_in(file: Path) -> None:
    given = yaml.safe_load(file.read_text(encoding="utf-8"))
    shown = redact("", given)
    if shown == given:
        return
    whole = file.with_name(f".{file.name}.{os.getpid()}")
    whole.write_text(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True), encoding="utf-8")
    whole.replace(file)  # at once, as the other jobs of a sweep read and write the same file


def _recorded(node: DictConfig | ListConfig, key: Any, asked: list[str]) -> Any:
    """The value of one key, resolved unless that asks for a variable."""
    if OmegaConf.is_missing(node, key):
        return "???"
    asked.clear()
    value = node[key]
    if asked:
        raw: Any = OmegaConf.to_container(node, resolve=False)
        return raw[key]
    if isinstance(value, DictConfig):
        return {str(name): _recorded(value, name, asked) for name in value}
    if isinstance(value, ListConfig):
        return [_recorded(value, index, asked) for index in range(len(value))]
    return value


@contextmanager
def _asked_environment() -> Iterator[list[str]]:
    """The variables that interpolations have asked for meanwhile."""
    asked: list[str] = []

    def ask(key: str, *default: Any) -> Any:
        asked.append(key)
        return oc.env(key, *default)

    OmegaConf.register_new_resolver("oc.env", ask, replace=True)
    try:
        yield asked
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
