"""Epochs of images and of a user's own data set, taken up in their middle."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

from azureml_strategy.data import ResumableLoader, ResumableSampler, TrainingSampler
from azureml_strategy.data.synthetic import RepeatedBatch


def _loader(workers: int = 0, epoch: int = 0) -> ResumableLoader:
    rows = TensorDataset(torch.arange(40))
    sampler = ResumableSampler(rows, 1, 0, seed=7)
    sampler.set_epoch(epoch)
    return ResumableLoader(rows, sampler=sampler, batch_size=4, num_workers=workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_goes_on_after_what_was_given(workers: int) -> None:
    whole = [batch[0].tolist() for batch in _loader(epoch=2)]
    stopped, again = _loader(workers, epoch=2), _loader(workers)
    for _, _ in zip(range(3), stopped, strict=False):
        pass
    again.load_state_dict(stopped.state_dict())
    assert [batch[0].tolist() for batch in again] == whole[stopped.state_dict()["samples"] // 4 :]


@pytest.mark.parametrize("workers", [0, 2])
def test_only_the_pass_that_was_left_goes_on_in_its_middle(workers: int) -> None:
    """A loader that is shorter than another one of the same epoch begins again."""
    stopped, again = _loader(workers, epoch=2), _loader(workers)
    for _, _ in zip(range(3), stopped, strict=False):
        pass
    again.load_state_dict(stopped.state_dict())
    rest, once_more = list(again), list(again)
    assert len(rest) < len(once_more) == 10
    assert again.state_dict() == {"epoch": 2, "samples": 40}


def test_images_go_on_with_the_draws_of_their_epoch() -> None:
    def draws(resume_at: tuple[int, int] = (0, 0)) -> list[int]:
        sampler = TrainingSampler(range(30), 2, 1, seed=7)
        sampler.set_epoch(2)
        sampler.resume_at = resume_at
        return list(sampler)

    assert draws((2, 12)) == draws()[6:]
    assert draws((1, 12)) == draws()
    assert all(60 <= draw < 90 for draw in draws())


def test_the_order_is_that_of_torchs_own_sampler() -> None:
    from torch.utils.data import DistributedSampler

    own = ResumableSampler(range(30), 4, 3, seed=7)
    torchs = DistributedSampler(range(30), 4, 3, seed=7, drop_last=True)  # type: ignore[var-annotated,arg-type]
    for epoch in range(3):
        own.set_epoch(epoch)
        torchs.set_epoch(epoch)
        assert list(own) == list(torchs)


@pytest.mark.parametrize("workers", [0, 1])
def test_beginning_an_epoch_takes_none_of_the_processs_random_numbers(workers: int) -> None:
    before = torch.get_rng_state()
    assert len(list(_loader(workers))) == 10
    assert torch.equal(torch.get_rng_state(), before)


def test_an_epoch_of_one_batch_is_as_long_as_what_was_left() -> None:
    batch = RepeatedBatch(torch.zeros(1), torch.zeros(1), 5)
    for _, _ in zip(range(2), batch, strict=False):
        pass
    again = RepeatedBatch(torch.zeros(1), torch.zeros(1), 5)
    again.load_state_dict({"given": 2})
    assert [len(list(again)), len(list(again))] == [3, 5]
    assert again.state_dict() == {"given": 5}
    again.load_state_dict(again.state_dict())
    assert len(list(again)) == 5, "it was at its end"
