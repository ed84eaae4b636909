"""The report as lines."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.network.doctor.report import Report, Section, render
from azureml_strategy.network.findings import Finding


def test_columns_are_aligned_and_the_sum_comes_last() -> None:
    findings = (
        Finding("ok", "GPUs", "none"),
        Finding("problem", "NCCL_IB_HCA", "it selects none of the usable InfiniBand ports at all", "Remove it."),
        Finding("warning", "NCCL_SOCKET_IFNAME=ib0,ib1", "slow"),
    )
    assert render(Report((Section("Machine", findings[:1]), Section("Network", findings[1:])), {}), 60) == (
        "Machine\n"
        "  ok       GPUs         none\n"
        "\n"
        "Network\n"
        "  PROBLEM  NCCL_IB_HCA  it selects none of the usable\n"
        "                        InfiniBand ports at all\n"
        "                        -> Remove it.\n"
        "  WARNING  NCCL_SOCKET_IFNAME=ib0,ib1\n"
        "                        slow\n"
        "\n"
        "1 problem, 1 warning"
    )


def test_what_is_to_be_typed_stays_whole() -> None:
    command = "--ulimit=memlock=-1:-1/--cap-add=IPC_LOCK/" * 4
    assert command in render(Report((Section("A", (Finding("ok", "b", "c", command),)),), {}), 40)


WORDS = st.lists(st.text("abc-", min_size=1, max_size=12), max_size=30).map(" ".join)


@given(WORDS, WORDS, st.integers(60, 120))
def test_no_line_is_wider_than_the_terminal(text: str, advice: str, width: int) -> None:
    lines = render(Report((Section("A", (Finding("ok", "subject", text, advice),)),), {}), width).splitlines()
    assert all(len(line) <= width for line in lines)
    words = " ".join(lines[1:-1]).replace("->", " ").split()
    assert words == ["ok", "subject", *text.split(), *advice.split()]
