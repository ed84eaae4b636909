"""Parts of sequences on one rank; what several ranks compute together is in tests/multiprocess."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from azureml_strategy.models import GPTConfig, LanguageModel
from azureml_strategy.sequence_parallel import SequenceGroup


class Rank(SequenceGroup):
    """One of several ranks, as far as it says nothing to the others."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize("length", [1, 6, 7, 8])
def test_parts_are_equal_and_join_to_the_sequence(length: int) -> None:
    tokens = torch.arange(2 * length * 3).view(2, length, 3)
    parts = [Rank(rank, 3).part(tokens, fill=-1) for rank in range(3)]
    assert len({part.shape for part in parts}) == 1
    joined = torch.cat(parts, dim=1)
    assert torch.equal(joined[:, :length], tokens)
    assert (joined[:, length:] == -1).all()
    assert joined.shape[1] < length + 3


@pytest.fixture
def gpt(tmp_path: Path) -> Iterator[LanguageModel]:
    """With learned positions for four tokens, whose sequences are shared by a group of one."""
    module = LanguageModel(
        GPTConfig(vocab_size=8, context=4, layers=1, width=8, heads=2, mlp_width=8, positions="learned")
    )
    module.configure_model()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    module.cut_sequences(SequenceGroup(dist.group.WORLD))
    yield module
    dist.destroy_process_group()


def test_a_sequence_that_is_longer_than_the_positions_is_refused(gpt: LanguageModel) -> None:
    """The places of what fills the parts up are brought back to the last; those of tokens must not be."""
    too_long = torch.zeros(1, 5, dtype=torch.int64)
    with pytest.raises(ValueError, match="sequences of 5 tokens, but the network is for 4"):
        gpt(too_long)
    with pytest.raises(ValueError, match="sequences of 5 tokens, but the network is for 4"):
        gpt._loss((too_long, too_long))
    assert gpt(too_long[:, :4]).shape == (1, 4, 8)
    gpt.cut_sequences(None)
    with pytest.raises(IndexError):
        gpt(too_long)
