"""PyTorch Lightning on Azure Machine Learning: one script, from a laptop to a cluster.

Importing this package registers the strategy names (`Trainer(strategy="azureml_ddp")`), whether Lightning is
imported before or after it. The package itself imports neither torch nor Lightning.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from azureml_strategy.lazy import lazy_attributes
from azureml_strategy.plugin import register_when_lightning_is_imported

if TYPE_CHECKING:
    from azureml_strategy.cluster import (
        AzureMLEnvironment,
        Job,
        Launch,
        LaunchError,
        detect_launch,
        learn_launch,
        read_job,
    )
    from azureml_strategy.strategies import (
        AzureMLDDPStrategy,
        AzureMLDeepSpeedStrategy,
        AzureMLModelParallelStrategy,
        PipelineStrategy,
    )

    __version__: str

__all__ = [
    "AzureMLDDPStrategy",
    "AzureMLDeepSpeedStrategy",
    "AzureMLEnvironment",
    "AzureMLModelParallelStrategy",
    "Job",
    "Launch",
    "LaunchError",
    "PipelineStrategy",
    "detect_launch",
    "learn_launch",
    "read_job",
]

_public_name = lazy_attributes(
    __name__,
    {
        name: "azureml_strategy.strategies" if name.endswith("Strategy") else "azureml_strategy.cluster"
        for name in __all__
    },
)


def __getattr__(name: str) -> Any:
    if name == "__version__":  # of the installation: pyproject.toml alone says it; importlib.metadata takes 40 ms
        from importlib.metadata import version

        return version("azureml-strategy")
    return _public_name(name)


register_when_lightning_is_imported()
