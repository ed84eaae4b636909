"""NCCL's lists of devices, after parseStringList, matchIf and matchIfList in its sources."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.network.conftest import Tree

from azureml_strategy.network.filters import DeviceFilter, hca_list

HCAS = [f"mlx5_{index}" for index in range(12)]


def selected(text: str, names: list[str] = HCAS, port: int | None = 1) -> list[str]:
    chosen = DeviceFilter.parse(text)
    return [name for name in names if chosen.selects(name, port)]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("mlx5_1", ["mlx5_1", "mlx5_10", "mlx5_11"]),  # a bare name is a prefix
        ("=mlx5_1", ["mlx5_1"]),
        ("mlx5", HCAS),
        ("=mlx5", []),
        ("^mlx5_1", [name for name in HCAS if not name.startswith("mlx5_1")]),
        ("^=mlx5_1", [name for name in HCAS if name != "mlx5_1"]),
        ("mlx5_2,mlx5_3", ["mlx5_2", "mlx5_3"]),
        ("=mlx5_2:1,mlx5_3:2", ["mlx5_2"]),
        ("mlx5_2:1", ["mlx5_2"]),
        ("mlx5_2, mlx5_3", ["mlx5_2"]),  # a blank belongs to the name
        ("mlx5_2,", ["mlx5_2"]),
        ("", HCAS),  # no name stands for every device
        ("=", HCAS),
        (":1", HCAS),
        ("^", []),
    ],
)
def test_what_a_list_selects(text: str, names: list[str]) -> None:
    assert selected(text) == names


def test_interfaces_have_no_ports() -> None:
    assert selected("eth0", ["eth0", "eth1", "lo"], port=None) == ["eth0"]
    assert selected("^eth,lo", ["eth0", "lo", "docker0"], port=None) == ["docker0"]
    assert selected("=mlx5_2:2", port=None) == ["mlx5_2"]


names = st.text("abcmlx_0123456789=^: ", min_size=1, max_size=8)


@given(st.lists(names, max_size=5).map(",".join), names, st.integers(1, 2))
def test_exclusion_is_the_opposite_of_selection(text: str, name: str, port: int) -> None:
    if not text.startswith("^"):
        chosen, others = DeviceFilter.parse(text), DeviceFilter.parse(f"^{text}")
        assert chosen.selects(name, port) != others.selects(name, port)


@given(st.lists(st.from_regex(r"mlx[45]_\d{1,3}", fullmatch=True), min_size=1, max_size=5), st.text(max_size=8))
def test_an_exact_list_selects_its_names_and_nothing_else(listed: list[str], other: str) -> None:
    text = "=" + ",".join(listed)
    assert selected(text, listed) == listed
    assert bool(selected(text, [other])) == (other in listed)
    assert all(selected(text.removeprefix("="), [f"{name}0"]) for name in listed)


def test_the_list_of_usable_ports_selects_exactly_them(tree: Tree) -> None:
    node = tree.nd96isr_h100_v5()
    text = hca_list(node.usable_hcas)
    assert re.fullmatch(r"=(mlx5_ib\d:1,?){8}", text)
    chosen = DeviceFilter.parse(text)
    assert [hca for hca in node.hcas if chosen.selects(hca.name, hca.port)] == list(node.usable_hcas)
