"""Azure's NCCL topology files: a VM hides its PCIe tree, and NCCL then cannot pair GPUs with adapters."""

from __future__ import annotations

import os
from pathlib import Path

from azureml_strategy.network.vm_sizes import VMSize

# Where Azure's HPC images put them (azhpc-images, components/customizations); a container sees them only if they
# are mounted or copied in.
_PLACES = ("opt/microsoft/{series}-topo.xml", "opt/microsoft/{series}/topo.xml")
# NCCL reads this one by itself.
_NCCL_DEFAULT = "var/run/nvidia-topologyd/virtualTopology.xml"


def topology_file(size: VMSize | None, root: str | Path = "/") -> Path | None:
    """The topology file for a VM size, if this node has it.

    Args:
        size: the node's size.
        root: the folder that holds `opt`.
    """
    if size is None or size.topology is None:
        return None
    paths = (Path(root) / place.format(series=size.topology) for place in _PLACES)
    return next((path for path in paths if os.path.isfile(path)), None)


def has_default_topology(root: str | Path = "/") -> bool:
    """Whether NCCL finds a topology file without being told."""
    return os.path.isfile(Path(root) / _NCCL_DEFAULT)
