"""Places emulated nodes on the loopback interface, or each in its own network namespace."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from azureml_strategy.cluster.environ import BATCH_PORT, DEFAULT_PORT

_RATE = re.compile(r"[1-9][0-9]*(\.[0-9]+)?[kmg]bit", re.I)
# The first usable address of an Azure subnet is .4. The network exists only between the emulated nodes.
_SUBNET, _FIRST_HOST = "10.0.0", 4
_MOST_NODES = 250


class EmulationError(RuntimeError):
    """The job cannot be emulated here as asked; the message says why and what to type instead."""


@contextmanager
def reserved_port(preferred: int = DEFAULT_PORT) -> Iterator[int]:
    """Reserve Azure ML's own port if it is free, as it always is on a dedicated node, or else any other port.

    Meanwhile a second emulated job cannot take the port, but rank 0 of this job can listen on it. The socket that
    reserves the port takes it for itself alone. Afterwards it shares the port with sockets that are marked reusable,
    such as those of torch's store (socket(7), SO_REUSEADDR).
    """
    holder = _bind(preferred) or _bind(0)
    while holder is None or holder.getsockname()[1] == BATCH_PORT:
        holder = _bind(0)
    with holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        yield int(holder.getsockname()[1])


def _bind(port: int) -> socket.socket | None:
    both = socket.has_dualstack_ipv6()
    holder = socket.socket(socket.AF_INET6 if both else socket.AF_INET)
    if both:
        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    try:
        holder.bind(("", port))
    except OSError:  # taken
        holder.close()
        return None
    return holder


class IsolatedNodes:
    """Nodes in network namespaces, each with its own address, that reach one another only through `eth0`.

    A bridge in a separate namespace acts as the switch, so the machine's own network does not change.

    Args:
        nodes: number of nodes.
        bandwidth: rate at which each node can send, such as `1gbit` or `500mbit`; None leaves the links unshaped.

    Raises:
        EmulationError: this machine or user cannot create namespaces, the rate is not valid, or there are too many
            nodes.
    """

    def __init__(self, nodes: int, bandwidth: str | None) -> None:
        _check_isolation(bandwidth, nodes)
        self.addresses = [f"{_SUBNET}.{_FIRST_HOST + node}" for node in range(nodes)]
        self._bandwidth = bandwidth
        self._names = [f"azureml-{os.getpid()}-{node}" for node in range(nodes)]
        self._switch = f"azureml-{os.getpid()}-switch"

    def command_prefix(self, node: int) -> list[str]:
        """Return the words to put before a command so that it runs on the node."""
        return ["ip", "netns", "exec", self._names[node]]

    def namespace(self, node: int) -> str:
        """Return the file of the node's network namespace, for setns(2)."""
        return f"/run/netns/{self._names[node]}"

    def cut_command(self, node: int) -> list[str]:
        """Return the command that disconnects the node from the switch; any root process of the machine may run it."""
        return self._port_command(node, "down")

    def mend_command(self, node: int) -> list[str]:
        """Return the command that connects the node to the switch again."""
        return self._port_command(node, "up")

    def __enter__(self) -> IsolatedNodes:
        try:
            _run(f"ip netns add {self._switch}")
            _run(f"ip -n {self._switch} link add switch type bridge")
            _run(f"ip -n {self._switch} link set switch up")
            for node, name in enumerate(self._names):
                self._add_node(node, name)
        except BaseException:  # a Ctrl-C must not leave namespaces behind
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        existing = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
        for name in [*self._names, self._switch]:
            if re.search(rf"^{name}\b", existing, re.M):
                _run(f"ip netns delete {name}")

    def _port_command(self, node: int, state: str) -> list[str]:
        return ["ip", "-n", self._switch, "link", "set", f"port{node}", state]

    def _add_node(self, node: int, name: str) -> None:
        _run(f"ip netns add {name}")
        _run(f"ip link add eth0 netns {name} type veth peer name port{node} netns {self._switch}")
        _run(f"ip -n {self._switch} link set port{node} master switch up")
        _run(f"ip -n {name} addr add {self.addresses[node]}/24 dev eth0")
        _run(f"ip -n {name} link set lo up")
        _run(f"ip -n {name} link set eth0 up")
        if self._bandwidth:
            # The bucket must hold what arrives between two timer ticks: 4 ms at HZ=250, 500 kB at 1 Gbit/s.
            _run(f"tc -n {name} qdisc add dev eth0 root tbf rate {self._bandwidth} burst 512kb latency 50ms")


def _check_isolation(bandwidth: str | None, nodes: int) -> None:
    if not sys.platform.startswith("linux"):
        raise EmulationError(f"--isolate needs Linux network namespaces; this is {sys.platform}. Leave it out.")
    if os.geteuid() != 0:
        raise EmulationError(
            f"--isolate needs root to make network namespaces. Type: {_sudo_command()}, or leave --isolate out."
        )
    # Check for root first: the tools are in /usr/sbin, which may not be on the PATH of other users.
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise EmulationError(f"--isolate needs {' and '.join(missing)}: install iproute2, or leave it out.")
    if bandwidth and not _RATE.fullmatch(bandwidth):
        raise EmulationError(f"--bandwidth {bandwidth!r} is no rate. Write 1gbit, 500mbit or 2.5gbit.")
    if nodes > _MOST_NODES:
        raise EmulationError(f"--isolate has addresses for {_MOST_NODES} nodes, not {nodes}. Use fewer.")


def _sudo_command() -> str:
    """Return this command for sudo, with full paths: the PATH of sudo lacks the programs of this environment."""
    program = shutil.which(sys.argv[0])
    if os.path.basename(sys.argv[0]) == "__main__.py":
        again = [sys.executable, "-m", "azureml_strategy.cli"]
    elif program and not program.endswith(".py"):
        again = [os.path.abspath(program)]
    else:
        again = [sys.executable, sys.argv[0]]
    return shlex.join(["sudo", *again, *sys.argv[1:]])


def _run(command: str) -> None:
    done = subprocess.run(command.split(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise EmulationError(
            f"`{command}` failed: {done.stderr.strip()}. This kernel or container does not allow isolated nodes; "
            "leave --isolate out."
        )
