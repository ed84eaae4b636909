from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.checkpoint.elastic import ElasticPlan
from azureml_strategy.checkpoint.global_batch import GlobalBatch
from azureml_strategy.checkpoint.resume import ResumeError

few = st.integers(1, 12)


def plan(saved: GlobalBatch, asked: GlobalBatch, ranks_per_replica: int = 1, ranks_per_node: int = 1) -> ElasticPlan:
    return ElasticPlan(Path("step=4.ckpt"), saved, asked, ranks_per_replica, ranks_per_node)


@given(saved=st.builds(GlobalBatch, few, few, few), asked=st.builds(GlobalBatch, few, few, few))
def test_the_global_batch_is_kept_or_refused(saved: GlobalBatch, asked: GlobalBatch) -> None:
    if saved.size % asked.round_size:
        with pytest.raises(ResumeError, match=f"with {saved.size} samples to an optimizer step"):
            plan(saved, asked).accumulated()
    else:
        now = plan(saved, asked).accumulated()
        assert now.size == saved.size
        assert (now.batch_size, now.replicas) == (asked.batch_size, asked.replicas)


@given(saved=st.builds(GlobalBatch, few, few, few), replicas=few, piece=few, micro_batches=few)
def test_micro_batches_keep_their_size(saved: GlobalBatch, replicas: int, piece: int, micro_batches: int) -> None:
    asked = GlobalBatch(piece * micro_batches, replicas, 1)
    if saved.size % (piece * replicas):
        with pytest.raises(ResumeError, match="with a micro-batch each"):
            plan(saved, asked).cut(micro_batches)
    else:
        now, number = plan(saved, asked).cut(micro_batches)
        assert now.size == saved.size
        assert now.batch_size == number * piece


def test_every_way_out_is_named() -> None:
    saved, asked = GlobalBatch(8, 2, 2), GlobalBatch(8, 3, 1)
    with pytest.raises(ResumeError) as refused:
        plan(saved, asked, ranks_per_node=2).accumulated()
    assert str(refused.value) == (
        "step=4.ckpt was written with 32 samples to an optimizer step: batch size 8 x 2 data-parallel rank(s) x "
        "accumulation 2. Now there is batch size 8 x 3 data-parallel rank(s) x accumulation 1, and these ranks read 24 "
        "at once, and no whole number of that makes 32. Come back with 1, 2 or 4 data-parallel rank(s), on 1 or 2 "
        "node(s) of 2 process(es). To go on with another global batch, write `global_batch=change`, or "
        "ElasticRestart(..., global_batch='change') in a script; `resume=never` starts anew."
    )


@pytest.mark.parametrize(
    ("saved", "asked", "words"),
    [
        (GlobalBatch(8, 1, 1), GlobalBatch(8, 4, 1), "or with a batch size of 2 (data.batch_size=2 in a recipe)"),
        (GlobalBatch(8, 1, 1), GlobalBatch(5, 2, 1), "Come back with a batch size of 4 (data.batch_size=4"),
        (GlobalBatch(7, 1, 1), GlobalBatch(3, 2, 1), "No number of ranks fits these batches."),
        (GlobalBatch(None, 3, 1), GlobalBatch(None, 2, 1), "was written with 3 batches to an optimizer step"),
    ],
)
def test_what_would_do(saved: GlobalBatch, asked: GlobalBatch, words: str) -> None:
    with pytest.raises(ResumeError) as refused:
        plan(saved, asked).accumulated()
    assert words in str(refused.value)


def test_replicas_of_several_ranks_on_their_nodes() -> None:
    with pytest.raises(ResumeError, match=r"with 1, 2 or 4 data-parallel rank\(s\), on 1 or 2 node\(s\) of 8 process"):
        plan(GlobalBatch(4, 4, 1), GlobalBatch(4, 3, 1), ranks_per_replica=4, ranks_per_node=8).accumulated()


def test_an_epoch_too_small_for_the_ranks() -> None:
    growing = plan(GlobalBatch(2, 1, 4, epoch_batches=3), GlobalBatch(2, 4, 1))
    assert growing.epoch_batches(Fraction(1, 2)) == 1
    with pytest.raises(ResumeError, match=r"an epoch, which had 3 batch\(es\), has too few samples"):
        growing.epoch_batches(Fraction(1, 4))


def test_a_pipeline_must_know_the_size_of_its_batches() -> None:
    with pytest.raises(ResumeError, match="does not say how large its batches are"):
        plan(GlobalBatch(None, 2, 1), GlobalBatch(None, 1, 1)).cut(4)
