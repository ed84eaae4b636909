"""Which versions are installed, without importing any of it."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version

# What is shown, and the distributions that have it.
_DISTRIBUTIONS: Mapping[str, tuple[str, ...]] = {
    "azureml-strategy": ("azureml-strategy",),
    "torch": ("torch",),
    "cuda": ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"),
    "nccl": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
    "lightning": ("lightning",),
    "deepspeed": ("deepspeed",),
    "mlflow": ("mlflow",),
    "azureml-mlflow": ("azureml-mlflow",),
}


def installed_versions() -> dict[str, str | None]:
    """Version of Python and of each package; None where it is not installed.

    CUDA and NCCL are those that pip installed beside torch; a build that has them inside, as conda's, shows none.
    """
    found = {name: _first(distributions) for name, distributions in _DISTRIBUTIONS.items()}
    return {"python": platform.python_version(), **found}


def _first(distributions: tuple[str, ...]) -> str | None:
    return next(filter(None, map(_version, distributions)), None)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
