"""Looks up Azure VM sizes by name: GPUs, InfiniBand adapters and memory, from vm_sizes.toml."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from typing import Literal

_PREFIX = "standard_"
_HEAD = re.compile(
    r"(?P<family>A|B|D[CS]?|EC?|FX?|GS?|H[BCX]?|L|M|N[A-Z]{1,2})"
    r"(?P<vcpus>\d{1,4})(?:-\d{1,3})?"  # HB120-16rs_v3 offers 16 of its 120 cores
    r"(?P<letters>[A-Z]{0,6})(?:G\d)?",  # ND128isrG5_GB300_v6
    re.I | re.A,
)
_ACCELERATOR = re.compile(r"[A-Z]+\d+[A-Z]*", re.I | re.A)  # H100, MI300X, RTXPRO6000BSE
_DESCRIPTOR = re.compile(r"[A-Z]+|\d+", re.I | re.A)  # xl, NDR, flex, noIB; the 3 of M176ds_3_v3
_GENERATION = re.compile(r"v(\d{1,2})", re.I | re.A)

# A name of only a family and a number is a size of the first generation. These are the largest numbers ("Previous
# generations of virtual machine sizes"); a larger one means that somebody typed a GPU: H100, A100, L40. A10 was also a
# size, retired and without RDMA, but today it is a GPU.
_LARGEST_BARE = {"A": 9, "D": 14, "DS": 14, "F": 16, "G": 5, "GS": 5, "H": 16, "M": 128, "NC": 24, "NV": 24}
# Sizes that have RDMA without the letter `r`.
_UNLETTERED_RDMA = frozenset({"a8", "a9"})
# The RDMA hardware of these sizes is not an SR-IOV device in the VM, so no container can use it ("HPC virtual machine
# sizes" of 2020, list of SR-IOV sizes; for NC24r also Azure ML's distributed GPU training guide). All later sizes have
# SR-IOV.
_WITHOUT_SR_IOV = frozenset({"a8", "a9", "h16r", "h16mr", "nc24r", "nc24rs_v2", "nd24rs"})

_AMD_MODELS = ("MI", "V620", "V710")


@dataclass(frozen=True)
class VMName:
    """The parts of a well-formed name. A size of that name need not exist."""

    text: str  # as given, without `Standard_` and surrounding blanks
    family: str  # in upper case, such as `ND`
    vcpus: int
    letters: str  # the additive ones in lower case, such as `isr`
    model: str | None  # accelerator in upper case, such as `H100`
    generation: int  # 5 for `_v5`; 1 without a version

    @property
    def rdma(self) -> bool:
        """Whether the hardware has InfiniBand adapters, usable or not."""
        return "r" in self.letters or self._stem in _UNLETTERED_RDMA

    @property
    def sr_iov(self) -> bool:
        """Whether a VM can use the InfiniBand adapters."""
        return self.rdma and self._stem not in _WITHOUT_SR_IOV

    @property
    def _stem(self) -> str:
        version = f"_v{self.generation}" if self.generation > 1 else ""
        return f"{self.family}{self.vcpus}{self.letters}{version}".lower()


def parse_vm_name(name: str) -> VMName | None:
    """Parse the name of a size, in any case, with or without `Standard_`; None if no size can have this name."""
    text = bare_name(name)
    first, *rest = text.split("_")
    head = _HEAD.fullmatch(first)
    if rest and rest[-1].lower() == "promo":
        rest.pop()
    version = _GENERATION.fullmatch(rest[-1]) if rest else None
    middle = rest[:-1] if version else rest
    models = [part.upper() for part in middle if _ACCELERATOR.fullmatch(part)]
    if head is None or not all(_ACCELERATOR.fullmatch(part) or _DESCRIPTOR.fullmatch(part) for part in middle):
        return None
    family, vcpus, letters = head["family"].upper(), int(head["vcpus"]), head["letters"].lower()
    if not (letters or middle or version) and vcpus > _LARGEST_BARE.get(family, 0):
        return None
    return VMName(text, family, vcpus, letters, models[0] if models else None, int(version[1]) if version else 1)


def bare_name(name: str) -> str:
    """The name without `Standard_` and surrounding blanks."""
    text = name.strip()
    return text[len(_PREFIX) :] if text.lower().startswith(_PREFIX) else text


class UnknownVMSize(LookupError):  # noqa: N818 - reads as what happened
    """The text is not the name of an Azure VM size; the message gives the nearest known one."""


@dataclass(frozen=True, kw_only=True)
class VMSize:
    """One VM size. A value is None if it is not published.

    Attributes:
        name: name such as `Standard_ND96isr_H100_v5`; as given if the size is not in the table.
        gpus: GPUs that software sees in one VM; 0 for a CPU size.
        gpu_model: model such as `H100`.
        gpu_memory_gb: memory of one GPU, in GB.
        interconnect: what joins the GPUs inside the VM: `NVLink 4`, `NVLink in pairs`, `Infinity Fabric`, `PCIe`.
        hcas: number of InfiniBand adapters of the hardware; None if there are some, but their number is unknown.
        hca_gbps: line rate of one adapter, in Gb/s.
        hca_expected_gbps: bandwidth that `ib_write_bw` must reach on one adapter, in Gb/s.
        sr_iov: whether a VM can use the adapters.
        ethernet_gbps: bandwidth of the VM's ordinary network, all interfaces together, in Gb/s.
        vcpus: number of vCPUs.
        memory_gib: main memory, in GiB.
        local_disk_gib: temporary disk, in GiB.
        bus_bandwidth: all-reduce bus bandwidth that one VM must reach with large messages, in GB/s.
        bus_bandwidth_two_nodes: the same between two VMs.
        accelerator: `nvidia` (NCCL) or `amd` (RCCL); None if there is no GPU or the name does not tell.
        topology: which of Azure's NCCL topology files fits: `ndv2`, `ndv4`, `ndv5` or `ncv4`.
        retired: day on which Azure stopped offering the size, as an ISO date.
        source: origin of these values.
        known: whether the size is in the table; if not, all values come from its name.
    """

    name: str
    gpus: int | None
    gpu_model: str | None = None
    gpu_memory_gb: float | None = None
    interconnect: str | None = None
    hcas: int | None
    hca_gbps: int | None = None
    hca_expected_gbps: int | None = None
    sr_iov: bool = False
    ethernet_gbps: float | None = None
    vcpus: int | None = None
    memory_gib: int | None = None
    local_disk_gib: int | None = None
    bus_bandwidth: float | None = None
    bus_bandwidth_two_nodes: float | None = None
    accelerator: Literal["nvidia", "amd"] | None = None
    topology: str | None = None
    retired: str | None = None
    source: str
    known: bool = True

    @property
    def infiniband(self) -> bool:
        """Whether a VM of this size has InfiniBand that it can use."""
        return self.hcas != 0 and self.sr_iov

    @property
    def short_name(self) -> str:
        """The name in lower case without `Standard_`, such as `nd96isr_h100_v5`."""
        return bare_name(self.name).lower()


def lookup_vm_size(name: str) -> VMSize:
    """Look up a VM size in the table. For a size that is not there, derive what its name tells.

    Args:
        name: name of the size, in any case, with or without `Standard_`.

    Raises:
        UnknownVMSize: no VM size can have this name.
    """
    found = _table().get(bare_name(name).lower())
    if found:
        return found
    parts = parse_vm_name(name)
    if parts is None:
        nearest = nearest_vm_size(name)
        advice = f"did you mean {nearest}?" if nearest else "a size is written like Standard_ND96isr_H100_v5."
        raise UnknownVMSize(f"{name!r} is not the name of an Azure VM size; {advice}")
    return _size_of(parts)


def known_vm_sizes() -> tuple[VMSize, ...]:
    """Every size of the table, oldest series first."""
    return tuple(_table().values())


def nearest_vm_size(name: str) -> str | None:
    """The most similar name in the table; None if none is similar."""
    typed = re.sub(r"[^a-z0-9]+", "_", name.strip().lower())  # the portal writes "Standard ND40rs v2"
    matches = get_close_matches(bare_name(typed), _table(), n=1)
    return _table()[matches[0]].name if matches else None


@cache
def _table() -> Mapping[str, VMSize]:
    text = files("azureml_strategy.network").joinpath("vm_sizes.toml").read_text(encoding="utf-8")
    sizes: dict[str, VMSize] = {}
    for series in tomllib.loads(text)["series"]:
        for name, own in series.pop("sizes").items():
            sizes[name.lower()] = VMSize(name=f"Standard_{name}", **(series | own))
    return sizes


def _size_of(name: VMName) -> VMSize:
    """Derive a size that is not in the table from its name alone."""
    has_gpu = name.family.startswith("N") and name.family not in ("NM", "NP")  # media transcoders, FPGAs
    model = name.model if has_gpu else None
    return VMSize(
        name=f"Standard_{name.text}",
        gpus=None if has_gpu else 0,
        gpu_model=model,
        hcas=None if name.rdma else 0,
        sr_iov=name.sr_iov,
        vcpus=name.vcpus,
        accelerator=("amd" if model.startswith(_AMD_MODELS) else "nvidia") if model else None,
        source="the letters of its name",
        known=False,
    )
