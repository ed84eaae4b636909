"""Gathers the facts from the messages of a log; `verdict` and `reader` draw the conclusions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from azureml_strategy.network.nccl_log.devices import Devices, Route, count, family, remember
from azureml_strategy.network.nccl_log.failures import ErrorLog
from azureml_strategy.network.nccl_log.rules import explain

_VERSION = re.compile(r"\b([NR])CCL version ?:? ?(\d{1,4}(?:\.\d{1,6}){1,3})")
_USING = re.compile(r"NET/([^:]{1,64}?) ?: Using\b(.*)")
_NETWORK = re.compile(r"(?:Using network|(?:Assigned|Initialized) NET plugin) (.{1,64}?)(?: to comm\b|\s{2}|$)")
_SOCKETS = re.compile(r"\[\d+\]([^\s:\[\]]{1,64})")
_BOOTSTRAP = re.compile(r"(?:OOB|Bootstrap ?: Using) (?:\[\d+\])?([^\s:]{1,64}):")
_GPUDIRECT = re.compile(
    r"GPU Direct RDMA (?:\([\w-]+\) )?(enabled|disabled) for (GPU|HCA)(?:.*'([^'\s]{1,64})')?", re.I
)
_NAMED = re.compile(
    r"SHARP rank \d+/\d+ initialized on ([^\s:]{1,64}):\d|Made virtual device \[\d+\] name=(\S{1,64})", re.I
)
_COMMUNICATOR = re.compile(r"\b(n[rR]anks|nNodes|MNNVL) (\d{1,9})")
_SET = re.compile(r"(NCCL_\w+) set by environment to ([^\s.]{1,64})")
_TORCH = re.compile(
    r"nccl(?:UnhandledCuda|System|Internal|Remote)Error|ncclInvalid(?:Usage|Argument)|unhandled (?:system|cuda) error"
    r"|Watchdog caught|NCCL operations have failed|communicator was aborted"
    r"|ncclUniqueId from|watchdog thread|heartbeat monitor timed out",
    re.I,
)
_RANK = re.compile(r"^(?:\[rank\d+\]: ?)")
_LAST_ERROR = "Last error:"
_WATCHED_SETTINGS = {"NCCL_IB_DISABLE", "NCCL_NET", "NCCL_IB_HCA"}


class Evidence:
    """Facts from one log, for all its ranks and hosts together.

    Attributes:
        routes: number of channel lines for each host and route.
        selected: the networks that hosts reported to use.
        loaded: networks found at start, which are not necessarily used.
        interfaces: interfaces of the bootstrap and of sockets, in the order seen.
        bootstrap: interfaces of the bootstrap, over which the ranks found one another.
        hosts: hosts that wrote a message.
        settings: NCCL variables that choose a network, as NCCL read them.
        gpudirect: NCCL's decisions about GPUDirect RDMA, for GPUs (`GPU`) or only for adapters (`HCA`).
        without_module: the first line that blames a missing kernel module for the lack of GPUDirect RDMA.
        without_device: the first line that reports no verbs device.
        failed: network of a failed transfer.
        relaxed_ordering: whether a list of adapters shows relaxed ordering; None without a list.
        nodes: nodes of the largest communicator; 0 if NCCL does not report it.
        nvlink_between_nodes: whether NVLink spans the nodes (MNNVL).
    """

    def __init__(self) -> None:
        self.routes: dict[tuple[str | None, Route], int] = {}
        self.selected: dict[tuple[str | None, str], None] = {}
        self.loaded: dict[str, None] = {}
        self.bootstrap: dict[str, None] = {}
        self.interfaces: dict[str, None] = {}
        self.hosts: dict[str, None] = {}
        self.settings: dict[str, str] = {}
        self.gpudirect: dict[str, set[bool]] = {}
        self.without_module: str | None = None
        self.without_device: str | None = None
        self.failed: str | None = None
        self.devices = Devices()
        self.relaxed_ordering: bool | None = None
        self.errors = ErrorLog(explain)
        self.version: str | None = None
        self.library: Literal["nccl", "rccl"] = "nccl"
        self.ranks: int | None = None
        self.nodes = 0
        self.nvlink_between_nodes = False
        self._expects_error = False

    def channel(self, host: str | None, route: Route, lines: int) -> None:
        """Count channel lines of a host and route."""
        self._host(host)
        count(self.routes, (host, route), lines)

    def message(self, host: str | None, level: str, text: str) -> None:
        """Read any other message."""
        self._host(host)
        if level == "WARN":
            self._warning(text)
            return
        for mark, read in _READERS:
            if mark in text:
                read(self, text)
        for mark, read_of_host in _READERS_OF_HOST:
            if mark in text:
                read_of_host(self, host, text)

    def other(self, text: str) -> int:
        """Read a line that names NCCL but is not its message, such as torch's report of an exception.

        Returns:
            How many of the following lines to pass on as well.
        """
        self._version(text)
        text = _RANK.sub("", text.strip())
        if self._expects_error:
            self._expects_error = False
            self._warning(text)
        elif text.endswith(_LAST_ERROR):
            self._expects_error = True
            return 1
        elif _TORCH.search(text):
            self.errors.add(text)
            return 2
        return 0

    def _host(self, host: str | None) -> None:
        if host and host not in self.hosts:
            remember(self.hosts, host, None)

    def _warning(self, text: str) -> None:
        self.errors.add(text)
        if "Got completion" in text:
            self.failed = "IB"
            self.devices.gids |= "localGid" in text or "remoteGid" in text

    def _version(self, text: str) -> None:
        if found := _VERSION.search(text):
            self.library = "rccl" if found[1] == "R" else self.library
            self.version = self.version or found[2]

    def _using(self, host: str | None, text: str) -> None:
        if not (found := _USING.search(text)):
            return
        if family(found[1]) == "socket":
            remember(self.loaded, found[1], None)
            for name in _SOCKETS.findall(found[2]):
                remember(self.interfaces, name, None)
        elif self.devices.add_list(host, found[2]):
            remember(self.loaded, found[1], None)
            self.relaxed_ordering = bool(self.relaxed_ordering) or "[RO]" in found[2]

    def _bootstrap_interface(self, text: str) -> None:
        if found := _BOOTSTRAP.search(text):
            remember(self.interfaces, found[1], None)
            remember(self.bootstrap, found[1], None)

    def _network(self, host: str | None, text: str) -> None:
        if found := _NETWORK.search(text):
            remember(self.selected, (host, found[1]), None)

    def _loaded(self, text: str) -> None:
        found = _NETWORK.search(text)
        remember(self.loaded, found[1] if found else "OFI", None)

    def _gpudirect(self, text: str) -> None:
        network = text.partition(" : ")[0].removeprefix("NET/")
        found = _GPUDIRECT.search(text)
        if not found or family(network) in ("socket", "ofi"):
            return
        self.gpudirect.setdefault(found[2].upper(), set()).add(found[1].lower() == "enabled")
        if found[3] and family(network) == "verbs":
            self.devices.add_name(found[3])
            remember(self.loaded, "IB", None)
        if "(no module)" in text:
            self.without_module = self.without_module or text

    def _named(self, text: str) -> None:
        if found := _NAMED.search(text):
            self.devices.add_name(found[1] or found[2], "IB" if found[1] else None)

    def _no_device(self, text: str) -> None:
        self.without_device = self.without_device or text

    def _communicator(self, text: str) -> None:
        for name, value in _COMMUNICATOR.findall(text):
            if name == "MNNVL":
                self.nvlink_between_nodes |= value == "1"
            elif name == "nNodes":
                self.nodes = max(self.nodes, int(value))
            else:
                self.ranks = max(self.ranks or 0, int(value))

    def _setting(self, text: str) -> None:
        found = _SET.search(text)
        if found and found[1] in _WATCHED_SETTINGS:
            remember(self.settings, found[1], found[2])


# What a message must contain to be read, and the reader.
_READERS: tuple[tuple[str, Callable[[Evidence, str], None]], ...] = (
    ("CCL version", Evidence._version),
    ("Bootstrap", Evidence._bootstrap_interface),
    ("; OOB ", Evidence._bootstrap_interface),
    ("Initialized NET plugin ", Evidence._loaded),
    ("NET/OFI Selected ", Evidence._loaded),
    ("GPU Direct RDMA ", Evidence._gpudirect),
    ("SHARP rank ", Evidence._named),
    ("Sharp rank ", Evidence._named),
    ("Made virtual device ", Evidence._named),
    ("No device found", Evidence._no_device),
    ("anks ", Evidence._communicator),
    ("set by environment to ", Evidence._setting),
    ("open libibverbs", lambda evidence, text: evidence.errors.add(text)),
    (", retrying", lambda evidence, text: evidence.errors.add(text)),
)
_READERS_OF_HOST: tuple[tuple[str, Callable[[Evidence, str | None, str], object]], ...] = (
    (": Using", Evidence._using),
    ("Using network ", Evidence._network),
    ("Assigned NET plugin ", Evidence._network),
    (":uverbs", lambda evidence, host, text: evidence.devices.add_list(host, text)),
)
