"""Finds the user's NCCL settings that contradict the hardware of the node."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from azureml_strategy.network.findings import Finding, Verdict, total_gbytes
from azureml_strategy.network.infiniband import HCA
from azureml_strategy.network.node import Node

# NCCL parses a flag with strtoll, so it reads `true` and `yes` as 0.
_NUMBER = re.compile(r"\s*[+-]?(\d+)", re.A)
# Values of NCCL_NET_GDR_LEVEL up to PXB, NCCL's default. In a VM without a topology file every adapter is farther away.
_NEAR_LEVELS = ("LOC", "PIX", "PXB", "0", "1", "2")


@dataclass(frozen=True)
class DeviceFilter:
    """The devices that a list selects: `mlx5` by prefix, `=mlx5_0:1` exactly, `^mlx5_8` all but these.

    A bare name is a prefix: `mlx5_1` also selects `mlx5_10`. A port follows a colon; without a port, every port
    matches. A blank is part of a name: for `a, b` NCCL looks for a device ` b` and finds none. A list without any
    name matches every device.

    Source: NCCL user guide, NCCL_IB_HCA and NCCL_SOCKET_IFNAME, and parseStringList and matchIfList in NCCL's sources.
    """

    names: tuple[str, ...]
    exact: bool
    exclude: bool

    @classmethod
    def parse(cls, text: str) -> DeviceFilter:
        """Parse a variable's value."""
        exclude = text.startswith("^")
        text = text.removeprefix("^")
        exact = text.startswith("=")
        entries = text.removeprefix("=").split(",")
        return cls(tuple(entry for entry in entries if entry.partition(":")[0]), exact, exclude)

    def selects(self, name: str, port: int | None = None) -> bool:
        """Whether the list selects a device (and port)."""
        listed = not self.names or any(self._matches(entry, name, port) for entry in self.names)
        return listed != self.exclude

    def _matches(self, entry: str, name: str, port: int | None) -> bool:
        wanted, _, wanted_port = entry.partition(":")
        if wanted_port and port is not None and wanted_port != str(port):
            return False
        return name == wanted if self.exact else name.startswith(wanted)


def hca_list(hcas: Iterable[HCA]) -> str:
    """The value of NCCL_IB_HCA that selects exactly these ports."""
    return "=" + ",".join(f"{hca.name}:{hca.port}" for hca in hcas)


@dataclass(frozen=True)
class _Configured:
    """The configured settings with their sources; builds the findings about them."""

    settings: Mapping[str, tuple[str, str]]

    def value(self, name: str) -> str:
        """The value of a variable; empty if it is not set."""
        return self.settings[name][0] if name in self.settings else ""

    def is_on(self, name: str) -> bool:
        number = _NUMBER.match(self.value(name))
        return number is not None and int(number[1]) != 0

    def finding(self, verdict: Verdict, name: str, text: str, advice: str | None = None) -> Finding:
        """A finding about a variable. The default advice is to remove the variable, and from where."""
        value, source = self.settings[name]
        place = "" if source == "environment" else f" in {source}"
        origin = source if place else "the job's environment variables, the image and the script"
        return Finding(verdict, f"{name}={value}{place}", text, advice or f"Remove {name} from {origin}.")


def find_conflicts(node: Node, configured: Mapping[str, tuple[str, str]], num_nodes: int) -> Iterator[Finding]:
    """Compare the node's hardware with the value and source of each variable, from `configured_settings`.

    The verdict `problem` means that InfiniBand is present but will not be used, or that NCCL cannot start.
    """
    settings = _Configured(configured)
    if node.usable_hcas:
        yield from _infiniband_off(node, settings)
        yield from _adapters(node, settings)
        yield from _partitions(node, settings)
        yield from _gpudirect_off(node, settings)
    elif node.virtual:
        yield from _no_infiniband(node, settings)
    if node.interfaces:
        yield from _interfaces(node, settings, num_nodes)
    yield from _missing_files(node, settings)
    yield from _inside_node(node, settings)
    yield from _traps(settings)


def _infiniband_off(node: Node, settings: _Configured) -> Iterator[Finding]:
    total = total_gbytes(node)
    rate = f" with {total:g} GB/s" if total else ""
    text = f"{len(node.usable_hcas)} InfiniBand adapter(s){rate} stay unused; {_sockets(node)}."
    if settings.is_on("NCCL_IB_DISABLE"):
        yield settings.finding("problem", "NCCL_IB_DISABLE", text)
    if settings.value("NCCL_NET").lower() == "socket":
        yield settings.finding("problem", "NCCL_NET", text)


def _sockets(node: Node) -> str:
    """The bandwidth that remains without InfiniBand, in words; with numbers if they are known."""
    gbps = node.vm_size.ethernet_gbps if node.vm_size else None
    interface = node.bootstrap
    gbps = gbps or (interface.speed_gbps if interface else None)
    total = total_gbytes(node)
    if not gbps or not total:
        return "traffic between nodes goes through sockets"
    return f"sockets carry {gbps / 8:g} GB/s at most, {total / (gbps / 8):.0f} times less"


def _no_infiniband(node: Node, settings: _Configured) -> Iterator[Finding]:
    ethernet = [hca.name for hca in node.hcas if hca.is_ethernet]
    text = f"NCCL would take accelerated networking ({', '.join(ethernet)}) for InfiniBand and run RoCE over it."
    if ethernet and "NCCL_IB_DISABLE" in settings.settings and not settings.is_on("NCCL_IB_DISABLE"):
        yield settings.finding("warning", "NCCL_IB_DISABLE", text)
    chosen = DeviceFilter.parse(settings.value("NCCL_IB_HCA") or "^")
    if any(map(chosen.selects, ethernet)):
        yield settings.finding("warning", "NCCL_IB_HCA", text)
    if settings.value("NCCL_NET").lower() == "ib":
        text = "no InfiniBand port is usable here, and NCCL ends with an error where it may use nothing else."
        yield settings.finding("problem", "NCCL_NET", text)


def _adapters(node: Node, settings: _Configured) -> Iterator[Finding]:
    text = settings.value("NCCL_IB_HCA")
    if not text:
        return
    chosen = DeviceFilter.parse(text)
    selected = [hca for hca in node.usable_hcas if chosen.selects(hca.name, hca.port)]
    ethernet = [hca.name for hca in node.hcas if hca.is_ethernet and chosen.selects(hca.name, hca.port)]
    present = ", ".join(f"{hca.name}:{hca.port}" for hca in node.usable_hcas)
    if not selected:
        text = f"it selects none of the usable InfiniBand ports ({present}); {_sockets(node)}."
        yield settings.finding("problem", "NCCL_IB_HCA", text)
    elif len(selected) < len(node.usable_hcas):
        rates = f"{total_gbytes(node, selected):g} of {total_gbytes(node):g} GB/s"
        text = f"it selects {len(selected)} of {len(node.usable_hcas)} usable InfiniBand ports: {rates}."
        yield settings.finding("warning", "NCCL_IB_HCA", text)
    if selected and ethernet:
        text = f"it also selects {', '.join(ethernet)}, which is Ethernet: NCCL would mix RoCE with InfiniBand."
        yield settings.finding("warning", "NCCL_IB_HCA", text)


def _partitions(node: Node, settings: _Configured) -> Iterator[Finding]:
    """Check that all adapters have their partition key at the same index: NCCL uses one index for all of them."""
    chosen = DeviceFilter.parse(settings.value("NCCL_IB_HCA"))
    by_index: dict[int | None, list[HCA]] = {}
    for hca in node.usable_hcas:
        if chosen.selects(hca.name, hca.port):
            by_index.setdefault(hca.full_pkey, []).append(hca)
    if len(by_index) < 2 or settings.value("NCCL_IB_PKEY"):
        return
    places = "; ".join(f"{index} on {', '.join(hca.name for hca in hcas)}" for index, hcas in by_index.items())
    index, most = max(by_index.items(), key=lambda entry: len(entry[1]))
    yield Finding(
        "problem",
        "InfiniBand partition",
        f"the first partition key with full membership is at index {places}, but NCCL takes one index for all "
        "adapters: transfers over those that have another key there fail with completion 12.",
        "Replace the node, and report it to Azure; or leave adapters out, by the job's environment variables "
        f"NCCL_IB_PKEY={index} and NCCL_IB_HCA={hca_list(most)}.",
    )


def _gpudirect_off(node: Node, settings: _Configured) -> Iterator[Finding]:
    if node.gpudirect is None:
        return
    topology = node.topology_file or node.default_topology or settings.value("NCCL_TOPO_FILE")
    if settings.value("NCCL_NET_GDR_LEVEL") in _NEAR_LEVELS and not topology:
        yield settings.finding(
            "warning",
            "NCCL_NET_GDR_LEVEL",
            "without a topology file every GPU is farther from every adapter, so GPUDirect RDMA is off: each byte "
            "between nodes is copied through the host's memory.",
            "Set NCCL_NET_GDR_LEVEL=SYS.",
        )
    name = "NCCL_IB_PCI_RELAXED_ORDERING"
    if node.virtual and settings.value(name) == "0":
        yield settings.finding("warning", name, "GPUDirect RDMA writes are slow in a VM.")


def _interfaces(node: Node, settings: _Configured, num_nodes: int) -> Iterator[Finding]:
    up = {interface.name: interface for interface in node.interfaces if interface.up}
    chosen = DeviceFilter.parse(settings.value("NCCL_SOCKET_IFNAME"))
    # PyTorch splits gloo's list at commas and opens one device for each name, without prefix matching.
    wanted = settings.value("GLOO_SOCKET_IFNAME").split(",")
    by_nccl, by_gloo = list(filter(chosen.selects, up)), [name for name in up if name in wanted]
    for variable, selected, is_found in (
        ("NCCL_SOCKET_IFNAME", by_nccl, bool(by_nccl)),
        ("GLOO_SOCKET_IFNAME", by_gloo, set(by_gloo) == set(wanted)),
    ):
        if not settings.value(variable):
            continue
        if not is_found:
            text = f"no interface that is up has this name; there are {', '.join(up)}. Nodes cannot meet."
            yield settings.finding("problem", variable, text)
        elif num_nodes > 1 and all(up[name].kind == "loopback" for name in selected):
            text = "it leaves only the loopback interface, by which no other node is reached."
            yield settings.finding("problem", variable, text)


def _missing_files(node: Node, settings: _Configured) -> Iterator[Finding]:
    path = settings.value("NCCL_TOPO_FILE")
    if path and not os.path.isfile(path):
        yield settings.finding(
            "warning",
            "NCCL_TOPO_FILE",
            "there is no such file here (on Azure's images it is on the host, not in the container), so GPUs and "
            "adapters are paired blindly.",
            "Mount /opt/microsoft into the container, or copy the file into the image.",
        )
    graph = settings.value("NCCL_GRAPH_FILE")
    if graph and not _is_azures_graph(node, graph):
        text = "it fixes NCCL's search for one machine; with fewer GPUs or adapters NCCL fails to start."
        yield settings.finding("warning", "NCCL_GRAPH_FILE", text)


def _is_azures_graph(node: Node, graph: str) -> bool:
    """Whether this is the graph file that Azure's image sets in /etc/nccl.conf, on the one size that it is made for.

    Images before May 2024 also set it on the smaller sizes of the series. There NCCL fails with it or is four times
    slower (azhpc-images pull request 347; azurehpc pull request 730).
    """
    fits = node.vm_size is not None and node.vm_size.topology == "ncv4"
    return fits and "/ncv4" in graph and os.path.isfile(graph)


def _inside_node(node: Node, settings: _Configured) -> Iterator[Finding]:
    size = node.vm_size
    if len(node.gpus.models) < 2 or not settings.is_on("NCCL_P2P_DISABLE"):
        return
    expected = f" instead of {size.bus_bandwidth:g} GB/s" if size and size.bus_bandwidth else ""
    text = f"GPUs of one node talk through the host's memory{expected}."
    yield settings.finding("warning", "NCCL_P2P_DISABLE", text)


def _traps(settings: _Configured) -> Iterator[Finding]:
    if settings.is_on("CUDA_LAUNCH_BLOCKING"):
        text = "each kernel waits for the one before: a tool for debugging only."
        yield settings.finding("warning", "CUDA_LAUNCH_BLOCKING", text)
    if settings.value("NCCL_MIN_CHANNELS"):
        text, advice = "NCCL knows no such variable.", "It is NCCL_MIN_CTAS since 2.17."
        yield settings.finding("warning", "NCCL_MIN_CHANNELS", text, advice)
    if "WARN" in settings.value("NCCL_DEBUG_SUBSYS").upper().split(","):
        text = "WARN is a level (NCCL_DEBUG), no subsystem: the log stays empty."
        yield settings.finding("warning", "NCCL_DEBUG_SUBSYS", text)
