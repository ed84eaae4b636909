"""A kind of message that the reader knows."""

from __future__ import annotations

import re
from typing import NamedTuple

from azureml_strategy.network.transport.errors import Severity


class Rule(NamedTuple):
    """A kind of message, its explanation and what to do.

    Attributes:
        name: of the kind.
        pattern: found in the message.
        severity: how bad it is.
        explanation: what it means.
        fix: what to do, or what to type.
    """

    name: str
    pattern: re.Pattern[str]
    severity: Severity
    explanation: str
    fix: str
