"""NCCL's notation for lists of devices, as NCCL_IB_HCA and NCCL_SOCKET_IFNAME hold them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from azureml_strategy.network.infiniband import HCA


@dataclass(frozen=True)
class DeviceFilter:
    """Which devices a list selects: `mlx5` by prefix, `=mlx5_0:1` exactly, `^mlx5_8` all but these.

    Source: NCCL user guide, NCCL_IB_HCA and NCCL_SOCKET_IFNAME, and parseStringList and matchIfList in NCCL's sources.
    A bare name is a prefix: `mlx5_1` selects `mlx5_10` as well. A port follows a colon; without one every port counts.
    A blank is part of a name: after `a, b` NCCL finds no device ` b`. A list without a name stands for every device.
    """

    names: tuple[str, ...]
    exact: bool
    exclude: bool

    @classmethod
    def parse(cls, text: str) -> DeviceFilter:
        """Read a variable's value."""
        exclude = text.startswith("^")
        text = text.removeprefix("^")
        exact = text.startswith("=")
        entries = text.removeprefix("=").split(",")
        return cls(tuple(entry for entry in entries if entry.partition(":")[0]), exact, exclude)

    def selects(self, name: str, port: int | None = None) -> bool:
        """Whether a device (and port) is selected."""
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
