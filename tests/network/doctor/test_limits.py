"""Shared memory, locked memory and open files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from azureml_strategy.network.doctor.limits import check_limits
from azureml_strategy.network.findings import Finding

GIB = 1 << 30


def with_shared_memory(facts: Any, size: int | None) -> Any:
    return replace(facts, node=replace(facts.node, shared_memory=size))


def shared_memory(facts: Any) -> list[Finding]:
    return [finding for finding in check_limits(facts) if finding.subject == "/dev/shm"]


@pytest.mark.parametrize(("size", "verdict"), [(64 << 20, "warning"), (2 * GIB, "warning"), (3 * GIB, "ok")])
def test_shared_memory_beside_gpus(tree: Any, read: Callable[..., Any], size: int, verdict: str) -> None:
    tree.nvidia("Tesla T4", 4)
    (finding,) = shared_memory(with_shared_memory(read(), size))
    assert finding.verdict == verdict
    assert f"{size / GIB:.1f} GiB" in finding.text
    assert (verdict == "ok") == (finding.advice is None)
    assert "shm_size: 32g" in (finding.advice or "shm_size: 32g")


def test_shared_memory_without_gpus(read: Callable[..., Any]) -> None:
    assert shared_memory(with_shared_memory(read(), 64 << 20))[0].verdict == "ok"
    assert not shared_memory(with_shared_memory(read(), None))


@pytest.mark.parametrize(("limit", "text"), [("unlimited", "no limit"), (str(64 * GIB), "at most 64 GiB")])
def test_locked_memory_that_suffices(tree: Any, read: Callable[..., Any], limit: str, text: str) -> None:
    tree.hca("mlx5_ib0")
    tree.memlock(limit)
    assert [finding.text for finding in check_limits(read()) if finding.subject == "locked memory"] == [text]


def test_locked_memory_that_does_not_is_said_once(tree: Any, read: Callable[..., Any]) -> None:
    tree.hca("mlx5_ib0")
    tree.memlock("65536")
    facts = read()
    assert [finding.subject for finding in facts.plan.findings] == ["locked memory"]
    assert "locked memory" not in [finding.subject for finding in check_limits(facts)]


@pytest.mark.parametrize(
    ("gpus", "limit", "verdicts"),
    [(8, "1024", ["warning"]), (8, "65536", ["ok"]), (1, "1024", []), (8, "unlimited", [])],
)
def test_open_files(tree: Any, read: Callable[..., Any], gpus: int, limit: str, verdicts: list[str]) -> None:
    tree.nvidia("Tesla T4", gpus)
    tree.write("proc/self/limits", f"Max open files            {limit:20} 524288               files\n")
    found = [finding for finding in check_limits(read()) if finding.subject == "open files"]
    assert [finding.verdict for finding in found] == verdicts
    assert all("ulimit -n 524288" in str(finding.advice) for finding in found if finding.verdict != "ok")
