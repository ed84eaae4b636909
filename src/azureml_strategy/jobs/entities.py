"""azure-ai-ml's entities as text."""

from __future__ import annotations

import io
from enum import Enum
from typing import Any


def as_yaml(entity: Any) -> str:
    """What `az ml ... create --file` takes.

    Args:
        entity: any of `azure.ai.ml.entities` that has `dump`.

    Returns:
        YAML that the entity's `azure.ai.ml.load_...` function reads back.
    """
    text = io.StringIO()
    entity.dump(text)
    return text.getvalue()


def plain(value: object) -> str:
    """A state, a priority or another word of the service, whether azure-ai-ml gives it as text or as an enumeration."""
    return str(value.value if isinstance(value, Enum) else value)
