"""Messages about the network: adapters, fabric, interfaces, plugins."""

from __future__ import annotations

import re

from azureml_strategy.network.transport.rule import Rule

NETWORK_RULES = (
    Rule(
        "no interface",
        re.compile(r"no (?:socket|usable listening) interface found|no interface found", re.I),
        "problem",
        "No network interface of this node matches NCCL_SOCKET_IFNAME, so the ranks cannot find one another; nothing "
        "was established.",
        "Set NCCL_SOCKET_IFNAME=eth0, which Azure ML nodes have, or unset it; `ip -brief address` lists interfaces.",
    ),
    Rule(
        "bootstrap time-out",
        re.compile(r"bootstrap.*(?:time-?out|timed out)|(?:missing|waiting for) ranks?\b", re.I),
        "problem",
        "Some ranks did not arrive when NCCL started, so nothing was established.",
        "Look for the ranks that are missing: their logs end early, or their nodes cannot reach the address of rank 0. "
        "Set NCCL_SOCKET_IFNAME=eth0 on all nodes.",
    ),
    Rule(
        "memlock",
        re.compile(r"ibv_(?:reg_\w{2,20}|create_[cq]\w{1,20}|alloc_pd) failed(?:[^,]*Cannot allocate memory|\s*$)"),
        "problem",
        "The adapter could not lock memory: the container's limit of locked memory (`ulimit -l`) is too low.",
        "In the job's resources write docker_args: '--ulimit memlock=-1 --cap-add=IPC_LOCK'; `ulimit -l` must then "
        "print unlimited.",
    ),
    Rule(
        "memory registration",
        re.compile(r"ibv_reg_\w{2,20} failed"),
        "problem",
        "The adapter refused to register memory, and not for want of locked memory: usually the GPUDirect RDMA module "
        "(nvidia_peermem or DMA-BUF) does not fit the driver.",
        "Run once with NCCL_NET_GDR_LEVEL=LOC (no GPUDirect RDMA); with DMA-BUF, try NCCL_DMABUF_ENABLE=0. If either "
        "works, use an image whose driver and module fit.",
    ),
    Rule(
        "queue pair",
        re.compile(r"ibv_modify_qp failed|ibv_create_ah failed|RtrQp failed|RtsQp failed"),
        "problem",
        "Two adapters could not be connected: no route between their addresses. Typical of RoCE (a wrong GID index, "
        "adapters in different subnets) and of InfiniBand paired with Ethernet adapters.",
        "On an InfiniBand size set NCCL_IB_HCA to the InfiniBand adapters only, such as NCCL_IB_HCA=mlx5_ib. Elsewhere "
        "set NCCL_IB_DISABLE=1, or for RoCE leave NCCL_IB_GID_INDEX unset (NCCL 2.21 finds it).",
    ),
    Rule(
        "device",
        re.compile(r"[Uu]nable to open device|ibv_(?:open_device|get_device_list|query_\w{1,20}) failed"),
        "problem",
        "An adapter is listed but cannot be opened: the container has no access to /dev/infiniband.",
        "In the job's resources write docker_args: '--device=/dev/infiniband --ulimit memlock=-1 --cap-add=IPC_LOCK'.",
    ),
    Rule(
        "link",
        re.compile(r"async (?:fatal )?event.*(?:error|violation|fatal|down|catastrophic)"),
        "problem",
        "The adapter reported a fault of its port, cable, switch or queue pair.",
        "If it comes back on one node, cancel the job and start it on other nodes.",
    ),
    Rule(
        "link event",
        re.compile(r"async event"),
        "info",
        "The adapter reported a change of its port, such as a new registration with the subnet manager.",
        "Nothing, unless errors follow.",
    ),
    Rule(
        "libibverbs",
        re.compile(r"open (?:lib)?ibverbs|libibverbs\.so"),
        "warning",
        "The container has no libibverbs, so NCCL cannot see any InfiniBand adapter and uses TCP.",
        "On an InfiniBand size install it in the image: apt-get install libibverbs1 ibverbs-providers.",
    ),
    Rule(
        "nvls",
        re.compile(r"NVLS|[Mm]ulticast"),
        "problem",
        "NVLink SHARP, reduction inside the node's NVSwitch, could not be set up: the node's fabric manager is not "
        "ready, or the container may not use it.",
        "Set NCCL_NVLS_ENABLE=0; ring and tree over NVLink remain.",
    ),
    Rule(
        "sharp",
        re.compile(r"SHARP|Sharp|CollNet"),
        "info",
        "Reduction inside the InfiniBand switches (SHARP) is not available, as on Azure's fabrics without an "
        "aggregation manager. NCCL goes on over the ordinary network.",
        "Nothing; NCCL_COLLNET_ENABLE=0 saves the attempt.",
    ),
    Rule(
        "ofi",
        re.compile(r"NET/OFI|[Ll]ibfabric"),
        "problem",
        "The libfabric plugin (aws-ofi-nccl) failed. Azure has no libfabric provider for its InfiniBand.",
        "On Azure remove the plugin from the image, or set NCCL_NET_PLUGIN=none.",
    ),
    Rule(
        "peer closed",
        re.compile(r"closed by (?:remote )?peer|reset by peer|[Bb]roken pipe|remote process exited|ncclRemoteError"),
        "warning",
        "The other rank went away: it had failed first, or was stopped. This is a consequence.",
        "Find the rank whose log ends first, or has the first error, and read that one.",
    ),
    Rule(
        "unreachable",
        re.compile(r"[Cc]onnection refused|[Nn]o route to host|[Cc]onnection timed out|[Nn]etwork is unreachable"),
        "problem",
        "A rank could not open a TCP connection to another: it is not there yet or any more, or its address belongs to "
        "an interface that other nodes cannot reach.",
        "Set NCCL_SOCKET_IFNAME=eth0 on all nodes; if it is set, look for the rank that died first.",
    ),
)
