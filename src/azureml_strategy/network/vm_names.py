"""What the name of an Azure VM size says: Standard_ND96isr_H100_v5.

Family and vCPUs, additive letters, accelerator, generation, as Microsoft's "Azure virtual machine sizes naming
conventions" has them. The letter `r` is not on that page; "HPC virtual machine sizes" gives its meaning.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

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

# A family and a number alone name a size of the first generation, whose largest numbers these are ("Previous
# generations of virtual machine sizes"); beyond them somebody typed a GPU: H100, A100, L40. A10 was a size as well,
# retired and without RDMA, but today it is a GPU.
_LARGEST_BARE = {"A": 9, "D": 14, "DS": 14, "F": 16, "G": 5, "GS": 5, "H": 16, "M": 128, "NC": 24, "NV": 24}
# RDMA without the letter.
_UNLETTERED_RDMA = frozenset({"a8", "a9"})
# RDMA hardware that is no SR-IOV device in the VM, so that no container can use it ("HPC virtual machine sizes" of
# 2020, list of SR-IOV sizes; for NC24r also Azure ML's distributed GPU training guide). All later sizes have SR-IOV.
_WITHOUT_SR_IOV = frozenset({"a8", "a9", "h16r", "h16mr", "nc24r", "nc24rs_v2", "nd24rs"})


@dataclass(frozen=True)
class VMName:
    """The parts of a well-formed name, which need not be a size that exists.

    Attributes:
        text: the name as it was given, without `Standard_` and surrounding blanks.
        family: such as `ND`, upper case.
        vcpus: vCPUs of the VM.
        letters: additive letters, lower case: `isr`.
        model: the accelerator, upper case: `H100`; None where the name has none.
        generation: 5 for `_v5`, 1 without.
    """

    text: str
    family: str
    vcpus: int
    letters: str
    model: str | None
    generation: int

    @property
    def rdma(self) -> bool:
        """Whether the hardware has InfiniBand adapters, usable or not."""
        return "r" in self.letters or self._stem in _UNLETTERED_RDMA

    @property
    def sr_iov(self) -> bool:
        """Whether a VM can use them."""
        return self.rdma and self._stem not in _WITHOUT_SR_IOV

    @property
    def has_gpu(self) -> bool:
        """Whether the family has GPUs: all of N but NM (media transcoders) and NP (FPGAs)."""
        return self.family.startswith("N") and self.family not in ("NM", "NP")

    @property
    def _stem(self) -> str:
        version = f"_v{self.generation}" if self.generation > 1 else ""
        return f"{self.family}{self.vcpus}{self.letters}{version}".lower()


def parse_vm_name(name: str) -> VMName | None:
    """The parts of a size's name, in any case, with or without `Standard_`; None where it is no name of a size."""
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
