"""Long-running operations: accepted, polled for a while, then done or failed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.jobs.azure_service.exchange import Reply, Request

POLL_AFTER = {"Retry-After-Ms": "10"}  # Azure Resource Manager itself says 5 to 30 seconds
PATH = "/subscriptions/any/providers/Microsoft.MachineLearningServices/locations/any/operations/"


@dataclass
class _Operation:
    left: int
    finish: Callable[[], None]
    failure: tuple[str, str] | None


@dataclass
class Operations:
    """The operations under way.

    Attributes:
        polls: how often a client that asks is told to wait.
        failure: code and message with which the next operation ends.
    """

    polls: int = 1
    failure: tuple[str, str] | None = None
    _running: list[_Operation] = field(default_factory=list)

    def accept(self, content: Any, status: int, finish: Callable[[], None]) -> Reply:
        """Answer the request that starts one; `finish` is called when it has succeeded."""
        self._running.append(_Operation(self.polls, finish, self.failure))
        self.failure = None
        url = f"https://management.azure.com{PATH}{len(self._running) - 1}"
        headers = {"Azure-AsyncOperation": f"{url}?api-version=x", **POLL_AFTER}
        return Reply(content, status, headers | ({"Location": f"{url}/result"} if status == 202 else {}))

    def answer(self, request: Request) -> Reply:
        number, _, result = request.path.removeprefix(PATH).partition("/")
        operation = self._running[int(number)]
        if result:
            return Reply()
        operation.left -= 1
        if operation.left >= 0:
            return Reply({"status": "InProgress"}, headers=POLL_AFTER)
        if operation.failure:
            code, message = operation.failure
            return Reply({"status": "Failed", "error": {"code": code, "message": message}})
        if operation.left == -1:
            operation.finish()
        return Reply({"status": "Succeeded"})
