"""Turns what a logger receives into batches for MLflow's `log_batch`, with names, lengths and descriptions that its
stores accept.
"""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, SupportsFloat

from azureml_strategy.cluster.redaction import redact, redact_text

if TYPE_CHECKING:
    from mlflow.entities import Metric, Param, RunTag
NOTE_TAG = "mlflow.note.content"  # mlflow.utils.mlflow_tags.MLFLOW_RUN_NOTE
# MLflow's limit of a tag's value up to 2.x; newer servers take 8,000 characters.
NOTE_LENGTH = 5000
# They enclose our part of the description, so that it can be replaced. Markdown does not show them.
_BEGIN, _END = "<!-- azureml-strategy -->", "<!-- end of azureml-strategy -->"

# Azure ML refuses a batch with more metrics: https://github.com/mlflow/mlflow/issues/2441 (the service limits list
# 250 rows a batch: https://learn.microsoft.com/azure/machine-learning/resource-limits-capacity).
METRICS_PER_BATCH = 200

# MLflow's REST interface and Azure ML: https://mlflow.org/docs/latest/rest-api.html#log-batch
PARAMS_PER_BATCH = 100
TAGS_PER_BATCH = 100

# Older servers, Azure ML among them, accept no longer value. Lightning's MLFlowLogger cuts at this length too.
PARAM_VALUE_LENGTH = 250

# From Azure ML's service limits, at the address above.
TAG_VALUE_LENGTH = 1000

# Azure ML refuses more in one run: https://github.com/Azure/azure-sdk-for-python/issues/35685
AZURE_PARAMS_PER_RUN = 200


# mlflow.utils.validation.MAX_ENTITY_KEY_LENGTH
_LONGEST = 250
_DIGEST = 16
_REFUSED = re.compile(
    r"[^\w/. -]"  # a character that MLflow refuses
    r"|_(?=x[0-9a-f]+-)"  # an underscore that would be read as the start of an escape code
    r"|(?<![^/])/|/\Z"  # a slash with nothing before it, or at the end
    r"|(?<![^/])\.(?=\.?(?:/|\Z))"  # a part `.` or `..`
)


def markdown_table(rows: Iterable[tuple[str, str]]) -> list[str]:
    """The lines of a Markdown table of names and values, without a header. Special characters are escaped."""
    lines = [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows]
    return ["| | |", "|---|---|", *lines] if lines else []


def merge_description(present: str, lines: Sequence[str], limit: int) -> str | None:
    """Put our part into the present description: below the text of others, or in place of our previous part.

    The most important lines are the first. The last ones are left out if the whole would exceed `limit` characters. The
    result is None if there is no room for any line.
    """
    above, begin, rest = present.partition(_BEGIN)
    _, end, below = rest.partition(_END)
    if begin and not end:  # somebody has removed the end of our part
        below = rest
    # A blank line separates the text of others from ours.
    before = [above.strip(), ""] if above.strip() else []
    after = ["", below.strip()] if below.strip() else []
    room = limit - len("\n".join([*before, _BEGIN, _END, *after]))
    kept = []
    for line in lines:
        room -= len(line) + 1
        if room < 0:
            break
        kept.append(line)
    return "\n".join([*before, _BEGIN, *kept, _END, *after]) if kept else None


def _cell(text: str) -> str:
    for special in "\\`*_|<[":
        text = text.replace(special, f"\\{special}")
    return " ".join(text.split())


@lru_cache(maxsize=10_000)
def clean_name(name: str) -> str:
    """Return the name in a form that MLflow accepts; two different names never become the same.

    Warns once about each name that changes.
    """
    clean = _REFUSED.sub(lambda found: f"_x{ord(found[0]):x}-", name) or "_x-"
    if name == "_x-":  # the code of the empty name
        clean = "_x5f-x-"
    if len(clean) > _LONGEST:
        digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:_DIGEST]
        clean = f"{clean[: _LONGEST - _DIGEST - 1]}_{digest}"
    if clean != name:
        warnings.warn(f"MLflow does not take the name {name!r}; it is logged as {clean!r}.", stacklevel=2)
    return clean


# How many items of each kind one request may carry. The kinds are written in this order.
LIMITS = {
    "tags": TAGS_PER_BATCH,
    "params": PARAMS_PER_BATCH,
    "metrics": METRICS_PER_BATCH,
    "files": 1,
    "artifacts": 1,
    "end": 1,
}


@dataclass(frozen=True)
class Metrics:
    """Values of one step, as `values.as_number` returns them, under names that `clean_name` returns."""

    values: Mapping[str, SupportsFloat]
    step: int
    timestamp_ms: int


@dataclass(frozen=True)
class Params:
    """Hyperparameters, already converted to text, under clean names."""

    values: Mapping[str, str]


@dataclass(frozen=True)
class Tags:
    """Tags of the run, under clean names."""

    values: Mapping[str, str]


@dataclass(frozen=True)
class TextFile:
    """A text file among the run's artifacts."""

    key: str
    value: str


@dataclass(frozen=True)
class DiskFile:
    """A file on this machine's disk for the run's artifacts: its path there, and its path here."""

    key: str
    value: str


@dataclass(frozen=True)
class End:
    """The end of a run that the logger opened: MLflow's status, and the time in ms since 1970."""

    value: str
    timestamp_ms: int
    key: str = "status"


Record = Metrics | Params | Tags | TextFile | DiskFile | End


@dataclass
class Batch:
    """Items of one kind that are written in one request, see `LIMITS`.

    Attributes:
        items: those that are not known to be in the store.
        doubtful: whether the store may have some items already, because they were sent and the answer was lost.
    """

    kind: str
    items: list[Any]
    doubtful: bool = False

    def drop(self, items: Iterable[Any]) -> None:
        """Remove items, compared by identity, that need no further request."""
        settled = {id(item) for item in items}
        self.items = [item for item in self.items if id(item) not in settled]


def make_batches(records: Iterable[Record]) -> list[Batch]:
    """Make as few batches as the limits allow. Each kind keeps the order in which it was logged."""
    items: dict[str, list[Any]] = {kind: [] for kind in LIMITS}
    for record in records:
        if isinstance(record, Metrics):
            items["metrics"].extend(_metric_entities(record))
        elif isinstance(record, Params):
            items["params"].extend(param(name, value) for name, value in record.values.items())
        elif isinstance(record, Tags):
            items["tags"].extend(tag(name, value) for name, value in record.values.items())
        elif isinstance(record, TextFile):
            items["files"].append(TextFile(record.key, redact_text(record.value)))
        elif isinstance(record, DiskFile):
            items["artifacts"].append(record)
        else:
            items["end"].append(record)
    return [batch for kind, each in items.items() for batch in chunks(kind, each)]


def chunks(kind: str, items: list[Any], doubtful: bool = False) -> Iterator[Batch]:
    """Split items of one kind into batches that a store accepts."""
    for start in range(0, len(items), LIMITS[kind]):
        yield Batch(kind, items[start : start + LIMITS[kind]], doubtful)


def param(name: str, value: str) -> Param:
    """Make MLflow's entity of a parameter."""
    from mlflow.entities import Param

    return Param(name, value)  # type: ignore[no-untyped-call]


def tag(name: str, value: str) -> RunTag:
    """Make MLflow's entity of a tag, with its value cut to the length that stores accept."""
    from mlflow.entities import RunTag

    # `merge_description` has cut a description already, in whole lines and to the limit of the store.
    longest = NOTE_LENGTH if name == NOTE_TAG else TAG_VALUE_LENGTH
    return RunTag(name, str(redact(name, value))[:longest])  # type: ignore[no-untyped-call]


def _metric_entities(record: Metrics) -> Iterator[Metric]:
    from mlflow.entities import Metric

    for name, value in record.values.items():
        try:
            number = float(value)
        except Exception as error:  # the value is read from the GPU only now, and the GPU may have failed meanwhile
            warnings.warn(
                f"Metric {name} of step {record.step} cannot be read and is left out: {redact_text(str(error))}",
                stacklevel=2,
            )
            continue
        yield Metric(name, number, record.timestamp_ms, record.step)


def is_finite(item: Any) -> bool:
    """Whether an item is anything but a NaN or infinite metric."""
    return not isinstance(item.value, float) or math.isfinite(item.value)
