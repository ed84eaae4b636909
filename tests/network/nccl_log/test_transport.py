from __future__ import annotations

import pytest

from azureml_strategy.network.nccl_log import describe, read_transport


@pytest.mark.parametrize(
    ("texts", "line"),
    [
        ([], "unknown transport: the log has no line that shows it; run with NCCL_DEBUG=INFO"),
        (
            [
                "NET/IB : Using [0]mlx5_ib0:1/IB [1]mlx5_ib1:1/IB [RO]; OOB eth0:10.0.0.4<0>",
                "CollNet 05/0 : 5 [receive] via COLLNET/SHARP/1/GDRDMA",
            ],
            "InfiniBand, 2 HCAs (mlx5_ib0, mlx5_ib1), GPUDirect RDMA, SHARP",
        ),
        (["Using network Socket"], "TCP sockets, no channel seen yet"),
        (["Using network IB"], "InfiniBand, no channel seen yet"),
        (["Channel 00/0 : 0[0] -> 1[1] via SHM/direct/direct"], "inside nodes only, SHM/direct/direct"),
    ],
)
def test_line(texts: list[str], line: str) -> None:
    assert describe(read_transport(f"node-0:1:2 [0] NCCL INFO {text}" for text in texts)) == line
