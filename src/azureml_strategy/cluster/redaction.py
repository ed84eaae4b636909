"""Taking secrets out of anything that is printed or recorded."""

from __future__ import annotations

import re
from collections.abc import Mapping

REDACTED = "<redacted>"
# Azure ML puts a run token, an MSI secret, keys and subscription ids into every process's environment.
_SECRET_NAME = re.compile(
    r"TOKEN|KEY|SECRET|PASS|PWD|CREDENTIAL|SAS|SIGNATURE|CONNECTION_STRING|MSI_|SUBSCRIPTION", re.I
)
_SECRET_PARTS = (
    (re.compile(r"(?<=://)[^/@\s]+(?=@)"), REDACTED),  # user:password@ of a URL
    (
        re.compile(r"(?i)\b(sig|token|key|secret|password)=[^&\s;]+"),
        rf"\1={REDACTED}",
    ),  # SAS and query strings
    (re.compile(r"(?i)(?<=/subscriptions/)[^/\s]+"), REDACTED),
)


def redact_text(text: str) -> str:
    """The text without passwords in URLs, signatures, tokens in query strings, and subscription ids."""
    for pattern, replacement in _SECRET_PARTS:
        text = pattern.sub(replacement, text)
    return text


def redact(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment, safe to print: values of secret names are gone, secret parts of other values too."""
    return {name: REDACTED if _SECRET_NAME.search(name) else redact_text(value) for name, value in environ.items()}
