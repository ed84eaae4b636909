"""Messages as NCCL, RCCL and torch write them, and the rule that explains each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.network.nccl_log.evidence import RULES, explain

MODIFY_QP = "Call to ibv_modify_qp failed with"
CONNECT = "socketStartConnect: Connect to 172.17.0.1<39275> failed :"
UNHANDLED = "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error."
MESSAGES = [
    ("Bootstrap : no socket interface found", "no interface", "NCCL_SOCKET_IFNAME=eth0"),
    ("NET/Socket : No usable listening interface found", "no interface", "NCCL_SOCKET_IFNAME=eth0"),
    ("Bootstrap Root : timeout, 3 of 16 ranks checked in", "bootstrap time-out", "NCCL_SOCKET_IFNAME=eth0"),
    ("Call to ibv_reg_mr failed", "memlock", "--ulimit memlock=-1"),
    ("Call to ibv_create_cq failed with error Cannot allocate memory errno 12", "memlock", "--cap-add=IPC_LOCK"),
    ("Call to ibv_create_qp failed with error Cannot allocate memory", "memlock", "--ulimit memlock=-1"),
    ("Call to ibv_reg_mr_iova2 failed with error Bad address", "memory registration", "NCCL_NET_GDR_LEVEL=LOC"),
    (f"{MODIFY_QP} error Network is unreachable", "queue pair", "NCCL_IB_HCA"),
    (f"{MODIFY_QP} 110 Connection timed out, on dev mlx5_0:1, curr state INIT", "queue pair", "NCCL_IB_HCA"),
    (f"{MODIFY_QP} 61 No data available, on dev rocep1s0f1:1, local GID index 3", "queue pair", "NCCL_IB_GID_INDEX"),
    ("NET/IB : Unable to open device mlx5_0", "device", "--device=/dev/infiniband"),
    ("NET/IB : mlx5_ib3:1 Got async event : port error", "link", "other nodes"),
    ("NET/IB: mlx5_0:1 async fatal event on QP 0x7f: local access violation work queue error", "link", "other nodes"),
    ("NET/IB : mlx5_ib3:1 Got async event : client reregistration", "link event", "Nothing"),
    ("Failed to open libibverbs.so[.1]", "libibverbs", "apt-get install libibverbs1"),
    ("Failed to bind NVLink SHARP (NVLS) Multicast memory of size 2097152 : CUDA error 401", "nvls", "NVLS_ENABLE=0"),
    ("NET/IB :SHARP coll init error: Cannot create SHArP job(-11)", "sharp", "NCCL_COLLNET_ENABLE=0"),
    ("SHARP group create: Streaming Tree lock failed (-18)", "sharp", "NCCL_COLLNET_ENABLE=0"),
    ("Cannot initialize CollNet, using point-to-point network instead", "sharp", "Nothing"),
    ("NET/OFI Couldn't open AV. RC: -22, ERROR: Invalid argument", "ofi", "NCCL_NET_PLUGIN=none"),
    ("socketProgress: Connection closed by remote peer node-3<42918>", "peer closed", "first"),
    ("Net : Call to recv from 10.0.0.5<4> failed : Connection reset by peer", "peer closed", "first"),
    (f"{CONNECT} Connection refused", "unreachable", "NCCL_SOCKET_IFNAME=eth0"),
    ("socketPollConnect: Connect to 9001::281<50557> returned 113(No route to host)", "unreachable", "eth0"),
    ("Call to connect returned Software caused connection abort", "virtual function", "NCCL_SOCKET_IFNAME=eth0"),
    (
        "socketStartConnect: Connect to fe80::20d:3aff:fef9:4aef%enP7906s1<39275> failed : Software caused connection "
        "abort",
        "virtual function",
        "NCCL_SOCKET_IFNAME=eth0",
    ),
    (f"{CONNECT} Invalid argument", "virtual function", "NCCL_SOCKET_IFNAME=eth0"),
    ("Call to bind failed: Cannot assign requested address", "virtual function", "NCCL_SOCKET_IFNAME=eth0"),
    ("Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 53000", "duplicate GPU", "CUDA_VISIBLE_DEVICES"),
    ("Error: failed to extend /dev/shm/nccl-UbzKZ9 to 9637892 bytes", "shared memory", "shm_size"),
    ("posix_fallocate failed : No space left on device", "shared memory", "shm_size"),
    ("Cuda failure 'CUDA driver version is insufficient for CUDA runtime version'", "driver", "older CUDA"),
    ("Cuda failure 2 'out of memory'", "GPU memory", "micro-batch"),
    ("Cuda failure 700 'an illegal memory access was encountered'", "CUDA", "CUDA_LAUNCH_BLOCKING=1"),
    ("XML Import Channel : dev 1 not found.", "topology file", "NCCL_GRAPH_FILE"),
    ("Message truncated : received 1024 bytes instead of 256", "different collectives", "one image"),
    ('Missing "iommu=pt" from kernel command line which can lead to system instablity', "host setting", "Nothing"),
    ("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)", "collective time-out", "SeqNum"),
    ("Some NCCL operations have failed or timed out.", "collective time-out", "SeqNum"),
    ("setting up NCCL communicator and retreiving ncclUniqueId from [0] via c10d", "store time-out", "rank 0"),
    ("NCCL communicator was aborted on rank 3.", "watchdog", "first error"),
    ("Call to connect returned Connection timed out, retrying", "unreachable", "NCCL_SOCKET_IFNAME=eth0"),
    ("ProcessGroupNCCL's watchdog thread terminated with exception", "watchdog", "first error"),
    ("ncclRemoteError: A call failed possibly due to a network error", "peer closed", "first"),
    ("ncclUnhandledCudaError: Call to CUDA function failed.", "CUDA", "first"),
    (UNHANDLED, "unhandled", "NCCL_DEBUG=INFO"),
    ("Got completion from peer 10.0.0.5<1> with status=5 opcode=0 len=0 vendor err 249", "completion 5", "first error"),
]


@pytest.mark.parametrize(("text", "name", "fix"), MESSAGES, ids=[text[:40] for text, _, _ in MESSAGES])
def test_message(text: str, name: str, fix: str) -> None:
    error = explain(text)
    assert (error.name, error.text, error.count) == (name, text, 1)
    assert fix in error.fix


def test_every_rule_is_tested_and_complete() -> None:
    assert {rule.name for rule in RULES} == {name for _, name, _ in MESSAGES if not name.startswith("completion")}
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.explanation.endswith(".")
        assert rule.fix.endswith(".")


def test_severities() -> None:
    severity = {name: error.severity for text, name, _ in MESSAGES for error in [explain(text)]}
    assert {name for name, value in severity.items() if value == "info"} == {"sharp", "link event", "host setting"}
    consequences = {"peer closed", "watchdog", "unhandled", "completion 5"}
    assert {name for name, value in severity.items() if value == "warning"} == consequences | {"libibverbs"}


@given(st.text(alphabet="abcdefgh ", max_size=60))
def test_what_no_rule_knows_is_said_to_be_unknown(text: str) -> None:
    error = explain(text)
    assert (error.name, error.text, error.severity) == ("unknown", text, "warning")
