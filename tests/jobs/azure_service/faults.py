"""What goes wrong on purpose."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.jobs.azure_service.exchange import Reply, Request


@dataclass
class Fault:
    """What happens to the next requests of a kind.

    Attributes:
        method: such as `PUT`.
        pattern: regular expression, searched in the URL without its query.
        times: how often it happens.
        reply: what is answered; None drops the connection without an answer.
        handled: whether the service does what it was asked before it answers so.
    """

    method: str
    pattern: str
    times: int
    reply: Reply | None
    handled: bool

    def strikes(self, request: Request) -> bool:
        found = self.times > 0 and request.method == self.method and re.search(self.pattern, request.url, re.I)
        if found:
            self.times -= 1
        return bool(found)
