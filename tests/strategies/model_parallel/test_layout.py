from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Trainer
from lightning.pytorch.plugins.precision import MixedPrecision, Precision

from azureml_strategy.strategies.model_parallel.layout import (
    FullPrecision,
    HalfMeshPrecision,
    MeshLayout,
    MixedMeshPrecision,
    check_counts,
    divisors,
    for_meshes,
    plan_layout,
)


@pytest.mark.parametrize(
    ("precision", "kind"),
    [
        ("32-true", FullPrecision),
        ("bf16-true", HalfMeshPrecision),
        ("16-true", HalfMeshPrecision),
        ("bf16-mixed", MixedMeshPrecision),
    ],
)
def test_every_precision_clips_over_meshes(precision: Any, kind: type[Precision]) -> None:
    plugin = Trainer(
        accelerator="cpu", devices=1, strategy="azureml_model_parallel", precision=precision
    ).precision_plugin
    assert type(plugin) is kind
    assert plugin.precision == precision


def test_a_plugin_of_the_users_own_is_kept() -> None:
    class Own(MixedPrecision):
        pass

    own = Own("bf16-mixed", "cpu")
    assert for_meshes(own) is own


def test_what_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"precision='64-true'\) does not work with azureml_model_parallel. Choose one"
    ):
        Trainer(accelerator="cpu", devices=1, strategy="azureml_model_parallel", precision="64-true")
    with pytest.raises(ValueError, match="precision='16-mixed'"):
        for_meshes(MixedPrecision("16-mixed", "cpu"))


nodes = st.integers(1, 64)
processes = st.integers(1, 16)


@pytest.mark.parametrize(
    ("sizes", "job", "cuts", "expected"),
    [
        (("auto", "auto"), (4, 8), True, (4, 8)),  # inside the node, across nodes
        (("auto", "auto"), (4, 8), False, (32, 1)),
        (("auto", 4), (4, 8), True, (8, 4)),
        ((16, "auto"), (4, 8), True, (16, 2)),
        ((32, "auto"), (4, 8), True, (32, 1)),
        ((1, 1), (1, 1), True, (1, 1)),
    ],
)
def test_auto(sizes: Any, job: tuple[int, int], cuts: bool, expected: tuple[int, int]) -> None:
    num_nodes, per_node = job
    layout = plan_layout(*sizes, num_nodes=num_nodes, processes_per_node=per_node, cuts_tensors=cuts)
    assert layout == MeshLayout(*expected)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (("auto", "auto", 4), MeshLayout(8, 1, 4)),  # no tensor parallelism beside it, unless it is asked for
        (("auto", 2, 4), MeshLayout(4, 2, 4)),
        ((4, "auto", 4), MeshLayout(4, 2, 4)),
        (("auto", "auto", 16), MeshLayout(2, 1, 16)),  # a sequence may be shared by two nodes
    ],
)
def test_sequences(sizes: Any, expected: MeshLayout) -> None:
    data, tensor, sequence = sizes
    job: dict[str, Any] = {"num_nodes": 4, "processes_per_node": 8, "cuts_tensors": True}
    layout = plan_layout(data, tensor, **job, sequence_parallel_size=sequence)
    assert layout == expected
    assert layout.sharding_size * layout.tensor_parallel_size == 32


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "sequence_parallel_size=0 is no number of processes. Write 1 or more."),
        ("auto", "sequence_parallel_size=auto is no number of processes. Write 1 or more."),
        (3, "times sequence_parallel_size=3 times tensor_parallel_size=1 is 15, but there are 16 processes (8 on each"),
    ],
)
def test_sequences_that_do_not_fit(size: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        plan_layout("auto", 1, num_nodes=2, processes_per_node=8, cuts_tensors=False, sequence_parallel_size=size)


@given(nodes, processes, st.booleans())
def test_auto_always_fits_the_job(num_nodes: int, per_node: int, cuts: bool) -> None:
    layout = plan_layout("auto", "auto", num_nodes=num_nodes, processes_per_node=per_node, cuts_tensors=cuts)
    assert layout.data_parallel_size * layout.tensor_parallel_size == num_nodes * per_node
    groups = [rank // layout.tensor_parallel_size for rank in range(num_nodes * per_node)]
    for group in set(groups):
        members = [rank // per_node for rank, one in enumerate(groups) if one == group]
        assert len(set(members)) == 1, "a tensor-parallel group spans nodes"


@given(nodes, processes, st.integers(1, 64), st.integers(1, 64))
def test_given_sizes_are_taken_or_refused(num_nodes: int, per_node: int, data: int, tensor: int) -> None:
    job: dict[str, Any] = {"num_nodes": num_nodes, "processes_per_node": per_node, "cuts_tensors": True}
    if data * tensor != num_nodes * per_node:
        with pytest.raises(RuntimeError, match=f"is {data * tensor}, but there are {num_nodes * per_node} processes"):
            plan_layout(data, tensor, **job)
    elif per_node % tensor:
        with pytest.raises(ValueError, match=f"tensor_parallel_size={tensor} does not divide the {per_node} process"):
            plan_layout(data, tensor, **job)
        assert plan_layout(data, tensor, **job, across_nodes=True) == MeshLayout(data, tensor)
    else:
        assert plan_layout(data, tensor, **job) == MeshLayout(data, tensor)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((0, "auto"), "data_parallel_size=0 is no number of processes"),
        (("auto", -1), "tensor_parallel_size=-1 is no number of processes"),
        (("auto", 3), "data_parallel_size=5 times tensor_parallel_size=3 is 15, but there are 16 processes (8 on each"),
        ((3, 4), "Write sizes whose product is 16 (16 x 1, 8 x 2, 4 x 4, 2 x 8)"),
        ((1, 16), "tensor_parallel_size=16 does not divide the 8 process(es) of a node"),
        ((64, "auto"), "data_parallel_size=64 times tensor_parallel_size=1 is 64"),
    ],
)
def test_refusals_name_the_numbers(sizes: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        plan_layout(*sizes, num_nodes=2, processes_per_node=8, cuts_tensors=True)


def test_counts_that_do_not_divide() -> None:
    check_counts(4, {"heads": 12, "kv_heads": 4})
    words = "tensor_parallel_size=8, but the model has 12 heads, which cannot be shared out equally. Sizes that divide "
    with pytest.raises(ValueError, match=words) as refusal:
        check_counts(8, {"heads": 12, "kv_heads": 2})
    assert "both: 1, 2. Write tensor_parallel_size=2" in str(refusal.value)


@given(st.integers(1, 500))
def test_divisors(number: int) -> None:
    found = divisors(number)
    assert found == sorted({one for one in range(1, number + 1) if number % one == 0})
    assert (found[0], found[-1]) == (1, number)
