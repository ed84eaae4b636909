"""Losses and accuracies against a plain computation, sample by sample."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from azureml_strategy.models.evaluation import (
    IGNORED_LABEL,
    evaluation_means,
    evaluation_sums,
    mean_cross_entropy,
)


def _plainly(logits: Tensor, labels: Tensor) -> tuple[float, float, float]:
    """Mean loss, top-1 and top-5, without a tensor operation over more than one sample."""
    losses, first, fifth = [], [], []
    for row, label in zip(logits.tolist(), labels.tolist(), strict=True):
        if label == IGNORED_LABEL:
            continue
        losses.append(math.log(sum(math.exp(value) for value in row)) - row[label])
        order = sorted(range(len(row)), key=lambda place: -row[place])
        first.append(order[0] == label)
        fifth.append(label in order[:5])
    return sum(losses) / len(losses), sum(first) / len(first), sum(fifth) / len(fifth)


@given(st.integers(1, 9), st.lists(st.integers(0, 12), min_size=1, max_size=4), st.integers(0, 2**31))
def test_means_over_uneven_batches_are_those_of_the_samples(classes: int, sizes: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = [*sizes, 3]
    logits = torch.randn(sum(sizes), classes, generator=generator)
    labels = torch.randint(classes, (sum(sizes),), generator=generator)
    labels[torch.rand(len(labels), generator=generator) < 0.3] = IGNORED_LABEL
    labels[-1] = 0  # at least one is valid
    sums = torch.zeros(4, dtype=torch.float64)
    for some_logits, some_labels in zip(logits.split(sizes), labels.split(sizes), strict=True):
        sums += evaluation_sums(some_logits, some_labels)
    means = evaluation_means(sums)
    loss, top1, top5 = _plainly(logits, labels)
    assert means["loss"].item() == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert means["top1"].item() == pytest.approx(top1)
    assert means["top5"].item() == pytest.approx(top5)


def test_a_batch_of_ignored_labels_adds_nothing() -> None:
    sums = evaluation_sums(torch.randn(3, 7), torch.full((3,), IGNORED_LABEL))
    assert sums.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_no_valid_sample_at_all_is_no_number() -> None:
    assert all(value.isnan() for value in evaluation_means(torch.zeros(4, dtype=torch.float64)).values())


def test_three_classes_are_always_within_the_first_five() -> None:
    means = evaluation_means(evaluation_sums(torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([0])))
    assert (means["top1"], means["top5"]) == (0.0, 1.0)


def test_half_precision_logits_are_counted_in_single_precision() -> None:
    logits = torch.full((4096, 2), 3.0, dtype=torch.bfloat16)
    sums = evaluation_sums(logits, torch.zeros(4096, dtype=torch.int64))
    assert sums[0].item() == pytest.approx(4096 * math.log(2), rel=1e-5)
    assert sums[3].item() == 4096


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_training_loss_is_torchs_mean(smoothing: float) -> None:
    logits, labels = torch.randn(6, 5), torch.tensor([0, 4, IGNORED_LABEL, 2, IGNORED_LABEL, 1])
    expected = torch.nn.functional.cross_entropy(logits, labels, label_smoothing=smoothing)
    torch.testing.assert_close(mean_cross_entropy(logits, labels, smoothing), expected)


def test_the_training_loss_of_ignored_labels_is_zero_with_zero_gradients() -> None:
    logits = torch.randn(2, 5, requires_grad=True)
    loss = mean_cross_entropy(logits, torch.tensor([IGNORED_LABEL, IGNORED_LABEL]), 0.1)
    loss.backward()
    assert loss.item() == 0.0
    assert logits.grad is not None
    assert not logits.grad.any()


def test_losses_in_double_precision_keep_it() -> None:
    logits = torch.randn(7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(7) % 5
    exact = torch.nn.functional.cross_entropy(logits, labels)
    assert abs(mean_cross_entropy(logits, labels) - exact) < 1e-15
    assert abs(evaluation_means(evaluation_sums(logits, labels))["loss"] - exact) < 1e-15
