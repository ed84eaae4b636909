from __future__ import annotations

import pytest
from tests.network.conftest import Tree

from azureml_strategy.network.topology import has_default_topology, topology_file
from azureml_strategy.network.vm_sizes import lookup_vm_size

SERIES = ("ndv2", "ndv4", "ndv5", "ncv4")


@pytest.mark.parametrize(
    ("size", "series"),
    [
        ("ND40rs_v2", "ndv2"),
        ("ND96asr_v4", "ndv4"),
        ("ND96amsr_A100_v4", "ndv4"),
        ("ND96isr_H100_v5", "ndv5"),
        ("ND96isr_H200_v5", "ndv5"),
        ("NC96ads_A100_v4", "ncv4"),
        ("NC24ads_A100_v4", None),
        ("ND96isr_MI300X_v5", None),
        ("HB120rs_v3", None),
    ],
)
def test_the_file_fits_the_size(tree: Tree, size: str, series: str | None) -> None:
    written = {name: tree.topology(name) for name in SERIES}
    assert topology_file(lookup_vm_size(size), tree.root) == (series and written[series])


@pytest.mark.parametrize("place", ["opt/microsoft/ndv5-topo.xml", "opt/microsoft/ndv5/topo.xml"])
def test_both_places_of_azures_images(tree: Tree, place: str) -> None:
    size = lookup_vm_size("ND96isr_H100_v5")
    assert topology_file(size, tree.root) is None
    (tree.root / place).mkdir(parents=True)
    assert topology_file(size, tree.root) is None  # Docker makes a folder where a mounted file is not on the host
    (tree.root / place).rmdir()
    assert topology_file(size, tree.root) is None
    file = tree.write(place, "<system/>")
    assert topology_file(size, tree.root) == file


def test_without_a_size_there_is_no_file(tree: Tree) -> None:
    tree.topology("ndv5")
    assert topology_file(None, tree.root) is None


def test_the_file_that_nccl_reads_by_itself(tree: Tree) -> None:
    assert not has_default_topology(tree.root)
    tree.write("var/run/nvidia-topologyd/virtualTopology.xml", "<system/>")
    assert has_default_topology(tree.root)
