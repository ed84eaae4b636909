"""Reads the transport that NCCL uses from its log, with `read_transport`, which extracts NCCL's messages first."""

from __future__ import annotations

import os
import re
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import takewhile
from typing import Protocol, Union, runtime_checkable

from azureml_strategy.network.nccl_log.devices import LIMIT, Kind, parse_route
from azureml_strategy.network.nccl_log.evidence import Evidence
from azureml_strategy.network.nccl_log.transport import Sharp, Transport, Verdict, find, find_errors, judge

PIECE = 1 << 17  # characters or bytes read at once; they stay in a core's cache
# NCCL formats a message into 1 KiB and its list of devices into 2 KiB; launchers add a prefix.
MAX_LINE = 1 << 14

# `[time] host:pid:tid [device] NCCL INFO text`, `... [device] file:line (function) NCCL WARN text` (NCCL's debug.cc);
# RCCL writes the same.
_MARK = re.compile(r"NCCL (INFO|WARN) ")
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_PROCESS = re.compile(r"([\w.-]{1,255}):\d+:\d+$")
# How the long messages that matter begin, and a pattern that comes late in them. If it is missing, an editor or a
# terminal has wrapped the message.
_LONG = (
    (re.compile(r"NET/IB ?: Using "), re.compile(r"OOB \S+:")),
    (re.compile(r"NET/IB ?: Got completion"), re.compile(r"vendor.err.\d+")),
    (re.compile(r"(?:Channel|Ring|CollNet) \d+[^>]*->"), re.compile(r" via ")),
)
_MOST_LINES = 5  # lines over which one message may be wrapped
_LONGEST_KEY = 256  # characters of a process and a route together
_Open = tuple[str | None, str, list[str]]  # host, level and the lines of a message so far


@runtime_checkable
class Stream(Protocol):
    """An open file, text or binary."""

    def read(self, size: int, /) -> str | bytes:
        """Read at most `size` characters or bytes; empty at the end of the file."""


Log = Union[str, bytes, "os.PathLike[str]", Stream, Iterable[str]]


def read_lines(log: Log) -> Iterator[list[str]]:
    """Read a log piece by piece; each list holds the lines that end in one piece.

    A carriage return also ends a line, because progress bars write gigabytes between two line feeds. The part of a
    line beyond `MAX_LINE` may be missing. Bytes that are not UTF-8 are replaced.

    Raises:
        OSError: the file cannot be read.
    """
    carry = ""
    for piece in _pieces(log):
        *lines, carry = (carry + piece).replace("\r", "\n").split("\n")
        carry = carry[:MAX_LINE]
        yield lines
    yield [carry]


def _pieces(log: Log) -> Iterator[str]:
    if isinstance(log, (bytes, str)):
        yield from _decoded(log[start : start + PIECE] for start in range(0, len(log), PIECE))
    elif isinstance(log, os.PathLike):
        with open(log, "rb") as file:
            yield from _pieces(file)
    elif isinstance(log, Stream):
        yield from _decoded(takewhile(bool, iter(lambda: log.read(PIECE), None)))
    else:
        yield from (f"{line}\n" for line in log)


def _decoded(pieces: Iterable[str | bytes]) -> Iterator[str]:
    decoder = getincrementaldecoder("utf-8")(errors="replace")
    for piece in pieces:
        yield piece if isinstance(piece, str) else decoder.decode(piece)


class Messages:
    """Passes NCCL's messages to the evidence, without the prefixes of launchers."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._wanted = 0  # how many of the next lines the evidence wants, whatever they are
        self._open: _Open | None = None
        self._counted: dict[tuple[str, str], int] = {}

    def read(self, lines: list[str]) -> None:
        """Read lines, given without line ends."""
        counted = self._counted
        for line in lines:
            if "CCL" in line or "ccl" in line:
                head, _, route = line.rpartition(" via ")
                # `host:pid:tid` is the second-to-last word before the mark. A line whose process and route are already
                # known is only counted, not parsed.
                key = (head.partition(" NCCL INFO ")[0].rpartition(" ")[0].rpartition(" ")[2], route)
                if key in counted and head.count("NCCL ") == 1 and not self._open:
                    counted[key] += 1
                else:
                    self._line(line[:MAX_LINE], key)
            elif (self._open or self._wanted) and line.strip():
                self._continue_message(line[:MAX_LINE].strip())

    def close(self) -> None:
        """Pass on the counted channel lines, and the first line of a message that is still incomplete."""
        self._close_message()
        for (process, text), lines in self._counted.items():
            if route := parse_route(text):
                self._evidence.channel(_host(process), route, lines)
        self._counted.clear()

    def _close_message(self) -> None:
        if self._open:
            host, level, lines = self._open
            self._open = None
            self._evidence.message(host, level, lines[0].rstrip())

    def _line(self, line: str, key: tuple[str, str]) -> None:
        self._close_message()
        if "\x1b" in line:
            line = _COLOUR.sub("", line)
        prefix, *parts = _MARK.split(line)
        if not parts:
            self._wanted = self._evidence.other(line)
        elif len(parts) == 2 and self._can_count(prefix, parts[0], key):
            self._counted[key] = 1
        else:
            # Processes that share a pipe sometimes write into one line. The hosts of the later messages are unknown.
            hosts = [_host(_process(prefix)), *[None] * len(parts)]
            for host, level, text in zip(hosts, parts[::2], parts[1::2], strict=False):
                self._message(host, level, text)

    def _can_count(self, prefix: str, level: str, key: tuple[str, str]) -> bool:
        process, route = key
        is_short = len(process) + len(route) <= _LONGEST_KEY and len(self._counted) < LIMIT
        return is_short and level == "INFO" and _process(prefix) == process and parse_route(route) is not None

    def _message(self, host: str | None, level: str, text: str) -> None:
        via = text.rfind(" via ")
        route = parse_route(text[via + 5 :]) if via >= 0 and level == "INFO" else None
        if route:
            self._evidence.channel(host, route, 1)
        elif _is_cut(text):
            self._close_message()
            self._open = (host, level, [text])
        else:
            self._evidence.message(host, level, text.rstrip())

    def _continue_message(self, line: str) -> None:
        if self._open is None:
            self._wanted = max(self._wanted - 1, self._evidence.other(line))
            return
        host, level, lines = self._open
        lines.append(line)
        whole = " ".join(lines)
        if not _is_cut(whole):
            self._open = None
            self._message(host, level, whole)
        elif len(lines) == _MOST_LINES:
            self._close_message()


def _process(prefix: str) -> str:
    """The `host:pid:tid` in the text before a message, with anything that a launcher glued to it."""
    end = max(prefix.rfind(" ["), 0)
    return prefix[prefix.rfind(" ", 0, end) + 1 : end]


def _host(process: str) -> str | None:
    found = _PROCESS.search(process)
    return found[1] if found else None


def _is_cut(text: str) -> bool:
    return any(begin.match(text) and not late.search(text) for begin, late in _LONG)


def uses_gpudirect(evidence: Evidence, kind: Kind) -> bool | None:
    """Whether adapters access GPU memory directly, by channel lines.

    Without channel lines: False over sockets, or if NCCL disabled it for every GPU (else for every adapter); None
    otherwise.
    """
    over_network = [route.gpudirect for _, route in evidence.routes if route.network]
    if over_network:
        return any(over_network)
    if kind == "socket":
        return False
    decided = evidence.gpudirect.get("GPU") or evidence.gpudirect.get("HCA")
    return False if decided == {False} else None


def count_channels(evidence: Evidence) -> tuple[int, Counter[str]]:
    """Count channel lines over networks, and those inside nodes by route."""
    network, local = 0, Counter[str]()
    for (_, route), lines in evidence.routes.items():
        if route.network:
            network += lines
        else:
            local[route.name] += lines
    return network, local


def name_plugin(evidence: Evidence, verdict: Verdict) -> str | None:
    """The network behind the verdict, else the first one that was selected; None without either."""
    used = [use.network for use in verdict.uses if use.kind == verdict.kind and use.network != "SHARP"]
    selected = [network for _, network in evidence.selected]
    return next(iter(used + selected), None)


def relaxed_ordering(evidence: Evidence, plugin: str | None) -> bool | None:
    """Whether adapters may write out of order; None if unknown. Only NCCL's own network always logs it, since 2.12."""
    if evidence.relaxed_ordering:
        return True
    version = tuple(int(part) for part in (evidence.version or "0").split("."))
    is_off = evidence.relaxed_ordering is False and plugin == "IB" and version >= (2, 12)
    return False if is_off else None


def sharp_state(evidence: Evidence) -> Sharp | None:
    """Whether the switches reduce. An error at start outweighs channel lines, which come before it."""
    if any(error.name == "sharp" for error in evidence.errors):
        return "failed"
    if any(route.collnet for _, route in evidence.routes):
        return "used"
    return "available" if evidence.devices.sharp else None


def read_transport(log: Log) -> Transport:
    """Read from NCCL's log what NCCL uses between nodes.

    NCCL writes such a log with `NCCL_DEBUG=INFO`. The log may contain other output and several ranks and hosts, and it
    may be cut off or damaged. Memory stays bounded for any file or stream.

    Args:
        log: the text itself, a path object, an open file (text or binary), or lines.

    Raises:
        OSError: the file cannot be read.
    """
    evidence = Evidence()
    messages = Messages(evidence)
    for lines in read_lines(log):
        messages.read(lines)
    messages.close()
    verdict = judge(evidence)
    # The adapters with the link layer of the verdict, and those whose link layer no line shows.
    hcas = tuple(evidence.devices.with_link("RoCE" if verdict.kind == "roce" else "IB", None))
    plugin = name_plugin(evidence, verdict)
    network, local = count_channels(evidence)
    return Transport(
        kind=verdict.kind,
        gpudirect=uses_gpudirect(evidence, verdict.kind),
        hcas=hcas,
        interface=next(iter(evidence.interfaces), None),
        errors=find_errors(evidence, verdict),
        findings=tuple(find(evidence, verdict)),
        evidence=verdict.basis,
        plugin=plugin,
        nccl_version=evidence.version,
        library=evidence.library,
        hosts=tuple(sorted(evidence.hosts)),
        ranks=evidence.ranks,
        network_channels=network,
        local_channels=local.total(),
        intra_node=next((name for name, _ in local.most_common(1)), None),
        other_devices=tuple(name for name in evidence.devices.with_link("IB", "RoCE", None) if name not in hcas),
        interfaces=tuple(evidence.interfaces),
        relaxed_ordering=relaxed_ordering(evidence, plugin),
        sharp=sharp_state(evidence),
        pxn=any(route.proxied for _, route in evidence.routes),
    )
