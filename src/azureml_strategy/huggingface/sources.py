"""Where a pretrained model's files are: a folder, an id of the Hugging Face hub, or a model registered in Azure ML."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from azureml_strategy.files import name_within

_REGISTERED = "azureml:"
_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"
# What a training needs of a model on the hub: no weights in other formats, no pictures.
_WANTED = ("*.safetensors", "*.json", "*.model", "*.txt", "*.jinja")
SHOWN = 3
"""How many names an error message lists."""


class PretrainedModelError(MisconfigurationException, ValueError):
    """A pretrained model cannot be found, read or used as it was asked for. The message says what to change."""


@dataclass(frozen=True)
class Source:
    """Where a model's weights come from.

    Attributes:
        name: what the user typed: a folder, an id of the hub, or `azureml:NAME:VERSION`.
        revision: of the hub's repository; None for its main branch and for folders.
        folder: its files on this node.
    """

    name: str
    revision: str | None
    folder: Path

    def weight_files(self) -> list[Path]:
        """Return the files with the weights, in the order of their names.

        Raises:
            PretrainedModelError: there are none, or some that the index names are missing.
        """
        index = self.folder / _INDEX
        if not index.is_file():
            if not (self.folder / _WHOLE).is_file():
                others = sorted(file.name for file in self.folder.glob("*.bin"))[:SHOWN]
                found = f"it holds {', '.join(others)}" if others else "it holds no weights that are known here"
                raise PretrainedModelError(
                    f"{self.name} has no {_WHOLE}: {found}. Only safetensors can be read in parts. Convert it once, in "
                    "one process: AutoModel.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER), with the class that "
                    "you train."
                )
            return [self.folder / _WHOLE]
        try:
            named = set(json.loads(index.read_text())["weight_map"].values())
            files = sorted(name_within(self.folder, name) for name in named)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise PretrainedModelError(
                f"{self.name} has a damaged {_INDEX}: {error!r:.200}. Copy or download the model again."
            ) from error
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise PretrainedModelError(
                f"{self.name} is incomplete: {_INDEX} names {', '.join(missing[:SHOWN])}, which is not in "
                f"{self.folder}. Copy or download the model again."
            )
        return files


def find_source(name: str | os.PathLike[str], revision: str | None = None) -> Source:
    """Find a model's files, and download them to this node if they are elsewhere.

    The processes of a node share one download: the first one locks the hub's cache, or the folder of a registered
    model, and the others wait for it.

    Args:
        name: a folder, an id of the hub such as `Qwen/Qwen3-8B`, or `azureml:NAME:VERSION`.
        revision: branch, tag or commit of the hub's repository.

    Raises:
        PretrainedModelError: there is no such model, or it cannot be downloaded.
    """
    text = os.fspath(name)
    folder = Path(text).expanduser()
    if text.startswith(_REGISTERED):
        return Source(text, None, _download_registered(text))
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            found = ", ".join(sorted(file.name for file in folder.iterdir())[:SHOWN]) or "nothing"
            raise PretrainedModelError(
                f"{folder} is no model of transformers: it holds {found}, but no config.json. Name the folder that "
                "save_pretrained() wrote."
            )
        return Source(text, revision, folder)
    if text.count("/") > 1 or text.startswith((".", "~", "/")):
        raise PretrainedModelError(f"There is no folder {folder}. Name one that save_pretrained() wrote, or a hub id.")
    return Source(text, revision, _download_from_hub(text, revision))


def _download_from_hub(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    cause: Exception
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_WANTED)))
    except GatedRepoError as error:
        cause = error
        remedy = (
            f"Ask for access on https://huggingface.co/{name}, and give the job your token as the variable HF_TOKEN"
        )
    except (RepositoryNotFoundError, HFValidationError) as error:
        cause = error
        remedy = "Check how it is spelt. A private model needs your token as the variable HF_TOKEN"
    except (LocalEntryNotFoundError, OSError) as error:
        cause = error
        remedy = (
            "The hub could not be reached, and the cache of this node does not have the model (a gated one also needs "
            "the variable HF_TOKEN). Give a folder instead, such as an input of the job"
        )
    raise PretrainedModelError(
        f"{name} is no folder here, and the Hugging Face hub gave no such model. {remedy}."
    ) from cause


def _download_registered(text: str) -> Path:
    """Download a registered model once a node, by MLflow, which uses the job's identity."""
    name, _, version = text.removeprefix(_REGISTERED).rpartition(":")
    if not name or not version:
        raise PretrainedModelError(f"{text!r} names no version of a model. Write azureml:NAME:VERSION.")
    from filelock import FileLock
    from huggingface_hub.constants import HF_HOME
    from mlflow import artifacts

    folder = Path(HF_HOME) / "azureml" / name / version
    done = folder / ".complete"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not done.exists():
            try:
                artifacts.download_artifacts(f"models:/{name}/{version}", dst_path=str(folder))
            except Exception as error:  # MLflow's stores raise errors of many kinds
                raise PretrainedModelError(
                    f"{text} could not be downloaded from the workspace's registry: {error}. Check name and version, "
                    "and that the job's identity may read the workspace."
                ) from error
            done.touch()
    configs = sorted(folder.rglob("config.json"), key=lambda file: len(file.parts))
    if not configs:
        raise PretrainedModelError(f"{text} holds no config.json, so it is no model of transformers.")
    return configs[0].parent
