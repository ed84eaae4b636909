"""Failures between this node and Blob Storage: which requests are tried again, how often, and what a message says.

obstore's own retries are switched off: it asks again after a tenth of a second, even if the service is too busy to
answer, and it cannot renew a rejected token. It does not return the headers of an answer, so a `Retry-After` cannot be
read. The pauses grow beyond any that Blob Storage asks for, and all reads of a storage pause together.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import time
from dataclasses import dataclass
from enum import Enum, auto

_STATUS = re.compile(r"non-2xx status code: (\d{3})[^:]*")
_CODE = re.compile(r"<Code>(\w+)</Code>")
_OUR_PROVIDER = "External Azure credential provider"
_BUSY = (429, 503)
BEHIND_END = "InvalidRange"  # the service's name of a part that begins behind the end of a blob
# Words of an error of Rust's network libraries, and what they mean. The first that occurs counts.
_NETWORK = {
    "ConnectionRefused": "the connection was refused",
    "ConnectionReset": "the connection was reset",
    "invalid peer certificate": "the certificate is not trusted",
    "TimedOut": "no answer came in time",
    "IncompleteBody": "the connection broke off within the answer",
    "IncompleteMessage": "the connection broke off before the answer",
    "UnexpectedEof": "the connection broke off",
    "tcp connect error": "no connection could be made",
}
_TOLD_S = 8.0  # shorter pauses are not logged: one failed request among thousands is normal
_TOLD_AGAIN_S = 60.0
log = logging.getLogger(__name__)


class Kind(Enum):
    """What may be done about a failed request."""

    AGAIN = auto()  # it may succeed later
    BUSY = auto()  # so may it, if fewer requests are made
    UNKNOWN_HOST = auto()  # so may it, if the host has ever been reached
    NO_IDENTITY = auto()  # so may it, if there has ever been one
    EXPIRED = auto()  # a new token is tried once
    DENIED = auto()
    MISSING = auto()
    CHANGED = auto()
    REFUSED = auto()  # asking again would not help


@dataclass(frozen=True)
class Fault:
    """A failed request.

    Attributes:
        kind: what may be done.
        reason: for a message, without secrets: our own words, a status, and the service's name of the error.
        code: the service's name of the error, such as `ContainerNotFound`; empty without an answer.
    """

    kind: Kind
    reason: str
    code: str = ""


class UnusableAnswerError(ValueError):
    """An answer came that cannot be what was asked for, such as one of another length."""


def explain(error: Exception) -> Fault:
    """Tell what an error of obstore means. Its own text is not shown: it may contain a signature.

    Args:
        error: what a request raised.
    """
    text = str(error)
    if isinstance(error, UnusableAnswerError):
        return Fault(Kind.AGAIN, text)
    if _OUR_PROVIDER in text:
        return Fault(Kind.NO_IDENTITY, "no credential could be had")
    if status := _STATUS.search(text):
        code = _CODE.search(text)
        return _of_status(int(status[1]), code[1] if code else "")
    if "StartTooLarge" in text:  # obstore found it in an answer of another status
        return Fault(Kind.REFUSED, "the blob is shorter", BEHIND_END)
    if "dns error" in text:
        return Fault(Kind.UNKNOWN_HOST, "the name of its host is not known")
    reason = next((reason for word, reason in _NETWORK.items() if word in text), None)
    if reason is None and "Requested" in text:
        reason = "the answer was of another part of the blob"
    return Fault(Kind.AGAIN, reason or f"the request failed ({type(error).__name__})")


def _of_status(status: int, code: str) -> Fault:
    reason = f"the service answered {status}{f' {code}' if code else ''}"
    if status in _BUSY:
        return Fault(Kind.BUSY, reason, code)
    if status >= 500 or status == 408:
        return Fault(Kind.AGAIN, reason, code)
    kinds = {401: Kind.EXPIRED, 403: Kind.DENIED, 404: Kind.MISSING, 412: Kind.CHANGED}
    return Fault(kinds.get(status, Kind.REFUSED), reason, code)


@dataclass(frozen=True)
class Patience:
    """How long reads go on in spite of failures; seconds.

    Attributes:
        total: after this long without success a read fails. Half of the ten minutes after which torch's collectives
            give up on a rank that does not come, so that the error is about the storage and not about the network.
        first_pause, longest_pause: between two tries. Pauses double.
        unknown: how long a host may be unknown that has never been reached: mistyped, more likely than out of order.
        silence: how long a connection may bring nothing before it counts as broken.
    """

    total: float = 300.0
    first_pause: float = 0.25
    longest_pause: float = 30.0
    unknown: float = 15.0
    silence: float = 30.0


class Pauses:
    """The pauses of one storage. While the service is busy, all of its reads wait together."""

    def __init__(self, patience: Patience) -> None:
        self.patience = patience
        self._quiet_until = 0.0
        self._told = -_TOLD_AGAIN_S

    async def wait_if_busy(self) -> None:
        """Wait for the end of a pause that another read has found necessary."""
        while (left := self._quiet_until - time.monotonic()) > 0:
            await asyncio.sleep(left)

    async def wait(self, fault: Fault, tries: int, what: str) -> None:
        """Wait before a request is made again.

        Args:
            fault: why.
            tries: how often it has been made, from 1.
            what: was asked for, for the log.
        """
        longest = min(self.patience.first_pause * 2.0 ** min(tries - 1, 30), self.patience.longest_pause)
        pause = longest * random.uniform(0.5, 1.0)  # not all nodes at the same moment
        now = time.monotonic()
        if pause >= _TOLD_S and now >= self._told + _TOLD_AGAIN_S:
            self._told = now
            log.warning("%s: %s. It is tried again, for up to %.0f s.", what, fault.reason, self.patience.total)
        if fault.kind is Kind.BUSY:
            self._quiet_until = max(self._quiet_until, now + pause)
        await asyncio.sleep(pause)
