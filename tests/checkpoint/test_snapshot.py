"""A copy that later changes do not reach, in memory that is used again."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from azureml_strategy.checkpoint import snapshot
from azureml_strategy.checkpoint.snapshot import SnapshotBuffers, SnapshotError


def saved(content: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(content, file)
    file.seek(0)
    return file


def everything() -> dict[str, Any]:
    shared = torch.arange(50_000.0)
    return {
        "overlap": [shared[5:3000], shared[2000:30_000]],
        "tied": {"first": shared[10:20], "again": shared[10:20]},
        "turned": torch.randn(40, 30).t(),
        "steps": [torch.tensor(float(step)) for step in range(30)],
        "types": [torch.ones(3, dtype=each) for each in (torch.bfloat16, torch.int64, torch.bool, torch.complex64)],
        "empty": torch.empty(0, 3),
        "parameter": nn.Parameter(torch.randn(4), requires_grad=False),
        "sparse": torch.eye(3).to_sparse(),
        "plain": (1, None, "name", {"deep": [2.5]}),
    }


def flat(content: Any) -> list[Any]:
    if isinstance(content, dict):
        return [each for value in content.values() for each in flat(value)]
    if isinstance(content, (list, tuple)):
        return [each for value in content for each in flat(value)]
    return [content]


def test_it_writes_the_file_that_the_original_would_have_been() -> None:
    content = everything()
    expected = flat(torch.load(saved(content), weights_only=True))
    taken = SnapshotBuffers().take(content)
    for each in flat(content):
        if isinstance(each, Tensor) and not each.is_sparse:
            each.zero_()
    found = flat(torch.load(saved(taken.content()), weights_only=True))
    for one, other in zip(found, expected, strict=True):
        assert type(one) is type(other)
        if isinstance(one, Tensor):
            assert one.is_sparse or one.stride() == other.stride()
            assert torch.equal(one.to_dense(), other.to_dense())
        else:
            assert one == other


def test_what_shares_memory_shares_it_in_the_copy_and_only_what_is_shown_is_copied() -> None:
    large = torch.randn(1_000_000)
    tied = large[100:200]
    module = {"embedding": tied, "head": tied, "inside": large[150:160], "apart": large[5000:5010]}
    found = SnapshotBuffers().take(module).content()
    assert found["embedding"] is found["head"]
    found["embedding"].fill_(7)
    assert found["inside"].unique().tolist() == [7]
    assert found["apart"].untyped_storage().nbytes() == 40
    assert saved(found).getbuffer().nbytes < 5000


def test_the_memory_is_used_again_whatever_comes() -> None:
    buffers = SnapshotBuffers()
    first = buffers.take({"a": torch.ones(1000), "b": torch.ones(10)}).content()
    addresses = [each.data_ptr() for each in first.values()]
    again = buffers.take({"a": torch.zeros(1000), "b": torch.zeros(10)}).content()
    assert min(each.data_ptr() for each in again.values()) == min(addresses)
    less = buffers.take({"a": torch.full((900,), 3, dtype=torch.float16)}).content()
    assert less["a"].data_ptr() == min(addresses)
    more = buffers.take({"a": torch.ones(1000), "state": {"exp_avg": torch.full((5000,), 2.0)}}).content()
    assert more["state"]["exp_avg"].sum() == 10_000


@pytest.fixture
def weights(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    monkeypatch.setattr(snapshot, "_AT_ONCE_BYTES", 16)
    return torch.ones(1000)


def test_what_only_a_step_changes_is_copied_before_it(weights: Tensor) -> None:
    buffers, statistics = SnapshotBuffers(), torch.ones(1000)
    for _ in range(3):
        buffers.take([weights, statistics], held=[weights], occasion="interval").content()
        buffers.settle()
    taken = buffers.take([weights, statistics], held=[weights], occasion="interval")
    statistics.fill_(5)  # as BatchNorm does in the forward pass
    buffers.settle()
    weights.fill_(6)  # the step
    assert [each.unique().tolist() for each in taken.content()] == [[1], [1]]


def test_a_training_that_changes_weights_between_steps_is_noticed_before_anything_is_left_for_later(
    weights: Tensor,
) -> None:
    buffers = SnapshotBuffers()
    for value in (2, 3):
        taken = buffers.take([weights], held=[weights], occasion="epoch")
        before = weights.clone()
        weights.data.fill_(value)  # which torch does not count
        buffers.settle()
        assert torch.equal(taken.content()[0], before)


def test_a_change_in_the_middle_of_a_copy_is_an_error_and_the_next_is_copied_at_once(weights: Tensor) -> None:
    buffers = SnapshotBuffers()
    buffers.take([weights], held=[weights], occasion="interval")
    buffers.settle()
    taken = buffers.take([weights], held=[weights], occasion="interval")
    weights.add_(1)
    buffers.settle()
    with pytest.raises(SnapshotError, match="between two optimizer steps"):
        taken.content()
    taken = buffers.take([weights], held=[weights], occasion="interval")
    weights.add_(1)
    assert taken.content()[0].unique().tolist() == [2]


def test_what_cannot_be_pickled_fails_at_once() -> None:
    with pytest.raises((AttributeError, TypeError), match=r"pickle|local object"):
        SnapshotBuffers().take({"hook": lambda: None})
