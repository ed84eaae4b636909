"""Completion statuses of InfiniBand verbs: why a transfer failed.

Numbers and names are those of `enum ibv_wc_status` in rdma-core, libibverbs/verbs.h.
"""

from __future__ import annotations

import re
from typing import NamedTuple

# From old to new: `with error 12,`, `with status=12 opcode=`, `with status=IBV_WC_RETRY_EXC_ERR(12) opcode=`. What
# follows the number must be there: a line that was cut off inside it would name another status. The highest is 23, and
# numbers without an end would be kinds of errors without an end.
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


class Completion(NamedTuple):
    """A completion status, explained."""

    status: int
    explanation: str
    fix: str


def explain_completion(text: str) -> Completion | None:
    """The completion status in a message of NCCL; None if there is none."""
    found = _STATUS.search(text)
    if not found:
        return None
    status = int(found[1])
    name, meaning = _MEANINGS.get(status, ("a status not listed here", "see ibv_wc_status in rdma-core"))
    fix = _FIXES.get(status, "Read the peer's log too, and look for an error before this one.")
    return Completion(status, f"An InfiniBand transfer failed with status {status}, {name}: {meaning}.", fix)
