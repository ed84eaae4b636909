"""One request of a client, and what is answered."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Request:
    """What a client asked; header names are in lower case."""

    method: str
    host: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def url(self) -> str:
        return f"https://{self.host}{self.path}"

    def __str__(self) -> str:
        return f"{self.method} {self.url}"


@dataclass(frozen=True)
class Reply:
    """An answer; content that is neither bytes nor text is sent as JSON."""

    content: Any = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)

    def encoded(self) -> tuple[bytes, dict[str, str]]:
        if isinstance(self.content, bytes):
            return self.content, self.headers
        if isinstance(self.content, str):
            return self.content.encode(), self.headers
        return json.dumps(self.content).encode(), {"Content-Type": "application/json", **self.headers}


def error(status: int, code: str, message: str, **headers: str) -> Reply:
    """An error as Azure Resource Manager words it."""
    content = {"error": {"code": code, "message": message}}
    return Reply(content, status, {name.replace("_", "-"): value for name, value in headers.items()})
