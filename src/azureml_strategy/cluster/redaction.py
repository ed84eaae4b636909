"""Taking secrets out of anything that is printed or recorded."""

from __future__ import annotations

import re
from collections.abc import Mapping

REDACTED = "<redacted>"
# Azure ML puts a run token, an MSI secret, keys and subscription ids into every process's environment.
_SECRET_NAME = re.compile(
    r"TOKEN|KEY|SECRET|PASS|PWD|CREDENTIAL|SAS|SIGNATURE|CONN\w*STR|AUTH(?!ORITY)|BEARER|JWT|COOKIE|_PAT$|MSI_"
    r"|IDENTITY_HEADER|SUBSCRIPTION",
    re.I,
)
_SECRET_PARTS = (
    (re.compile(r"(?<=://)[^/\s]+(?=@)"), REDACTED),  # user:password@ of a URL
    # SAS and query strings, connection strings (AccountKey=) and JSON ("access_token": "...").
    (
        re.compile(r"""(?i)((?:sig|signature|token|key|secret|password|pwd)["']?\s*[=:]\s*["']?)[^&\s;,"'}]+"""),
        rf"\1{REDACTED}",
    ),
    (re.compile(r"(?i)(?<=bearer )\S+"), REDACTED),
    (re.compile(r"eyJ[\w-]+\.[\w-]+\.[\w-]*"), REDACTED),  # a JSON web token, wherever it stands
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
