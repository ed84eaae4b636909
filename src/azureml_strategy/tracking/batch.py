"""From what a logger is given to what MLflow's `log_batch` takes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsFloat

from azureml_strategy.cluster.redaction import redact, redact_text
from azureml_strategy.tracking.limits import METRICS_PER_BATCH, PARAMS_PER_BATCH, TAG_VALUE_LENGTH, TAGS_PER_BATCH

if TYPE_CHECKING:
    from mlflow.entities import Metric, Param, RunTag


@dataclass(frozen=True)
class Metrics:
    """Values of one step, see `values.as_number`; names are those of `names.clean_name`."""

    values: Mapping[str, SupportsFloat]
    step: int
    timestamp_ms: int


@dataclass(frozen=True)
class Params:
    """Hyperparameters, already text, under clean names."""

    values: Mapping[str, str]


@dataclass(frozen=True)
class Tags:
    """Tags of the run, under clean names."""

    values: Mapping[str, str]


@dataclass(frozen=True)
class TextFile:
    """A file among the run's artifacts."""

    key: str
    value: str


Record = Metrics | Params | Tags | TextFile


@dataclass(frozen=True)
class Batch:
    """What is written at once: items of one kind, `metrics`, `params`, `tags` or `files`."""

    kind: str
    items: list[Any]

    def halves(self) -> tuple[Batch, Batch]:
        """The same items as two batches."""
        middle = len(self.items) // 2
        return Batch(self.kind, self.items[:middle]), Batch(self.kind, self.items[middle:])

    def describe(self) -> str:
        """Names and steps, as a warning shows them."""
        names = sorted({item.key for item in self.items})
        shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        if self.kind != "metrics":
            return f"{self.kind} {shown}"
        steps = [item.step for item in self.items]
        return f"metrics {shown} of steps {min(steps)} to {max(steps)}"


def make_batches(records: Iterable[Record]) -> list[Batch]:
    """As few batches as the limits allow, each kind in the order it was logged."""
    metrics: list[Metric] = []
    params: list[Param] = []
    tags: list[RunTag] = []
    files: list[TextFile] = []
    for record in records:
        if isinstance(record, Metrics):
            metrics.extend(_metric_entities(record))
        elif isinstance(record, Params):
            params.extend(_param(name, value) for name, value in record.values.items())
        elif isinstance(record, Tags):
            tags.extend(_tag(name, value) for name, value in record.values.items())
        else:
            files.append(TextFile(record.key, redact_text(record.value)))
    return [
        *_chunks("tags", tags, TAGS_PER_BATCH),
        *_chunks("params", params, PARAMS_PER_BATCH),
        *_chunks("metrics", metrics, METRICS_PER_BATCH),
        *_chunks("files", files, 1),
    ]


def _param(name: str, value: str) -> Param:
    from mlflow.entities import Param

    return Param(name, value)  # type: ignore[no-untyped-call]


def _tag(name: str, value: str) -> RunTag:
    from mlflow.entities import RunTag

    return RunTag(name, str(redact(name, value))[:TAG_VALUE_LENGTH])  # type: ignore[no-untyped-call]


def _chunks(kind: str, items: list[Any], size: int) -> Iterator[Batch]:
    for start in range(0, len(items), size):
        yield Batch(kind, items[start : start + size])


def _metric_entities(record: Metrics) -> Iterator[Metric]:
    from mlflow.entities import Metric

    for name, value in record.values.items():
        try:
            number = float(value)
        except Exception as error:  # a GPU's value is read only now, and the GPU may have failed meanwhile
            warnings.warn(
                f"Metric {name} of step {record.step} cannot be read and is left out: {redact_text(str(error))}",
                stacklevel=2,
            )
            continue
        yield Metric(name, number, record.timestamp_ms, record.step)


def is_finite(item: Any) -> bool:
    """Whether an item is no NaN or infinite metric."""
    return not isinstance(item.value, float) or math.isfinite(item.value)
