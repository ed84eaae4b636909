"""Trains one run from its configuration, and records the configuration."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, ProgressBar
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from omegaconf.resolvers import oc
from typing_extensions import override

from azureml_strategy.checkpoint import JobCheckpoint
from azureml_strategy.checkpoint.automatic import RestartNotice
from azureml_strategy.checkpoint.elastic import ElasticRestart
from azureml_strategy.checkpoint.module_record import remember_config
from azureml_strategy.checkpoint.resume import ANY, AUTO, checkpoint_to_resume, children_resume_from, forget_choice
from azureml_strategy.cluster import Launch, learn_launch, read_job
from azureml_strategy.cluster.environ import TERMINATION_SWITCH, copied, switched_off
from azureml_strategy.cluster.launch import PartialLaunch
from azureml_strategy.cluster.redaction import redact, remember_secrets
from azureml_strategy.command_line import as_typed
from azureml_strategy.files import write_atomically
from azureml_strategy.preemption.termination import TerminateTogether
from azureml_strategy.strategies.process_group import end_process_group, note_failure, own_process_group
from azureml_strategy.tracking import JobMLFlowLogger, JobWandbLogger
from azureml_strategy.tracking.job_tracking import JobThroughput, JobTracking
from azureml_strategy.tracking.report import RunReport
from azureml_strategy.tracking.source import (
    COMMAND_TAG,
    OVERRIDES_TAG,
    RECIPE_TAG,
    command_text,
    git_tags,
    recipe_run_name,
    script_command,
    script_run_name,
)
from azureml_strategy.tracking.values import as_texts
from azureml_strategy.training.checks import check_config
from azureml_strategy.training.recipes import RecipeError
from azureml_strategy.training.targets import drop_keys_of_old_targets, loggers_and_callbacks, make, written_keys
from azureml_strategy.training.unread_keys import warn_of_unread_keys

log = logging.getLogger(__name__)

ARTIFACT = "config.yaml"

# Sections that say where things are, or that may differ between the attempts of a job.
_NO_HYPERPARAMETERS = ("output_dir", "resume", "global_batch", "tracking", "checkpoint", "profile", "head_space", "job")
# How long the processes that we started may take to end after this one failed. They may wait in a collective for it.
_GRACE_SECONDS = 5.0


def page_name() -> str:
    """A run's name: the recipe and its overrides, or the script's name where Hydra runs no application."""
    if not HydraConfig.initialized():
        return script_run_name()
    hydra = HydraConfig.get()
    return recipe_run_name(str(hydra.job.config_name), as_typed(hydra.overrides.task))


def page_tags(command: str | None) -> dict[str, str]:
    """Tags of the run: recipe, overrides, command line and git commit. It asks git, so call it on one rank.

    `command` repeats the run; None is that of this process.
    """
    if not HydraConfig.initialized():
        return {}
    hydra = HydraConfig.get()
    # The folder of the recipe, if it is the user's and in a checkout, else the working folder.
    own = [
        Path(each.path)
        for each in hydra.runtime.config_sources
        if each.schema == "file" and each.provider in ("main", "command-line")
    ]
    return {
        RECIPE_TAG: str(hydra.job.config_name),
        OVERRIDES_TAG: command_text(as_typed(hydra.overrides.task)),
        COMMAND_TAG: command or script_command(),
        **next(filter(None, map(git_tags, [*own, Path(hydra.runtime.cwd)])), {}),
    }


def config_text(recorded: dict[str, Any]) -> str:
    """A configuration as YAML, without secrets."""
    return str(OmegaConf.to_yaml(OmegaConf.create(redact("", recorded), flags={"allow_objects": True})))


def hyperparameters(config: DictConfig) -> dict[str, Any]:
    """The configuration as hyperparameters: resolved, without the sections in `_NO_HYPERPARAMETERS`.

    A value from the environment stays as written in the configuration, `${oc.env:NAME}`. This form reproduces the run,
    and environment variables often hold secrets.
    """
    return _resolved(config, [str(name) for name in config if str(name) not in _NO_HYPERPARAMETERS])


def keep_secrets(config: DictConfig) -> None:
    """Remove the secrets in the running job's configuration from all that this process prints and writes from now on.

    A secret is a value whose key has a secret's name. If Hydra has written the configuration to files, the secrets are
    removed there too.

    Raises:
        OmegaConfBaseException: an interpolation cannot be resolved.
    """
    remember_secrets("", OmegaConf.to_container(config, resolve=True))
    job = HydraConfig.get()
    files = list((Path(job.runtime.output_dir) / job.output_subdir).glob("*.yaml")) if job.output_subdir else []
    if job.mode is RunMode.MULTIRUN:
        files += Path(job.sweep.dir).glob("multirun.yaml")
    for file in files:
        original = yaml.safe_load(file.read_text(encoding="utf-8"))
        redacted = redact("", original)
        if redacted != original:
            # The other jobs of a sweep read and write the same file.
            write_atomically(file, yaml.safe_dump(redacted, sort_keys=False, allow_unicode=True).encode())


def _resolved(config: DictConfig, names: list[str]) -> dict[str, Any]:
    variables: list[str] = []

    def noting_env(key: str, *default: Any) -> Any:
        variables.append(key)
        return oc.env(key, *default)

    OmegaConf.register_new_resolver("oc.env", noting_env, replace=True)
    try:
        return {name: _recorded(config, name, variables) for name in names}
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)


def _recorded(node: DictConfig | ListConfig, key: Any, variables: list[str]) -> Any:
    """Return the value of one key: resolved, unless that reads an environment variable.

    The resolver `oc.env` appends to `variables` the names of those that it reads.
    """
    if OmegaConf.is_missing(node, key):
        return "???"
    variables.clear()
    value = node[key]
    if variables:
        raw: Any = OmegaConf.to_container(node, resolve=False)
        return raw[key]
    if isinstance(value, DictConfig):
        return {str(name): _recorded(value, name, variables) for name in value}
    if isinstance(value, ListConfig):
        return [_recorded(value, index, variables) for index in range(len(value))]
    return value


def train(config: DictConfig, command: str | None = None) -> dict[str, float]:
    """Train the model of a configuration on its data.

    Args:
        config: a composed recipe: `model`, `data`, `strategy`, `trainer`, `tracking`, `checkpoint`, `callbacks`,
            `profile`, `head_space`, `seed`, `matmul_precision`, `output_dir`, `resume`, `global_batch`.
        command: the command line that repeats this run, for its record; by default that of this process.

    Returns:
        The metrics of the last epoch by name, on every rank.

    Raises:
        RecipeError: a key that nothing reads, or something that cannot be made.
        LaunchError: the Trainer contradicts the job.
        ResumeError: the checkpoint that `resume` names cannot be resumed from, or its global batch size cannot be kept.
    """
    drop_keys_of_old_targets(config)
    check_config(config)
    warn_of_unread_keys(config)
    launch = learn_launch()
    _announce(config.output_dir, launch)
    seed_everything(config.seed, workers=True, verbose=False)
    torch.set_float32_matmul_precision(config.matmul_precision)
    model: LightningModule = make("model", config.model)
    remember_config(model, redact("", _resolved(config, ["model"]))["model"])
    data = make("data", config.data)
    chosen = checkpoint_to_resume(config.resume, Path(config.output_dir))
    trainer = _trainer(config, chosen, launch)
    _begin_record(trainer, config, command)
    job = read_job()
    # A previous attempt may have logged steps that this one repeats, even if it left no checkpoint.
    repeats = chosen is not None or (config.resume in (AUTO, ANY) and job is not None and job.attempt > 0)
    for logger in trainer.loggers:
        if isinstance(logger, JobMLFlowLogger) and repeats:
            logger.continue_run()
    failed = True
    with _own_processes(trainer), children_resume_from(chosen):
        try:
            trainer.fit(model, datamodule=data, ckpt_path=chosen)
            failed = False
        except BaseException:
            _log_checkpoint_folder(trainer)
            raise
        finally:
            for logger in trainer.loggers:
                if isinstance(logger, JobWandbLogger):  # its run would stay open for the next run of a sweep
                    logger.close(failed)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _begin_record(trainer: Trainer, config: DictConfig, command: str | None) -> None:
    """Record what is run, in every logger."""
    name, tags = page_name(), page_tags(command) if trainer.is_global_zero else {}
    params = redact("", hyperparameters(config))
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, RunReport):
            callback.keys = frozenset(name.replace("/", ".") for name in as_texts(params))
    for logger in trainer.loggers:
        if isinstance(logger, (JobMLFlowLogger, JobWandbLogger)):
            logger.suggest(name, tags)
        if isinstance(logger, JobMLFlowLogger):
            logger.log_text(config_text(_all_sections(config)), ARTIFACT)
        logger.log_hyperparams(params)


def _all_sections(config: DictConfig) -> dict[str, Any]:
    """Return all sections as `hyperparameters` does. One that cannot be resolved is returned as written."""
    whole: dict[str, Any] = {}
    for name in map(str, config):
        try:
            whole |= _resolved(config, [name])
        except OmegaConfBaseException:
            raw: Any = OmegaConf.to_container(config, resolve=False)
            whole[name] = raw[name]
    return whole


def _trainer(config: DictConfig, chosen: Path | None, launch: Launch | None) -> Trainer:
    loggers, callbacks = loggers_and_callbacks(config)
    _tell_defaults(config, callbacks)
    arguments, strategy = make("trainer", config.trainer, _convert_="all"), make("strategy", config.strategy)
    try:
        trainer = Trainer(
            **arguments,
            strategy=strategy,
            logger=loggers or False,
            callbacks=[
                _ForgetMessageToChildren(),
                _LogCheckpointFolder(),
                *callbacks,
                *_termination(launch),
                ElasticRestart(chosen, config.global_batch),
            ],
            enable_checkpointing=any(isinstance(each, Checkpoint) for each in callbacks),
            enable_progress_bar=any(isinstance(each, ProgressBar) for each in callbacks),
            default_root_dir=config.output_dir,
        )
    except (ValueError, TypeError, MisconfigurationException) as error:
        if "HYDRA_FULL_ERROR" in os.environ:
            raise
        raise RecipeError(f"Lightning's Trainer refuses what `trainer` says: {error}") from error
    # These are added to every Trainer of a job. A recipe says itself what is recorded, and where, and resumes.
    added = (JobTracking, JobThroughput, RestartNotice)
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    trainer.callbacks = [each for each in callbacks if not isinstance(each, added)]  # type: ignore[attr-defined]
    return trainer


def _tell_defaults(config: DictConfig, callbacks: list[Callback]) -> None:
    """Tell a JobCheckpoint whether its monitor is one of our recipes', which the user's model need not log."""
    written, monitor = written_keys(), OmegaConf.select(config, "checkpoint.monitor", throw_on_missing=False)
    for each in callbacks:
        if isinstance(each, JobCheckpoint) and each.monitor == monitor:
            each.monitor_is_default = written is None or "checkpoint.monitor" not in written.own


def _termination(launch: Launch | None) -> list[Callback]:
    """Return the callback that also stops a run on Ctrl-C, unless this is a distributed job.

    Every Trainer of a distributed job has such a callback by itself.
    """
    if launch is not None or switched_off(os.environ, TERMINATION_SWITCH):
        return []
    return [TerminateTogether(None if read_job() else "off", ctrl_c=True)]


def _announce(folder: str, launch: Launch | None) -> None:
    if launch is not None and launch.rank == 0:
        log.info(
            "Azure ML job: launcher %s, %d node(s) x %d process(es), rendezvous at %s:%d",
            launch.launcher,
            launch.num_nodes,
            launch.local_world_size,
            launch.main_address,
            launch.main_port,
        )
    if speaks_for_all(launch):
        log.info("Output folder: %s", Path(folder).absolute())


def speaks_for_all(launch: Launch | PartialLaunch | None) -> bool:
    """Whether this process is rank 0, for use before there is a Trainer. `launch` is None outside a distributed job."""
    return launch.rank == 0 if launch is not None else os.environ.get("LOCAL_RANK", "0") == "0"


class _ForgetMessageToChildren(Callback):
    """Removes the message to the processes that the strategy starts, once they have read it."""

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        forget_choice()


class _LogCheckpointFolder(Callback):
    """Logs where the checkpoints are when the training has ended, before the line that names the run's page."""

    @override
    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        _log_checkpoint_folder(trainer)


def _log_checkpoint_folder(trainer: Trainer) -> None:
    saver = trainer.checkpoint_callback
    if isinstance(saver, ModelCheckpoint) and saver.last_model_path and trainer.is_global_zero:
        log.info("Checkpoints: %s", Path(str(saver.dirpath)).absolute())


@contextmanager
def _own_processes(trainer: Trainer) -> Iterator[None]:
    """End the processes that the strategy started when the run ends, and undo their environment.

    Otherwise the next run of a sweep would take their variables for those of running processes. Ranks that the platform
    started stay, and keep their process group for the next run.
    """
    environ = copied(os.environ)
    failed = True
    try:
        yield
        failed = False
    finally:
        processes = getattr(trainer.strategy.launcher, "procs", None)
        if processes:
            if failed:
                _end(processes)
            if dist.is_initialized():
                own_process_group()  # so that it ends, whichever strategy has made it
                note_failure(failed)
                end_process_group()
            for name in os.environ.keys() - environ.keys():  # not all at once: other threads read the rest meanwhile
                del os.environ[name]
            os.environ.update(environ)


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End the processes that this failed process has started.

    Lightning's observer of the same list kills this process as soon as one of them fails, so clear the list first.
    """
    ending = list(processes)
    processes.clear()
    for process in ending:
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
