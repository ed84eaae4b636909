"""Gathers the facts from the messages of a log, and explains failure messages by rules."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, NamedTuple

from azureml_strategy.network.nccl_log.devices import Devices, Route, count, family, remember
from azureml_strategy.network.nccl_log.failures import UNKNOWN, ErrorLog, LogError, Severity, explain_completion

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


class Rule(NamedTuple):
    """A kind of message, found by a pattern, what it means, and what to do or type."""

    name: str
    pattern: re.Pattern[str]
    severity: Severity
    explanation: str
    fix: str


# The first rule that matches a message explains it.
RULES = (
    Rule(
        "no interface",
        re.compile(r"no (?:socket|usable listening) interface found|no interface found", re.I),
        "problem",
        "No network interface of this node matches NCCL_SOCKET_IFNAME, so the ranks cannot find one another; nothing "
        "was established.",
        "Set NCCL_SOCKET_IFNAME=eth0, which Azure ML nodes have, or unset it; `ip -brief address` lists interfaces.",
    ),
    Rule(
        "bootstrap time-out",
        re.compile(r"bootstrap.*(?:time-?out|timed out)|(?:missing|waiting for) ranks?\b", re.I),
        "problem",
        "Some ranks did not arrive when NCCL started, so nothing was established.",
        "Look for the ranks that are missing: their logs end early, or their nodes cannot reach the address of rank 0. "
        "Set NCCL_SOCKET_IFNAME=eth0 on all nodes.",
    ),
    Rule(
        "memlock",
        re.compile(r"ibv_(?:reg_\w{2,20}|create_[cq]\w{1,20}|alloc_pd) failed(?:[^,]*Cannot allocate memory|\s*$)"),
        "problem",
        "The adapter could not lock memory: the container's limit of locked memory (`ulimit -l`) is too low.",
        "In the job's resources write docker_args: '--ulimit memlock=-1 --cap-add=IPC_LOCK'; `ulimit -l` must then "
        "print unlimited.",
    ),
    Rule(
        "memory registration",
        re.compile(r"ibv_reg_\w{2,20} failed"),
        "problem",
        "The adapter refused to register memory, and not for want of locked memory: usually the GPUDirect RDMA module "
        "(nvidia_peermem or DMA-BUF) does not fit the driver.",
        "Run once with NCCL_NET_GDR_LEVEL=LOC (no GPUDirect RDMA); with DMA-BUF, try NCCL_DMABUF_ENABLE=0. If either "
        "works, use an image whose driver and module fit.",
    ),
    Rule(
        "queue pair",
        re.compile(r"ibv_modify_qp failed|ibv_create_ah failed|RtrQp failed|RtsQp failed"),
        "problem",
        "Two adapters could not be connected: no route between their addresses. Typical of RoCE (a wrong GID index, "
        "adapters in different subnets) and of InfiniBand paired with Ethernet adapters.",
        "On an InfiniBand size set NCCL_IB_HCA to the InfiniBand adapters only, such as NCCL_IB_HCA=mlx5_ib. Elsewhere "
        "set NCCL_IB_DISABLE=1, or for RoCE leave NCCL_IB_GID_INDEX unset (NCCL 2.21 finds it).",
    ),
    Rule(
        "device",
        re.compile(r"[Uu]nable to open device|ibv_(?:open_device|get_device_list|query_\w{1,20}) failed"),
        "problem",
        "An adapter is listed but cannot be opened: the container has no access to /dev/infiniband.",
        "In the job's resources write docker_args: '--device=/dev/infiniband --ulimit memlock=-1 --cap-add=IPC_LOCK'.",
    ),
    Rule(
        "link",
        re.compile(r"async (?:fatal )?event.*(?:error|violation|fatal|down|catastrophic)"),
        "problem",
        "The adapter reported a fault of its port, cable, switch or queue pair.",
        "If it comes back on one node, cancel the job and start it on other nodes.",
    ),
    Rule(
        "link event",
        re.compile(r"async event"),
        "info",
        "The adapter reported a change of its port, such as a new registration with the subnet manager.",
        "Nothing, unless errors follow.",
    ),
    Rule(
        "libibverbs",
        re.compile(r"open (?:lib)?ibverbs|libibverbs\.so"),
        "warning",
        "The container has no libibverbs, so NCCL cannot see any InfiniBand adapter and uses TCP.",
        "On an InfiniBand size install it in the image: apt-get install libibverbs1 ibverbs-providers.",
    ),
    Rule(
        "nvls",
        re.compile(r"NVLS|[Mm]ulticast"),
        "problem",
        "NVLink SHARP, reduction inside the node's NVSwitch, could not be set up: the node's fabric manager is not "
        "ready, or the container may not use it.",
        "Set NCCL_NVLS_ENABLE=0; ring and tree over NVLink remain.",
    ),
    Rule(
        "sharp",
        re.compile(r"SHARP|Sharp|CollNet"),
        "info",
        "Reduction inside the InfiniBand switches (SHARP) is not available, as on Azure's fabrics without an "
        "aggregation manager. NCCL goes on over the ordinary network.",
        "Nothing; NCCL_COLLNET_ENABLE=0 saves the attempt.",
    ),
    Rule(
        "ofi",
        re.compile(r"NET/OFI|[Ll]ibfabric"),
        "problem",
        "The libfabric plugin (aws-ofi-nccl) failed. Azure has no libfabric provider for its InfiniBand.",
        "On Azure remove the plugin from the image, or set NCCL_NET_PLUGIN=none.",
    ),
    Rule(
        "peer closed",
        re.compile(r"closed by (?:remote )?peer|reset by peer|[Bb]roken pipe|remote process exited|ncclRemoteError"),
        "warning",
        "The other rank went away: it had failed first, or was stopped. This is a consequence.",
        "Find the rank whose log ends first, or has the first error, and read that one.",
    ),
    Rule(
        "virtual function",
        re.compile(
            r"Software caused connection abort|(?:[Cc]onnect|[Bb]ind|[Ll]isten|[Ss]ocket).*"
            r"(?:Invalid argument|Cannot assign requested address)"
        ),
        "problem",
        "NCCL tried an interface without an address of its own. On Azure that is the virtual function of accelerated "
        "networking (enP...): it carries the traffic of eth0, and is not to be used itself.",
        "Set NCCL_SOCKET_IFNAME=eth0 on all nodes.",
    ),
    Rule(
        "unreachable",
        re.compile(r"[Cc]onnection refused|[Nn]o route to host|[Cc]onnection timed out|[Nn]etwork is unreachable"),
        "problem",
        "A rank could not open a TCP connection to another: it is not there yet or any more, or its address belongs to "
        "an interface that other nodes cannot reach.",
        "Set NCCL_SOCKET_IFNAME=eth0 on all nodes; if it is set, look for the rank that died first.",
    ),
    Rule(
        "duplicate GPU",
        re.compile(r"Duplicate GPU detected"),
        "problem",
        "Two ranks use one GPU.",
        "Start at most as many processes on a node as it has GPUs, and leave CUDA_VISIBLE_DEVICES alone: each process "
        "takes the GPU of its local rank.",
    ),
    Rule(
        "shared memory",
        re.compile(r"No space left on device|shared memory segment|/dev/shm"),
        "problem",
        "The container's /dev/shm is full or too small for NCCL's buffers between the GPUs of a node.",
        "In the job's resources write shm_size: 16g (the default is 2g).",
    ),
    Rule(
        "driver",
        re.compile(r"driver version is insufficient|no kernel image|unsupported display driver|forward compatib", re.I),
        "problem",
        "The image's CUDA is newer than the node's driver, or was not built for its GPU.",
        "Use an image with an older CUDA, or a curated environment of Azure ML that fits the node.",
    ),
    Rule(
        "GPU memory",
        re.compile(r"[Cc]uda failure.*out of memory|CUDA error.*out of memory|CUDA out of memory"),
        "problem",
        "No GPU memory was left for NCCL's buffers.",
        "Use a smaller micro-batch, or NCCL_BUFFSIZE=2097152.",
    ),
    Rule(
        "CUDA",
        re.compile(r"[Cc]uda failure|HIP failure|unhandled cuda error|ncclUnhandledCudaError"),
        "problem",
        "A call of CUDA failed inside NCCL. Often the error is an earlier one of a kernel of the model, reported late.",
        "Read the first error of the rank that failed first; CUDA_LAUNCH_BLOCKING=1 in a short run shows its place.",
    ),
    Rule(
        "topology file",
        re.compile(r"XML (?:Import|file|parse)|[Cc]ould not (?:open|find) (?:XML|NET|a path)|Attribute \w+ of node"),
        "problem",
        "The topology or graph file does not describe this node: NCCL_TOPO_FILE or NCCL_GRAPH_FILE belongs to another "
        "VM size.",
        "Unset NCCL_GRAPH_FILE, and set NCCL_TOPO_FILE only to the file of this size, or unset it.",
    ),
    Rule(
        "different collectives",
        re.compile(r"Message truncated|collective mismatch|[Mm]ismatched? (?:collective|data|size)"),
        "problem",
        "Ranks took part in one operation with different sizes: they run different code, a different NCCL, or one of "
        "them left out a collective.",
        "Use one image on all nodes, and see that no rank skips a step, a logging call with sync_dist, or a batch.",
    ),
    Rule(
        "collective time-out",
        re.compile(r"Watchdog caught collective operation timeout|NCCL operations have failed or timed out"),
        "problem",
        "torch stopped the run because a collective did not end in time: a rank died, hangs or runs other code than "
        "the rest, or the network stalls.",
        "Find the rank that did not report this time-out, or reported the lowest sequence number (SeqNum), and read "
        "its log.",
    ),
    Rule(
        "store time-out",
        re.compile(r"ncclUniqueId from"),
        "problem",
        "Rank 0 did not publish the address of NCCL's bootstrap: it failed before, or never started.",
        "Read the log of rank 0, and see that all nodes started and MASTER_ADDR is the first node's address.",
    ),
    Rule(
        "watchdog",
        re.compile(
            r"watchdog thread (?:got stuck|terminated)|heartbeat monitor timed out|communicator was aborted", re.I
        ),
        "warning",
        "torch's watchdog of NCCL stopped the process. This follows a collective that hangs, or another error.",
        "Look for the first error in the log.",
    ),
    Rule(
        "host setting",
        re.compile(r"iommu=pt|NUMA auto balancing|numa_balancing"),
        "info",
        "RCCL dislikes a setting of the host's kernel that a job cannot change.",
        "Nothing.",
    ),
    Rule(
        "unhandled",
        re.compile(r"unhandled system error|ncclSystemError|ncclInternalError|ncclInvalidUsage|ncclInvalidArgument"),
        "warning",
        "torch passes on that NCCL failed, not why.",
        "Read NCCL's own messages before it; without any, run again with NCCL_DEBUG=INFO.",
    ),
)


def explain(text: str) -> LogError:
    """Explain the error that a message reports; its name is `unknown` if no rule matches."""
    if completion := explain_completion(text):
        # Status 5 is a consequence of another error.
        severity: Severity = "warning" if completion.status == 5 else "problem"
        return LogError(f"completion {completion.status}", text, completion.explanation, completion.fix, severity)
    for rule in RULES:
        if rule.pattern.search(text):
            return LogError(rule.name, text, rule.explanation, rule.fix, rule.severity)
    return LogError(
        UNKNOWN,
        text,
        "This reader does not know the message.",
        "Search NVIDIA's NCCL issues for its text, and look for an earlier error in the log.",
        "warning",
    )


class Evidence:
    """Facts from one log, for all its ranks and hosts together. Dictionaries without values are ordered sets."""

    def __init__(self) -> None:
        self.routes: dict[tuple[str | None, Route], int] = {}  # channel lines of each host and route
        self.selected: dict[tuple[str | None, str], None] = {}  # the networks that hosts reported to use
        self.loaded: dict[str, None] = {}  # networks found at start, which are not necessarily used
        self.bootstrap: dict[str, None] = {}  # interfaces over which the ranks found one another
        self.interfaces: dict[str, None] = {}  # those of the bootstrap and of sockets, in the order of the log
        self.hosts: dict[str, None] = {}  # hosts that wrote a message
        self.settings: dict[str, str] = {}  # variables that choose a network, as NCCL read them
        self.gpudirect: dict[str, set[bool]] = {}  # NCCL's decisions for GPUs (`GPU`) or only for adapters (`HCA`)
        self.without_module: str | None = None  # first line that blames a missing kernel module for no GPUDirect RDMA
        self.without_device: str | None = None  # first line that reports no verbs device
        self.failed: str | None = None  # network of a failed transfer
        self.devices = Devices()
        self.relaxed_ordering: bool | None = None  # whether a list of adapters shows it; None without a list
        self.errors = ErrorLog(explain)
        self.version: str | None = None
        self.library: Literal["nccl", "rccl"] = "nccl"
        self.ranks: int | None = None
        self.nodes = 0  # of the largest communicator; 0 if NCCL does not report it
        self.nvlink_between_nodes = False  # MNNVL
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

        Return how many of the following lines to pass on as well.
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
