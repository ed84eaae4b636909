"""Collects the failures that a log reports, each kind with an explanation and a fix."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from azureml_strategy.cluster.redaction import redact_text
from azureml_strategy.network.nccl_log.devices import remember

Severity = Literal["problem", "warning", "info"]

UNKNOWN = "unknown"
_FURTHER = "Further messages of this kind."
_MOST_TEXTS, _MOST_UNKNOWN = 4, 32  # texts kept for each known kind of error, and for all unknown errors together
# How many characters of a message are explained and kept, and how many are compared. NCCL cuts messages off at 1 KiB.
_LONGEST_TEXT, _LONGEST_SHAPE = 1024, 240
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")

# From old to new: `with error 12,`, `with status=12 opcode=`, `with status=IBV_WC_RETRY_EXC_ERR(12) opcode=`. The
# pattern requires the character after the number: a line cut off inside the number would name another status. The
# highest status is 23; the limit of two digits keeps a damaged log from creating kinds of errors without end.
_STATUS = re.compile(r"Got completion\b.*?\b(?:with error |status=(?:\w+\()?)(\d{1,2})[\s,)]")
_MEANINGS = {
    1: ("IBV_WC_LOC_LEN_ERR", "a message did not fit the buffer posted for it"),
    2: ("IBV_WC_LOC_QP_OP_ERR", "the adapter refused an operation of the queue pair"),
    4: ("IBV_WC_LOC_PROT_ERR", "the local adapter may not read or write the memory it was given"),
    5: ("IBV_WC_WR_FLUSH_ERR", "the transfer was thrown away after another one had failed"),
    8: ("IBV_WC_LOC_ACCESS_ERR", "the local memory is not registered for this access"),
    9: ("IBV_WC_REM_INV_REQ_ERR", "the other node's adapter found the request invalid"),
    10: ("IBV_WC_REM_ACCESS_ERR", "the other node's memory is not registered for this access"),
    11: ("IBV_WC_REM_OP_ERR", "the other node's adapter could not carry the request out"),
    12: ("IBV_WC_RETRY_EXC_ERR", "the other node's adapter did not acknowledge within the time-out and its retries"),
    13: ("IBV_WC_RNR_RETRY_EXC_ERR", "the other node had no buffer ready in time"),
    19: ("IBV_WC_FATAL_ERR", "the adapter reported a fatal error"),
    20: ("IBV_WC_RESP_TIMEOUT_ERR", "the other node's adapter did not respond in time"),
    21: ("IBV_WC_GENERAL_ERR", "the adapter reported an error without a class"),
}
_GDR_TEST = (
    "Run once with NCCL_NET_GDR_LEVEL=LOC (no GPUDirect RDMA): if it works, the PCIe path between GPU and adapter is "
    "at fault, usually access control services (ACS); keep NCCL_NET_GDR_READ=0 or report the node."
)
_MEMORY = "Check that all nodes run one image, driver and NCCL version. " + _GDR_TEST
_FIXES = {
    4: _GDR_TEST,
    5: "Look for the first error in the log, on the peer that the message names as well.",
    8: _MEMORY,
    10: _MEMORY,
    # Wait = 4.096 us x 2^timeout x retries (NCCL's env.rst); with NCCL_IB_RETRY_CNT=7, 20 is 30 s and 22 is 2 min.
    12: (
        "If it fails at the first collective, the adapters cannot reach one another: InfiniBand works inside one "
        "scale set (placement group) only, so put all nodes into one compute cluster, and leave RoCE adapters out "
        "with NCCL_IB_HCA. If it fails later, a peer died or the fabric stalled: read the peer's log, and set "
        "NCCL_IB_TIMEOUT=22 (waits 2 minutes; the default 20 waits 30 seconds, 18 before NCCL 2.23 waits 7.5)."
    ),
    13: "Read the log of the peer that the message names: it stopped receiving.",
    19: "Replace the node: cancel the job and start it on other nodes.",
}
_FIXES[20] = _FIXES[12]


@dataclass(frozen=True)
class LogError:
    """One kind of failure or suspicious condition in a log. `str` gives its text.

    Attributes:
        name: kind, such as `completion 12` or `memlock`; `unknown` if no rule matches.
        text: the first such message as NCCL or torch wrote it; a conclusion from several lines has its own text.
        explanation: what it means.
        fix: what to do or type.
        severity: `problem` stops or ruins a run, `warning` may, `info` does not.
        count: number of such messages.
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
    """Collects errors in bounded memory.

    Messages that differ only in their numbers count as one error, and are explained once: a log may repeat one a
    million times. Each kind of error keeps a few texts.
    """

    def __init__(self, explain: Callable[[str], LogError]) -> None:
        self._explain = explain
        self._errors: dict[tuple[str, str], LogError] = {}
        self._counts: Counter[tuple[str, str]] = Counter()
        self._texts: Counter[str] = Counter()
        self._known: dict[str, tuple[str, str]] = {}

    def add(self, text: str) -> None:
        """Count the message; keep its text if it is new and there is room."""
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


class Completion(NamedTuple):
    """A completion status with its explanation and fix."""

    status: int
    explanation: str
    fix: str


def explain_completion(text: str) -> Completion | None:
    """Explain the completion status in a message of NCCL; None if there is none."""
    found = _STATUS.search(text)
    if not found:
        return None
    status = int(found[1])
    name, meaning = _MEANINGS.get(status, ("a status not listed here", "see ibv_wc_status in rdma-core"))
    fix = _FIXES.get(status, "Read the peer's log too, and look for an error before this one.")
    return Completion(status, f"An InfiniBand transfer failed with status {status}, {name}: {meaning}.", fix)
