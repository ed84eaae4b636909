from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from azureml_strategy.cli import main
from azureml_strategy.study import StudyError, StudyOptions
from azureml_strategy.study.options import headings, parse_list, parse_nodes, run_overrides


@given(st.lists(st.integers(min_value=0, max_value=10**6), unique=True))
def test_sizes_are_read_in_order(nodes: list[int]) -> None:
    assert parse_nodes(", ".join(map(str, nodes))) == sorted(nodes)


@given(st.text())
def test_any_text_is_sizes_or_refused(text: str) -> None:
    try:
        assert all(isinstance(each, int) for each in parse_nodes(text))
    except StudyError as error:
        assert "--nodes 1,2,4,8" in str(error)  # noqa: PT017 - both ends are right


def test_lists() -> None:
    assert parse_list(None) == parse_list("") == []
    assert parse_list("a, b,") == ["a", "b"]


@pytest.mark.parametrize("text", [",a", "a,,b", "a, ,b,", ",", "a,,"])
def test_an_item_that_is_empty_is_not_passed_over(text: str) -> None:
    with pytest.raises(StudyError, match="a list with an empty item"):
        parse_list(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "nothing to study"),
        ({"recipe": "resnet50_ddp"}, "Which sizes"),
        ({"recipe": "r", "nodes": [1, 1]}, "--nodes names 1 twice"),
        ({"recipe": "r", "nodes": [0, 1]}, "--nodes: 0 is too few"),
        ({"recipe": "r", "nodes": [1], "processes_per_node": 0}, "--processes-per-node: 0 is too few"),
        ({"recipe": "r", "nodes": [1], "steps": -1}, "--steps -1 is negative"),
        ({"recipe": "r", "nodes": [1], "store": "sqlite:///x.db"}, "--store says where --runs are"),
        ({"recipe": "r", "nodes": [1], "price_per_hour": float("nan")}, "--price-per-hour nan is no price"),
        ({"runs": ["a", "b"], "recipe": "r"}, "--runs reads runs that exist, and a recipe says what to start"),
        ({"runs": ["a", "b"], "processes_per_node": 2}, "and --processes-per-node says"),
        ({"runs": ["a", "a"]}, "--runs names a twice"),
    ],
)
def test_refuses_what_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(StudyError) as raised:
        StudyOptions(**options)
    assert words in str(raised.value)


def test_a_study_trains_for_a_rate_and_lets_the_user_decide() -> None:
    short = ["trainer.max_steps=100", "trainer.max_epochs=1000000", "trainer.limit_val_batches=0", "checkpoint=none"]
    assert run_overrides(StudyOptions(recipe="r", nodes=[1])) == short
    own = ["data.batch_size=8", "+trainer.limit_val_batches=2", "checkpoint=best"]
    options = StudyOptions(recipe="r", nodes=[1], steps=7, overrides=own)
    assert run_overrides(options) == ["trainer.max_steps=7", "trainer.max_epochs=1000000", *own]
    assert run_overrides(StudyOptions(recipe="r", nodes=[1], steps=0, overrides=own)) == own


def test_sizes_in_words() -> None:
    options = StudyOptions(recipe="r", nodes=[4, 1], processes_per_node=8)
    assert list(headings(options)) == [(1, "1 node x 8 processes"), (4, "4 nodes x 8 processes")]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to study"),
        (["resnet50_ddp", "--nodes", "two"], "'two' is no number of nodes"),
        (["resnet50_ddp", "--nodes", "1", "--local", "data.batchsize=3"], "Did you mean 'data.batch_size'"),
        (["--local", "--nodes=1", "resnet50_dpd", "a=b"], "There is no recipe 'resnet50_dpd'"),
        (["resnet50_ddp", "--sizes", "1"], "unrecognized arguments: --sizes"),
        (["--runs", "a", "--steps", "few"], "invalid int value: 'few'"),
    ],
)
def test_the_command_line_ends_with_2_and_a_word(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        exit_code: object = main(["study", *arguments])
    except SystemExit as end:
        exit_code = end.code
    assert exit_code == 2
    assert words in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["study", "--help"])
    assert "azureml-strategy study resnet50_ddp --nodes 1,2 --local" in capsys.readouterr().out
