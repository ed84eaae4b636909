"""What is said of a VM size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from azureml_strategy.network.doctor.size import check_size
from azureml_strategy.network.vm_sizes import known_vm_sizes

ReadFacts = Callable[..., Any]


@pytest.mark.parametrize("size", known_vm_sizes(), ids=lambda size: size.name)
def test_every_known_size_is_described(size: Any, read: ReadFacts, job: ReadFacts) -> None:
    findings = list(check_size(read(job(size.name, nodes=2))))
    assert findings[0].verdict == "ok"
    assert findings[0].text.startswith(f"{size.name} (from compute context): {size.gpus} x {size.gpu_model}")
    assert "None" not in findings[0].text
    warnings = [finding.text for finding in findings[1:]]
    assert any("retired" in text for text in warnings) == (size.retired is not None)
    assert any("over Ethernet" in text for text in warnings) == (not size.infiniband)


@pytest.mark.parametrize(
    ("name", "verdict", "text"),
    [
        ("Standard_ND96isr_H999_v7", "warning", "not in this package's table; the nearest name in it is Standard_ND96"),
        ("Standard_ND96is_H999_v7", "warning", "no InfiniBand that a VM can use"),
        ("Standard_D4s_v5", "ok", "no GPU, by its name"),
        ("ND96isr H100 v5", "warning", "did you mean Standard_ND96isr_H100_v5?"),
        ("Standard_NC24r", "ok", "InfiniBand without SR-IOV, which a VM cannot use"),
    ],
)
def test_other_names(name: str, verdict: str, text: str, read: ReadFacts, job: ReadFacts) -> None:
    finding = next(check_size(read(job(name, nodes=1))))
    assert (finding.verdict, finding.subject) == (verdict, "VM size")
    assert text in finding.text


def test_a_job_that_does_not_name_it(read: ReadFacts, job: ReadFacts) -> None:
    (finding,) = check_size(read(job()))
    assert finding.verdict == "ok"
    assert not list(check_size(read({})))


@pytest.mark.parametrize(
    ("name", "advised"),
    [("NC80adis_H100_v5", "Standard_ND96isr_H100_v5"), ("NC64as_T4_v3", "Standard_ND96isr_H100_v5")],
)
def test_the_size_that_is_advised_has_infiniband(name: str, advised: str, read: ReadFacts, job: ReadFacts) -> None:
    *_, warning = check_size(read(job(name, nodes=4)))
    assert advised in str(warning.advice)


def test_the_time_of_an_all_reduce(read: ReadFacts, job: ReadFacts) -> None:
    """4 x NC64as_T4_v3 with 32 Gb/s: 2 x 3/4 x 1 GB at 4 GB/s."""
    *_, warning = check_size(read(job("NC64as_T4_v3", nodes=4)))
    assert "at 4 GB/s at most: an all-reduce of 1 GB of gradients takes at least 0.38 s" in warning.text
