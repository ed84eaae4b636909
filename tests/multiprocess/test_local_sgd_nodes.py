"""Two ranks of a node as one replica: the same as one rank with both ranks' batches."""

from __future__ import annotations

import pytest
from tests.multiprocess.conftest import RunJob


@pytest.mark.slow
def test_a_node_is_a_replica(run_job: RunJob) -> None:
    four = run_job("local_sgd_nodes.py", 2, nodes=2, processes_per_node=2)
    assert four.exit_code == 0, four.output
    two = run_job("local_sgd_nodes.py", 1, nodes=2)
    assert two.exit_code == 0, two.output
    for name, one in two.results[0].items():
        for rank in range(4):
            node, ours = rank // 2, four.results[rank][name]
            together = two.results[node][name]
            assert [len(rows) for rows in ours["read"]] == [2] * 24
            assert ours["weights"] == four.results[2 * node][name]["weights"], f"{name}: alike in a node"
            for step, (found, expected) in enumerate(zip(ours["weights"], together["weights"], strict=True), 1):
                assert found == pytest.approx(expected, abs=1e-12), f"{name}, rank {rank}, step {step}"
        assert one["weights"][4] != two.results[1][name]["weights"][4], "replicas are apart inside a period"
