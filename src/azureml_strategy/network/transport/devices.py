"""The verbs devices that a log names, and their link layer."""

from __future__ import annotations

import re
from collections.abc import Iterator

from azureml_strategy.network.transport.bounded import remember

# `[0]mlx5_0:1/IB/SHARP`; a fused adapter is `[2]={[0] mlx5_0:1/IB, [1] mlx5_1:1/IB}` (NCCL 2.22, 2.23).
_ENTRY = re.compile(r"\[(\d{1,6})\](?:=\{([^}]*)|\s*([^\s\[;{]+))")
_DEVICE = re.compile(r"([^\s\[\]{},;:/]{1,64}):(?:uverbs\d+:)?\d+/(IB|RoCE)\b(/SHARP)?")


class Devices:
    """Devices by name and by the index that channel lines use.

    Attributes:
        links: `IB`, `RoCE` or None (not shown) of each device.
        sharp: a device says that its fabric aggregates (SHARP).
        gids: an error showed GIDs, which NCCL prints for Ethernet links only.
    """

    def __init__(self) -> None:
        self.links: dict[str, str | None] = {}
        self.sharp = False
        self.gids = False
        self._by_index: dict[tuple[str | None, int], set[str]] = {}

    def add_list(self, host: str | None, text: str) -> bool:
        """Read the devices of a line; whether it lists any."""
        found = False
        for entry in _ENTRY.finditer(text):
            for name, link, sharp in _DEVICE.findall(entry[2] or entry[3] or ""):
                self._add(host, int(entry[1]), name, link)
                self.sharp |= bool(sharp)
                found = True
        return found

    def add_name(self, name: str, link: str | None = None) -> None:
        """A device whose link layer the line shows or not; a fused one is `mlx5_0+mlx5_1`."""
        for part in filter(None, name.split("+")):
            if link and part in self.links:
                self.links[part] = self.links[part] or link
            remember(self.links, part, link)

    def _add(self, host: str | None, index: int, name: str, link: str) -> None:
        self.add_name(name, link)
        remember(self._by_index, (host, index), set())
        self._by_index.get((host, index), set()).add(link)

    def is_ethernet(self, host: str | None = None, index: int | None = None) -> bool:
        """Whether a channel over this device, or any channel if the device is not listed, runs over Ethernet."""
        links = self._by_index.get((host, index)) if index is not None else None
        links = links or {link for link in self.links.values() if link}
        return links == {"RoCE"} or (not links and self.gids)

    def with_link(self, *links: str | None) -> Iterator[str]:
        """Names of the devices with one of these link layers, in natural order."""
        return iter(sorted((name for name, link in self.links.items() if link in links), key=_natural))


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
