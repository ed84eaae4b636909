"""The public names of each room, from their docstrings."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType

# In the order in which a reader needs them. `cli` is not among them: its reference is that of the commands. Beside each
# are types that its public names take or give back, and that nobody imports.
MODULES: dict[str, tuple[str, ...]] = {
    "azureml_strategy": (),
    "azureml_strategy.strategies": (),
    "azureml_strategy.strategies.local_sgd": (),
    "azureml_strategy.gradients": (),
    "azureml_strategy.checkpoint": ("azureml_strategy.interfaces.WriteStaged",),
    "azureml_strategy.tracking": (
        "azureml_strategy.tracking.events.Event",
        "azureml_strategy.tracking.timing.stragglers.Slowest",
        "azureml_strategy.tracking.timing.goodput.WallClock",
    ),
    "azureml_strategy.cluster": (),
    "azureml_strategy.network": (
        "azureml_strategy.network.sysfs.GPUs",
        "azureml_strategy.network.sysfs.Interface",
        "azureml_strategy.network.nccl_log.failures.LogError",
    ),
    "azureml_strategy.huggingface": (),
    "azureml_strategy.data": ("azureml_strategy.data.decoding.Crop", "azureml_strategy.data.shard_index.ShardIndex"),
    "azureml_strategy.models": (
        "azureml_strategy.models.label_means.MeanOverLabels",
        "azureml_strategy.sequence_parallel.SequenceGroup",
    ),
    "azureml_strategy.preemption": (),
    "azureml_strategy.hang_detection": (),
    "azureml_strategy.profiling": (),
    "azureml_strategy.reporting": (),
    "azureml_strategy.training": (),
    "azureml_strategy.emulator": ("azureml_strategy.cluster.emulated.EmulatedRun",),
    "azureml_strategy.bench": (),
    "azureml_strategy.jobs": (
        "azureml_strategy.jobs.hyperparameters.Parameter",
        "azureml_strategy.jobs.submit.Submission",
    ),
    "azureml_strategy.study": (),
}


def markdown() -> str:
    """A section for each module, with autodoc's directives for each of its public names.

    Raises:
        ValueError: a public name has no docstring.
    """
    return "\n".join(_section(importlib.import_module(name), linked) for name, linked in MODULES.items())


def _section(module: ModuleType, linked: tuple[str, ...]) -> str:
    names = [each for each in module.__all__ if _at_home(module, each)]
    elsewhere = [each for each in module.__all__ if each not in names]
    parts = [f"## {module.__name__}", (module.__doc__ or "").split("\n\n")[0].replace("\n", " ")]
    if elsewhere:
        parts.append("It gives on, from the modules below: " + ", ".join(f"`{each}`" for each in elsewhere) + ".")
    parts += [_directive(f"{module.__name__}.{each}", getattr(module, each)) for each in names]
    parts += [_directive(each, _named(each)) for each in linked]
    return "\n\n".join(parts) + "\n"


def _at_home(module: ModuleType, name: str) -> bool:
    """Whether no other module has the name. Of two that do, it is the inner one; never the package itself."""
    others = [each for each in MODULES if each not in (module.__name__, "azureml_strategy")]
    having = [each for each in others if name in importlib.import_module(each).__all__]
    return not having or (module.__name__ != "azureml_strategy" and all(each > module.__name__ for each in having))


def _named(path: str) -> object:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def _directive(path: str, value: object) -> str:
    if not inspect.getdoc(value):
        raise ValueError(f"{path} is public and has no docstring.")
    if not inspect.isclass(value):
        return f"```{{eval-rst}}\n.. autofunction:: {path}\n```"
    kind = "autoexception" if issubclass(value, Exception) else "autoclass"
    return f"```{{eval-rst}}\n.. {kind}:: {path}\n   :members:\n   :show-inheritance:\n```"
