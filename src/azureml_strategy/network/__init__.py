"""The network between the nodes of a job: read the hardware, set up NCCL for it, and prove what NCCL uses."""

from __future__ import annotations

from typing import TYPE_CHECKING

from azureml_strategy.lazy import lazy_attributes

if TYPE_CHECKING:
    from azureml_strategy.network.findings import Finding
    from azureml_strategy.network.infiniband import HCA, read_hcas
    from azureml_strategy.network.nccl import NetworkPlan, Setting, plan_nccl
    from azureml_strategy.network.nccl_log import Transport, read_transport
    from azureml_strategy.network.node import Node, read_node
    from azureml_strategy.network.vm_sizes import UnknownVMSize, VMSize, lookup_vm_size

__all__ = [
    "HCA",
    "Finding",
    "NetworkPlan",
    "Node",
    "Setting",
    "Transport",
    "UnknownVMSize",
    "VMSize",
    "lookup_vm_size",
    "plan_nccl",
    "read_hcas",
    "read_node",
    "read_transport",
]

__getattr__ = lazy_attributes(
    __name__,
    {
        "Finding": "azureml_strategy.network.findings",
        "HCA": "azureml_strategy.network.infiniband",
        "read_hcas": "azureml_strategy.network.infiniband",
        "NetworkPlan": "azureml_strategy.network.nccl",
        "plan_nccl": "azureml_strategy.network.nccl",
        "Node": "azureml_strategy.network.node",
        "read_node": "azureml_strategy.network.node",
        "Setting": "azureml_strategy.network.nccl",
        "Transport": "azureml_strategy.network.nccl_log",
        "read_transport": "azureml_strategy.network.nccl_log",
        "UnknownVMSize": "azureml_strategy.network.vm_sizes",
        "VMSize": "azureml_strategy.network.vm_sizes",
        "lookup_vm_size": "azureml_strategy.network.vm_sizes",
    },
)
