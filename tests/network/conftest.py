"""Trees of files like those that a node's kernel, drivers and image write, and whole nodes made of them."""

from __future__ import annotations

import json
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from azureml_strategy.network.node import Node, read_node

ASSET_TAG = "7783-7084-3265-9085-8269-3286-77"
NOBODY = "http://127.0.0.1:1/"  # refuses every connection
RATES = {56: "56 Gb/sec (4X FDR)", 100: "100 Gb/sec (4X EDR)", 200: "200 Gb/sec (4X HDR)", 400: "400 Gb/sec (4X NDR)"}
ETHERNET, INFINIBAND, LOOPBACK = 1, 32, 772  # ARPHRD_* of the kernel
LIMITS = "Limit                     Soft Limit           Hard Limit           Units     \n"
ROUTES = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT\n"


def job(vm_size: str) -> dict[str, str]:
    """The environment of an Azure ML job on nodes of this size."""
    return {"AZUREML_RUN_ID": "run", "AZUREML_CR_COMPUTE_CONTEXT": json.dumps({"vm_size": vm_size})}


@contextmanager
def metadata_service(answer: Callable[[socket.socket], None]) -> Iterator[tuple[str, list[str]]]:
    """A service on this machine that takes requests and answers each with `answer`: its address, and the requests."""
    requests: list[str] = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            requests.append(self.request.recv(65536).decode())
            answer(self.request)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads, block_on_close = True, False

        def handle_error(self, request: object, client_address: object) -> None:
            """A client that hangs up early is no error."""

    with Server(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/metadata?format=text", requests
        finally:
            server.shutdown()


def says(text: str, status: str = "200 OK") -> Callable[[socket.socket], None]:
    """The answer of a service that sends this text."""
    return lambda connection: connection.sendall(
        f"HTTP/1.1 {status}\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()
    )


class Tree:
    """Writes the files of one node below `root`, which is the `root` argument of what reads them."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, content: str | bytes) -> Path:
        """One file, with the folders above it."""
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    def hca(
        self,
        name: str,
        gbps: int = 400,
        *,
        port: int = 1,
        link_layer: str = "InfiniBand",
        state: str = "4: ACTIVE",
        phys_state: str = "5: LinkUp",
        pkeys: Sequence[str] = ("0x8012", "0x7fff"),
        numa_node: int = 0,
        device_file: bool = True,
    ) -> None:
        """One port of an RDMA adapter; the adapter's device file is left out of /dev on demand."""
        adapter = f"sys/class/infiniband/{name}"
        for file, text in (("link_layer", link_layer), ("state", state), ("phys_state", phys_state)):
            self.write(f"{adapter}/ports/{port}/{file}", f"{text}\n")
        self.write(f"{adapter}/ports/{port}/rate", f"{RATES[gbps]}\n")
        for index, key in enumerate(pkeys):
            self.write(f"{adapter}/ports/{port}/pkeys/{index}", f"{key}\n")
        self.write(f"{adapter}/device/numa_node", f"{numa_node}\n")
        if port == 1:
            verbs = f"uverbs{len(list(self.root.glob('sys/class/infiniband_verbs/*')))}"
            self.write(f"sys/class/infiniband_verbs/{verbs}/ibdev", f"{name}\n")
            if device_file:
                self.write(f"dev/infiniband/{verbs}", "")

    def accelerated_networking(self, name: str = "mlx5_an0") -> None:
        """The Ethernet adapter of most Azure VMs, which is an RDMA device as well."""
        self.hca(name, 100, link_layer="Ethernet", pkeys=("0xffff",))

    def interface(
        self, name: str, *, state: str = "up", kind: int = ETHERNET, speed: int | None = None, default: bool = False
    ) -> None:
        """A network interface, its speed in Mb/s."""
        folder = f"sys/class/net/{name}"
        self.write(f"{folder}/operstate", f"{state}\n")
        self.write(f"{folder}/type", f"{kind}\n")
        if speed is not None:
            self.write(f"{folder}/speed", f"{speed}\n")
        routes = self.root / "proc/net/route"
        rows = routes.read_text() if routes.exists() else ROUTES
        row = f"{name}\t00000000\t0100000A\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
        self.write("proc/net/route", rows + row * default)

    def nvidia(self, model: str, count: int, *, peermem: bool = True) -> None:
        """GPUs, and the kernel module for GPUDirect RDMA."""
        for index in range(count):
            self.write(f"proc/driver/nvidia/gpus/000{index}:00:00.0/information", f"Model: \t\t {model}\nIRQ: \t 0\n")
            self.write(f"dev/nvidia{index}", "")
        if peermem:
            self.write("sys/module/nvidia_peermem/version", "535.161.08\n")

    def amd(self, name: str, count: int) -> None:
        """GPUs and the two CPUs that the AMD driver counts as nodes too."""
        for index in range(2 + count):
            folder = f"sys/class/kfd/kfd/topology/nodes/{index}"
            self.write(f"{folder}/properties", f"cpu_cores_count {48 * (index < 2)}\nsimd_count {1216 * (index > 1)}\n")
            self.write(f"{folder}/name", f"{name if index > 1 else ''}\n")
        self.write("sys/module/amdgpu/version", "6.7.0\n")

    def memlock(self, limit: str) -> None:
        """The limit of locked memory: bytes, or `unlimited`."""
        self.write("proc/self/limits", f"{LIMITS}Max locked memory         {limit:20} {limit:20} bytes     \n")

    def azure(self) -> None:
        """What every Azure VM has: its asset tag and eth0. Memory may be locked, as AmlCompute allows it."""
        self.write("sys/class/dmi/id/chassis_asset_tag", f"{ASSET_TAG}\n")
        self.interface("lo", state="unknown", kind=LOOPBACK)
        self.interface("eth0", speed=50000, default=True)
        self.memlock("unlimited")

    def topology(self, series: str) -> Path:
        """Azure's topology file, mounted into the container."""
        return self.write(f"opt/microsoft/{series}-topo.xml", "<system/>")

    def read(self, environ: dict[str, str] | None = None) -> Node:
        """The node's facts; no metadata service answers."""
        return read_node(self.root, environ or {}, metadata_url=NOBODY)

    def nd96isr_h100_v5(self) -> Node:
        """Eight HCAs beside accelerated networking, in a container without the host's topology file."""
        self.azure()
        self.nvidia("NVIDIA H100 80GB HBM3", 8)
        for index in range(8):
            self.hca(f"mlx5_ib{index}", 400, numa_node=index // 4)
        self.accelerated_networking()
        return self.read(job("Standard_ND96isr_H100_v5"))

    def nd40rs_v2(self) -> Node:
        """One HCA."""
        self.azure()
        self.nvidia("Tesla V100-SXM2-32GB", 8, peermem=False)
        self.hca("mlx5_ib0", 100)
        return self.read(job("Standard_ND40rs_v2"))

    def nc24rs_v3(self) -> Node:
        """An adapter of the mlx4 driver, and IP over InfiniBand that is down."""
        self.azure()
        self.nvidia("Tesla V100-PCIE-16GB", 4, peermem=False)
        self.hca("mlx4_0", 56)
        self.interface("ib0", state="down", kind=INFINIBAND)
        return self.read(job("Standard_NC24rs_v3"))

    def nc96ads_a100_v4(self) -> Node:
        """No InfiniBand, but an RDMA device all the same."""
        self.azure()
        self.nvidia("NVIDIA A100 80GB PCIe", 4, peermem=False)
        self.accelerated_networking()
        return self.read(job("Standard_NC96ads_A100_v4"))

    def nd96isr_mi300x_v5(self) -> Node:
        """AMD GPUs, for which RCCL stands in for NCCL."""
        self.azure()
        self.amd("ip discovery", 8)
        for index in range(8):
            self.hca(f"mlx5_ib{index}", 400, numa_node=index // 4)
        self.accelerated_networking()
        return self.read(job("Standard_ND96isr_MI300X_v5"))

    def nd128isr_gb200_v6(self) -> Node:
        """Four HCAs and the open driver, whose GPUDirect RDMA works by DMA-BUF."""
        self.azure()
        self.nvidia("NVIDIA GB200", 4, peermem=False)
        self.write(
            "proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  570.86.15\n"
        )
        for index in range(4):
            self.hca(f"mlx5_ib{index}", 400)
        return self.read(job("Standard_ND128isr_NDR_GB200_v6"))

    def laptop(self) -> Node:
        """No GPU, no RDMA, no Azure; wireless by default."""
        self.interface("lo", state="unknown", kind=LOOPBACK)
        self.interface("docker0", state="down")
        self.interface("wlp2s0", default=True)
        self.memlock("8388608")
        return self.read()


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """An empty tree."""
    return Tree(tmp_path / "root")
