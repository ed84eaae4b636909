"""A log, explained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from azureml_strategy.network.doctor import Report, UnreadableLog, explain_log

PREFIX = "host-a:101:202 [0] NCCL"
INFINIBAND = f"""\
Epoch 0: loss 2.3
{PREFIX} INFO NCCL version 2.21.5+cuda12.4
{PREFIX} INFO NET/IB : Using [0]mlx5_ib0:1/IB [1]mlx5_ib1:1/IB [RO]; OOB eth0:10.0.0.4<0>
{PREFIX} INFO Using network IB
{PREFIX} INFO comm 0x1 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0
{PREFIX} INFO Channel 00/0 : 0[0] -> 8[0] [send] via NET/IB/0/GDRDMA
{PREFIX} INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM/read
"""
SOCKETS = f"""\
{PREFIX} INFO NET/Socket : Using [0]eth0:10.0.0.4<0>
{PREFIX} INFO Using network Socket
{PREFIX} INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
"""
TIMED_OUT = f"""\
{INFINIBAND}{PREFIX} transport/net_ib.cc:1295 NCCL WARN NET/IB : Got completion from peer 10.0.0.5<1> with status=12 \
opcode=0 len=0 vendor err 129 (Send)
"""


def explain(tmp_path: Path, text: str | bytes) -> Report:
    log = tmp_path / "nccl.log"
    log.write_bytes(text.encode() if isinstance(text, str) else text)
    return explain_log(str(log), tmp_path / "root", {})


def texts(report: Report) -> dict[str, str]:
    return {finding.subject: finding.text for finding in report.findings}


def test_infiniband(tmp_path: Path) -> None:
    report = explain(tmp_path, INFINIBAND)
    assert report.summary == "no problems"
    assert texts(report) == {
        "transport": "InfiniBand, 2 HCAs (mlx5_ib0, mlx5_ib1), GPUDirect RDMA",
        "evidence": "channel lines, which show the traffic itself: 1 over a network, 1 inside nodes",
        "library": "NCCL 2.21.5, plugin IB",
        "hosts": "1: host-a, 16 ranks",
        "adapters": "mlx5_ib0, mlx5_ib1",
        "GPUDirect RDMA": "used",
        "relaxed ordering": "on",
        "interface": "eth0",
        "inside nodes": "P2P/CUMEM/read",
    }
    document = json.loads(report.to_json())
    assert document["transport"]["kind"] == "ib"
    assert document["transport"]["hcas"] == ["mlx5_ib0", "mlx5_ib1"]


def test_an_error_with_its_explanation(tmp_path: Path) -> None:
    report = explain(tmp_path, TIMED_OUT)
    assert report.exit_code == 1
    (problem,) = [finding for finding in report.findings if finding.verdict == "problem"]
    assert problem.subject == "completion 12"
    assert problem.text.startswith('"NET/IB : Got completion from peer 10.0.0.5<1> with status=12')
    assert "IBV_WC_RETRY_EXC_ERR" in problem.text
    assert "NCCL_IB_TIMEOUT=22" in str(problem.advice)


def test_repeated_errors_are_counted(tmp_path: Path) -> None:
    last = TIMED_OUT.splitlines()[-1]
    assert "(3 times)" in texts(explain(tmp_path, f"{TIMED_OUT}{last}\n{last}\n"))["completion 12"]


def test_sockets_where_this_machine_has_infiniband(tmp_path: Path, tree: Any) -> None:
    alone = explain(tmp_path, SOCKETS)
    assert texts(alone)["transport"] == "TCP sockets, eth0"
    assert "this machine" not in texts(alone)
    tree.hca("mlx5_ib0")
    tree.hca("mlx5_ib1")
    report = explain(tmp_path, SOCKETS)
    assert "2 usable InfiniBand port(s) (mlx5_ib0, mlx5_ib1)" in texts(report)["this machine"]
    assert "this machine" not in texts(explain(tmp_path, INFINIBAND))


@pytest.mark.parametrize("content", [b"", b"\0\xff\x00" * 1000, b"Epoch 0: loss 2.3\n" * 100, b"x" * 3_000_000])
def test_what_is_no_log_of_nccl(tmp_path: Path, content: bytes) -> None:
    report = explain(tmp_path, content)
    (finding,) = report.findings
    assert "no log of NCCL" in finding.text
    assert "NCCL_DEBUG=INFO" in str(finding.advice)
    assert report.exit_code == 1


def test_a_log_that_shows_no_network(tmp_path: Path) -> None:
    report = explain(tmp_path, f"{PREFIX} INFO NCCL version 2.21.5+cuda12.4\n")
    assert report.verdict == "warning"
    assert texts(report)["evidence"] == "nothing: no line shows a network"


def test_a_log_whose_prefixes_were_cut_off(tmp_path: Path) -> None:
    report = explain(tmp_path, SOCKETS.replace(PREFIX, "NCCL"))
    assert texts(report)["transport"] == "TCP sockets, eth0"


def test_many_hosts_are_cut_short(tmp_path: Path) -> None:
    lines = [INFINIBAND.replace("host-a", f"node-{index:02}") for index in range(12)]
    assert texts(explain(tmp_path, "".join(lines)))["hosts"] == (
        "12: node-00, node-01, node-02, node-03, node-04, node-05, node-06, node-07 and 4 more, 16 ranks"
    )


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UnreadableLog, match=r"no\.log cannot be read: No such file or directory\. Give the path"):
        explain_log(str(tmp_path / "no.log"))
    with pytest.raises(UnreadableLog, match="Is a directory"):
        explain_log(str(tmp_path))
