"""Failures that a log reports, each kind once, with what it means and what to do."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.network.transport.bounded import remember

Severity = Literal["problem", "warning", "info"]

UNKNOWN = "unknown"
_FURTHER = "Further messages of this kind."
_MOST_TEXTS, _MOST_UNKNOWN = 4, 32  # texts kept of one known kind of error, and of all that are not known
# Characters that are explained and kept, and compared. NCCL cuts its messages off at 1 KiB.
_LONGEST_TEXT, _LONGEST_SHAPE = 1024, 240
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True)
class LogError:
    """One kind of failure, or of doubtful setting, in a log; `str` gives its text.

    Attributes:
        name: the kind, such as `completion 12` or `memlock`; `unknown` if this reader does not know it.
        text: the first such message as NCCL or torch wrote it; a conclusion drawn from several lines has its own.
        explanation: what it means.
        fix: what to do, or what to type.
        severity: `problem` stops or ruins a run, `warning` may, `info` does not.
        count: how often it was seen.
    """

    name: str
    text: str
    explanation: str
    fix: str
    severity: Severity
    count: int = 1

    def __str__(self) -> str:
        return self.text


class ErrorLog:
    """Collects errors in bounded memory: equal but for their numbers they are one, and each kind keeps a few texts.

    Args:
        explain: makes an error of a message; asked once for equal ones, because a log may repeat one a million times.
    """

    def __init__(self, explain: Callable[[str], LogError]) -> None:
        self._explain = explain
        self._errors: dict[tuple[str, str], LogError] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._texts: Counter[str] = Counter()
        self._known: dict[str, tuple[str, str]] = {}

    def add(self, text: str) -> None:
        """Count the message, and keep its text if it is new and there is room."""
        text = text.strip()[:_LONGEST_TEXT]
        shape = _VARYING.sub("#", text[:_LONGEST_SHAPE])
        key = self._known.get(shape)
        if key is None:
            key = self._keep(self._explain(text), shape)
            remember(self._known, shape, key)
        self._counts[key] += 1

    def _keep(self, error: LogError, shape: str) -> tuple[str, str]:
        most = _MOST_UNKNOWN if error.name == UNKNOWN else _MOST_TEXTS
        is_full = self._texts[error.name] >= most
        key = (error.name, _FURTHER if is_full else shape)
        if key not in self._errors:
            text = _FURTHER if is_full else redact_text(error.text)
            self._errors[key] = replace(error, text=text)
            self._texts[error.name] += 1
        return key

    def __iter__(self) -> Iterator[LogError]:
        return (replace(error, count=self._counts[key]) for key, error in self._errors.items())
