"""Registers the weights of a trained model, merged into one file, as a model of the workspace."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from azureml_strategy.checkpoint.folder import by_score, newest_first
from azureml_strategy.checkpoint.manifest import Manifest, manifest_path
from azureml_strategy.jobs.client import quiet_sdk
from azureml_strategy.jobs.deploy import CLASS_TAG
from azureml_strategy.jobs.inputs import OutputFiles
from azureml_strategy.jobs.listing import show_job
from azureml_strategy.jobs.service_errors import JobError, service_errors
from azureml_strategy.serving import WEIGHTS

if TYPE_CHECKING:
    from azure.ai.ml import MLClient
    from azure.ai.ml.entities import Model

_CHECKPOINT = re.compile(r"(?:.*/)?[^/]+\.ckpt(?=/|$)")  # Lightning writes a file or a folder of such a name
_LAST = re.compile(r"last(-v\d+)?\.ckpt")  # what ModelCheckpoint(save_last=True) writes


@contextmanager
def job_checkpoint(
    client: MLClient, job: str, output: str, checkpoint: str | None
) -> Iterator[tuple[Path, dict[str, str]]]:
    """Fetch a checkpoint of a finished job into a temporary folder.

    Args:
        client: client of the workspace.
        job: name of the job.
        output: name of the job's output that holds the checkpoints.
        checkpoint: path of the checkpoint in that output. None lets `choose_checkpoint` choose.

    Yields:
        The checkpoint, and the tags of the model that is made of it.

    Raises:
        JobError: the job is not over, has no such checkpoint, or the checkpoint is damaged.
        ServiceError: storage cannot be read.
    """
    found = show_job(client, job)
    if not found.final:
        raise JobError(
            f"{job} is {found.status}. A model is registered when its job is over: its weights still change."
        )
    files = OutputFiles(client, job, output)
    stored = _read_manifests(files)
    chosen = choose_checkpoint(files.names, checkpoint, stored)
    with TemporaryDirectory() as folder:
        local = files.fetch(chosen, Path(folder))
        fault = stored[chosen].fault(local.parent) if chosen in stored else None
        if fault is not None:
            raise JobError(
                f"{chosen} of {job} is damaged: {fault}. {_list_checkpoints([*stored])} Type --checkpoint PATH."
            )
        yield local, {**found.tags, "job": job, "checkpoint": chosen, "status": found.status}


def register_checkpoint(
    client: MLClient,
    name: str,
    checkpoint: Path,
    *,
    version: str | None = None,
    tags: dict[str, str] | None = None,
    trust_pickles: bool = False,
    overrides: Mapping[str, Any] | None = None,
) -> Model:
    """Register the weights of a checkpoint on this machine, written by any strategy, without the optimizer states.

    Args:
        client, name, tags: the workspace, the model's name there and its tags.
        checkpoint: file or folder that the Trainer wrote.
        version: version of the model. None takes the next number.
        trust_pickles: whether to run the code that the checkpoint's files ask for.
        overrides: what the caller knows of the module, as `module_overrides` makes it.

    Returns:
        The model: a folder with `weights.ckpt`, which `LightningModule.load_from_checkpoint` reads.

    Raises:
        JobError: the path is not a checkpoint.
        ServiceError: the user has no permission, or the version already exists.
    """
    quiet_sdk()
    from azure.ai.ml.entities import Model

    from azureml_strategy.checkpoint.consolidate import consolidate
    from azureml_strategy.checkpoint.formats import CheckpointFormatError
    from azureml_strategy.checkpoint.module_record import recorded_class

    with TemporaryDirectory() as folder:
        content = Path(folder) / name
        try:
            weights = consolidate(checkpoint, content / WEIGHTS, trust_pickles=trust_pickles, overrides=overrides)
            own_class = recorded_class(content / WEIGHTS)
        except CheckpointFormatError as error:
            raise JobError(str(error)) from error
        numbers = sum(weight.numel() for weight in weights.values())
        model = Model(
            name=name,
            version=version,
            path=str(content),
            type="custom_model",
            description=f"{len(weights)} tensors, {numbers:,} numbers",
            tags={**(tags or {}), CLASS_TAG: own_class} if own_class else tags,
        )
        with service_errors():
            made: Model = client.models.create_or_update(model)
        return made


def choose_checkpoint(names: list[str], asked: str | None, stored: Mapping[str, Manifest]) -> str:
    """Choose one checkpoint of an output.

    Args:
        names: every file of the output.
        asked: path of a checkpoint in the output. With None, the manifests decide: the best checkpoint is taken, or
            the newest one if none has a score. Without any manifest, the only checkpoint beside `last.ckpt` is taken,
            or `last.ckpt` if there is no other.
        stored: the manifests of `JobCheckpoint`, by the path of their checkpoint.

    Raises:
        JobError: the output has no checkpoint, not the one asked for, or several to choose from.
    """
    found = sorted({match[0] for name in names if (match := _CHECKPOINT.match(name))})
    if asked is not None:
        path = asked.strip("/")
        if path in names or any(name.startswith(path + "/") for name in names):
            return path
        raise JobError(f"The output has no {asked}. {_list_checkpoints(found)}")
    if stored:
        ranked = newest_first(stored.values())
        best = (by_score(ranked, ranked[0].mode) or ranked)[0]
        return next(path for path, manifest in stored.items() if manifest is best)
    not_last = [path for path in found if not _LAST.fullmatch(PurePosixPath(path).name)]
    if not found or len(not_last) > 1:
        raise JobError(f"Which checkpoint is meant? {_list_checkpoints(found)} Type --checkpoint PATH.")
    return (not_last or found)[-1]


def _read_manifests(files: OutputFiles) -> dict[str, Manifest]:
    """Read the output's manifests, by the path of their checkpoint.

    Unreadable ones are left out: a checkpoint of `JobCheckpoint` without a manifest is half-written.
    """
    paths = {match[0] for name in files.names if (match := _CHECKPOINT.match(name))}
    found: dict[str, Manifest] = {}
    with TemporaryDirectory() as folder:
        for path in sorted(paths):
            manifest = manifest_path(PurePosixPath(path))
            if str(manifest) in files.names:
                with suppress(ValueError):
                    found[path] = Manifest.read(files.fetch(str(manifest), Path(folder)))
    return found


def _list_checkpoints(found: list[str]) -> str:
    return f"Its checkpoints: {', '.join(found)}." if found else "There is no checkpoint (*.ckpt) in it."
