"""The sentence of a failed process's output that says why it failed."""

from __future__ import annotations

import re
from collections.abc import Sequence

from azureml_strategy.cluster.redaction import redact_text

_LONGEST = 500
# The last line of a traceback, and what our commands say before they end with 2. Python 3.11 and later indent those of
# groups of exceptions.
_ERROR = re.compile(
    r"(?:\[rank\d+\]: )?[\s|]*(?P<words>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)(?::\s.*|$))"
    r"|azureml-strategy: (?P<ours>.+)"
)
# What follows an error and says nothing of it.
_HINTS = ("Set the environment variable HYDRA_FULL_ERROR", "To execute this with")


def error_sentence(lines: Sequence[str]) -> str:
    """Find the last error among the last lines of a process; without one, its last line.

    Args:
        lines: that the process has printed, the last ones last.

    Returns:
        One line of 500 characters at most, without secrets; empty if the process has printed nothing.
    """
    found = [match["words"] or match["ours"] for match in map(_ERROR.match, lines) if match]
    spoken = [line.strip() for line in lines if line.strip() and not line.startswith(_HINTS)]
    return redact_text(" ".join((found or spoken or [""])[-1].split()))[:_LONGEST]
