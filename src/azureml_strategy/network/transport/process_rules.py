"""Messages about the processes: GPUs, memory, settings, and torch's view of a failure."""

from __future__ import annotations

import re

from azureml_strategy.network.transport.rule import Rule

PROCESS_RULES = (
    Rule(
        "duplicate GPU",
        re.compile(r"Duplicate GPU detected"),
        "problem",
        "Two ranks use one GPU.",
        "Start at most as many processes on a node as it has GPUs, and leave CUDA_VISIBLE_DEVICES alone: each process "
        "takes the GPU of its local rank.",
    ),
    Rule(
        "shared memory",
        re.compile(r"No space left on device|shared memory segment|/dev/shm"),
        "problem",
        "The container's /dev/shm is full or too small for NCCL's buffers between the GPUs of a node.",
        "In the job's resources write shm_size: 16g (the default is 2g).",
    ),
    Rule(
        "driver",
        re.compile(r"driver version is insufficient|no kernel image|unsupported display driver|forward compatib", re.I),
        "problem",
        "The image's CUDA is newer than the node's driver, or was not built for its GPU.",
        "Use an image with an older CUDA, or a curated environment of Azure ML that fits the node.",
    ),
    Rule(
        "GPU memory",
        re.compile(r"[Cc]uda failure.*out of memory|CUDA error.*out of memory|CUDA out of memory"),
        "problem",
        "No GPU memory was left for NCCL's buffers.",
        "Use a smaller micro-batch, or NCCL_BUFFSIZE=2097152.",
    ),
    Rule(
        "CUDA",
        re.compile(r"[Cc]uda failure|HIP failure|unhandled cuda error|ncclUnhandledCudaError"),
        "problem",
        "A call of CUDA failed inside NCCL. Often the error is an earlier one of a kernel of the model, reported late.",
        "Read the first error of the rank that failed first; CUDA_LAUNCH_BLOCKING=1 in a short run shows its place.",
    ),
    Rule(
        "topology file",
        re.compile(r"XML (?:Import|file|parse)|[Cc]ould not (?:open|find) (?:XML|NET|a path)|Attribute \w+ of node"),
        "problem",
        "The topology or graph file does not describe this node: NCCL_TOPO_FILE or NCCL_GRAPH_FILE belongs to another "
        "VM size.",
        "Unset NCCL_GRAPH_FILE, and set NCCL_TOPO_FILE only to the file of this size, or unset it.",
    ),
    Rule(
        "different collectives",
        re.compile(r"Message truncated|collective mismatch|[Mm]ismatched? (?:collective|data|size)"),
        "problem",
        "Ranks took part in one operation with different sizes: they run different code, a different NCCL, or one of "
        "them left out a collective.",
        "Use one image on all nodes, and see that no rank skips a step, a logging call with sync_dist, or a batch.",
    ),
    Rule(
        "collective time-out",
        re.compile(r"Watchdog caught collective operation timeout|NCCL operations have failed or timed out"),
        "problem",
        "torch stopped the run because a collective did not end in time: a rank died, hangs or runs other code than "
        "the rest, or the network stalls.",
        "Find the rank that did not report this time-out, or reported the lowest sequence number (SeqNum), and read "
        "its log.",
    ),
    Rule(
        "store time-out",
        re.compile(r"ncclUniqueId from"),
        "problem",
        "Rank 0 did not publish the address of NCCL's bootstrap: it failed before, or never started.",
        "Read the log of rank 0, and see that all nodes started and MASTER_ADDR is the first node's address.",
    ),
    Rule(
        "watchdog",
        re.compile(
            r"watchdog thread (?:got stuck|terminated)|heartbeat monitor timed out|communicator was aborted", re.I
        ),
        "warning",
        "torch's watchdog of NCCL stopped the process. This follows a collective that hangs, or another error.",
        "Look for the first error in the log.",
    ),
    Rule(
        "host setting",
        re.compile(r"iommu=pt|NUMA auto balancing|numa_balancing"),
        "info",
        "RCCL dislikes a setting of the host's kernel that a job cannot change.",
        "Nothing.",
    ),
    Rule(
        "unhandled",
        re.compile(r"unhandled system error|ncclSystemError|ncclInternalError|ncclInvalidUsage|ncclInvalidArgument"),
        "warning",
        "torch passes on that NCCL failed, not why.",
        "Read NCCL's own messages before it; without any, run again with NCCL_DEBUG=INFO.",
    ),
)
