"""The result of a search: as a table, as a file that a later run reads, and whether that file fits the run."""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from azureml_strategy.files import write_atomically
from azureml_strategy.strategies.errors import ConfigurationError
from azureml_strategy.strategies.tuning.search import Request, Settings, Trials

_FORMAT = 1
FILE = "tuned_ddp.json"
"""Name of the file in the run's folder."""


@dataclass(frozen=True)
class Conditions:
    """What settings are tuned for. With other conditions they may be slower than the default.

    Attributes:
        model: the module's class, and a checksum of the shapes of its trainable parameters.
        devices: how many of which; None in a file of an older version.
        precision: as in `Trainer(precision=...)`; None in a file of an older version.
        batch: types and shapes of the tensors in rank 0's first batch; None in a file of an older version, before the
            first batch, and for a batch of an unknown kind.
    """

    model: str
    world_size: int
    num_nodes: int
    backend: str
    torch: str
    devices: str | None = None
    precision: str | None = None
    batch: str | None = None

    @staticmethod
    def of(
        module: nn.Module,
        world_size: int,
        num_nodes: int,
        backend: str,
        devices: Sequence[str] | None = None,
        precision: str | None = None,
    ) -> Conditions:
        """Return the conditions of a module before its first batch; `devices` has the name of each rank's device."""
        shapes = [
            [name, list(each.shape), str(each.dtype)] for name, each in module.named_parameters() if each.requires_grad
        ]
        checksum = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:16]
        kinds = sorted(Counter(devices or ()).items())
        counted = ", ".join(f"{number} x {name}" for name, number in kinds) or None
        version = str(torch.__version__)
        model = f"{type(module).__name__} {checksum}"
        return Conditions(model, world_size, num_nodes, backend, version, counted, precision)

    def differences(self, here: Conditions) -> list[str]:
        """Describe the conditions that differ, leaving out those that are None in one of both."""
        present = asdict(here)
        return [
            f"{name} {value}, and here {present[name]}"
            for name, value in asdict(self).items()
            if None not in (value, present[name]) and value != present[name]
        ]


def device_name(device: torch.device) -> str:
    """Return a name that says how fast a device is: that of a GPU, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def describe_batch(arguments: Any) -> str | None:
    """Return types and shapes of the tensors in a batch; None if none is found, as in an object of an unknown kind.

    Collections and dataclasses are searched, nested in any way.
    """
    found: list[str] = []

    def describe(tensor: Tensor) -> Tensor:
        found.append(f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}")
        return tensor

    apply_to_collection(arguments, Tensor, describe, allow_frozen=True)
    return ", ".join(found) or None


def samples_of(batch: str | None) -> str | None:
    """Leave only the first size of each tensor in what `describe_batch` returned: sequences differ in length."""
    return None if batch is None else re.sub(r"\[(\d+)[^]]*\]", r"[\1]", batch)


@dataclass(frozen=True)
class Tuning:
    """The result of a search.

    Attributes:
        conditions: under which it was measured.
        request: what was asked for.
        pick: the settings to use.
        why: why these, in words.
        rows: the settings that were tried, the fastest first; seconds of a step as median and quartiles.
        alone_s: seconds of a step of each rank without communication.
        pairs: seconds of a step by default and with the pick, side by side.
        steps: passes through the model that the search took, warm-ups included.
        measured: the time, in UTC.
    """

    conditions: Conditions
    request: Request
    pick: Settings
    why: str
    rows: tuple[dict[str, Any], ...]
    alone_s: tuple[float, ...]
    pairs: tuple[tuple[float, float], ...]
    steps: int
    measured: str

    @property
    def speedup(self) -> float:
        """How many times as fast as the default the pick is; 1 if it is the default."""
        if self.pick == self.request.default:
            return 1.0
        return statistics.median(default / picked for default, picked in self.pairs)

    def to_text(self) -> str:
        """Return the content of the file."""
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=2) + "\n"

    def metrics(self) -> dict[str, float]:
        """Return the metrics for a logger."""
        seconds = {row["settings"]: row["median_s"] for row in self.rows}
        found = {"tune/steps": float(self.steps), "tune/speedup": self.speedup}
        for name, settings in (("default", self.request.default), ("pick", self.pick)):
            if settings.words() in seconds:
                found[f"tune/{name}_step_s"] = seconds[settings.words()]
        if self.alone_s:
            found["tune/compute_step_s"] = max(self.alone_s)
        return found

    def report(self) -> str:
        """Return a table for the console."""
        width = max([len(row["settings"]) for row in self.rows] + [8])
        lines = [f"Communication settings of DDP ({self.conditions.world_size} ranks, {self.steps} passes):"]
        if self.rows:
            lines.append(f"  {'settings':{width}}  {'step, ms: median (quartiles)':30}  cost in accuracy")
        for row in self.rows:
            spread = f"{1e3 * row['median_s']:,.1f} ({1e3 * row['low_s']:,.1f} to {1e3 * row['high_s']:,.1f})"
            lines.append(f"  {row['settings']:{width}}  {spread:30}  {row['accuracy_cost']}")
        if self.alone_s:
            lines.append(f"  {'without communication':{width}}  {1e3 * max(self.alone_s):,.1f}")
        kept = self.pick == self.request.default
        lines.append(f"{'Kept' if kept else 'Picked'}: {self.pick.words()}; {self.why}.")
        return "\n".join(lines)


def tuning_of(
    conditions: Conditions,
    request: Request,
    pick: Settings,
    why: str,
    trials: Trials | None = None,
    alone_s: Sequence[float] = (),
    steps: int = 0,
) -> Tuning:
    """Make a result, with its measurements in plain numbers."""
    trials, rows = trials or Trials(), list[dict[str, Any]]()
    for settings, seconds in trials.seconds.items():
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
        rows.append(
            {
                "settings": settings.words(),
                "accuracy_cost": settings.accuracy_cost,
                "steps": len(seconds),
                "median_s": median,
                "low_s": low,
                "high_s": high,
            }
        )
    rows.sort(key=lambda row: float(row["median_s"]))
    measured = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    pairs = tuple(trials.pairs)
    return Tuning(conditions, request, pick, why, tuple(rows), tuple(alone_s), pairs, steps, measured)


def write_tuning(path: Path, tuning: Tuning) -> None:
    """Write the file, and replace an earlier one as a whole."""
    write_atomically(path, tuning.to_text().encode())


def read_tuning(path: Path) -> Tuning:
    """Read a file; refuse one that is missing or something else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found.pop("format") != _FORMAT:
            raise ValueError("it has another format")
        request = found["request"]
        return Tuning(
            **{
                **found,
                "conditions": Conditions(**found["conditions"]),
                "request": Request(
                    Settings(**request["default"]), tuple(request["lossy"]), bool(request["static_graph"])
                ),
                "pick": Settings(**found["pick"]),
                "rows": tuple(found["rows"]),
                "alone_s": tuple(found["alone_s"]),
                "pairs": tuple((default, picked) for default, picked in found["pairs"]),
            }
        )
    except FileNotFoundError:
        raise ConfigurationError(
            f"tuned={str(path)!r}: there is no such file. `azureml-strategy tune RECIPE --output {path}` writes one."
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigurationError(
            f"tuned={str(path)!r} is no file of `azureml-strategy tune` ({type(error).__name__}: {error}). Measure "
            "anew, or leave `tuned` out."
        ) from error


def refuse_other_conditions(path: Path, tuning: Tuning, here: Conditions) -> None:
    """Refuse a file that was measured for something else."""
    differing = tuning.conditions.differences(here)
    if differing:
        raise ConfigurationError(
            f"tuned={str(path)!r} was measured for {'; '.join(differing)}. There it says nothing about what is fast. "
            "Measure anew: `azureml-strategy tune RECIPE`, or tune=True in place of `tuned`."
        )
