from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.network.transport.completion import explain_completion

OLD = "NET/IB : Got completion with error 12, opcode 1, len 32620, vendor err 129"
PEER = "NET/IB : Got completion from peer 10.2.0.5<33092> with error 12, opcode 0, len 0, vendor err 129 (Recv)"
STATUS = "NET/IB: Got completion from peer 10.99.91.63<51161> with status=4 opcode=32614 len=32614 vendor err 81 (Send)"
NAMED = (
    "NET/IB: Got completion from peer 10.153.235.13<40554> with status=IBV_WC_RETRY_EXC_ERR(12) "
    "opcode=IBV_WC_RECV_RDMA_WITH_IMM(129) vendor_err=129 localGid ::ffff:1.1.2.2 remoteGids::ffff:1.1.1.4 hca mlx5_1"
)


@pytest.mark.parametrize(("text", "status"), [(OLD, 12), (PEER, 12), (STATUS, 4), (NAMED, 12)])
def test_every_format(text: str, status: int) -> None:
    completion = explain_completion(text)
    assert completion is not None
    assert completion.status == status


@pytest.mark.parametrize(
    ("status", "name", "fix"),
    [
        (4, "IBV_WC_LOC_PROT_ERR", "NCCL_NET_GDR_LEVEL=LOC"),
        (5, "IBV_WC_WR_FLUSH_ERR", "first error"),
        (10, "IBV_WC_REM_ACCESS_ERR", "NCCL_NET_GDR_LEVEL=LOC"),
        (12, "IBV_WC_RETRY_EXC_ERR", "NCCL_IB_TIMEOUT=22"),
        (13, "IBV_WC_RNR_RETRY_EXC_ERR", "peer"),
        (99, "not listed", "peer's log"),
    ],
)
def test_meanings(status: int, name: str, fix: str) -> None:
    completion = explain_completion(f"Got completion from peer x with status={status} opcode=0")
    assert completion is not None
    assert name in completion.explanation
    assert fix in completion.fix


@pytest.mark.parametrize("text", [OLD, PEER, NAMED])
def test_a_message_cut_off_anywhere_names_no_other_status(text: str) -> None:
    completions = [explain_completion(text[:end]) for end in range(len(text))]
    assert {completion.status for completion in completions if completion} == {12}


@given(st.text(max_size=100))
def test_other_text_has_no_status(text: str) -> None:
    assert explain_completion(text) is None or "Got completion" in text


def test_a_number_that_is_no_status_makes_no_kind_of_error() -> None:
    assert explain_completion("Got completion from peer x with status=1234 opcode=0") is None
