from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.network.nccl_log.failures import UNKNOWN, ErrorLog, LogError, explain_completion


def error(text: str, name: str = "memlock") -> LogError:
    return LogError(name, text, "It means.", "Do this.", "problem")


def collect(*texts: str, name: str = "memlock") -> list[tuple[str, int]]:
    log = ErrorLog(lambda text: error(text, name))
    for text in texts:
        log.add(text)
    return [(kept.text, kept.count) for kept in log]


def test_an_error_reads_as_its_text() -> None:
    assert str(error("Call failed")) == "Call failed"


def test_errors_that_differ_in_numbers_are_one() -> None:
    assert collect("peer 10.0.0.4<51> at 0x7f", "peer 10.0.0.5<52> at 0xab") == [("peer 10.0.0.4<51> at 0x7f", 2)]


def test_a_kind_keeps_a_few_texts() -> None:
    texts = [f"peer {letter}" for letter in "abcdefg"]
    assert collect(*texts) == [
        *((text, 1) for text in texts[:4]),
        ("Further messages of this kind.", 3),
    ]


def test_a_million_kinds_do_not_fill_the_memory() -> None:
    letters = str.maketrans("0123456789", "abcdefghij")
    kept = collect(*(f"message {number}".translate(letters) for number in range(2000)), name=UNKNOWN)
    assert len(kept) == 33
    assert kept[-1] == ("Further messages of this kind.", 2000 - 32)


def test_a_text_is_short_and_without_secrets() -> None:
    ((text, _),) = collect("GET https://x.blob.core.windows.net/d?sig=abcSECRETdef&se=1 " + "x" * 5000)
    assert "SECRET" not in text
    assert len(text) <= 1024 + len("<redacted>")


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
