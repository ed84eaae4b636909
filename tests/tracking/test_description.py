from __future__ import annotations

import pytest

from azureml_strategy.tracking.batch import markdown_table, merge_description

OURS = "<!-- azureml-strategy -->\na\nb\n<!-- end of azureml-strategy -->"


def test_a_table_without_surprises() -> None:
    lines = markdown_table([("images/s", "1 | 2"), ("*x_y*", "<b>\n[z](u)")])
    assert lines == ["| | |", "|---|---|", "| images/s | 1 \\| 2 |", "| \\*x\\_y\\* | \\<b> \\[z](u) |"]
    assert markdown_table([]) == []


@pytest.mark.parametrize("present", ["", " \n", OURS, OURS.replace("a\nb", "old\nlines")])
def test_our_part_alone(present: str) -> None:
    assert merge_description(present, ["a", "b"], 1000) == OURS


@pytest.mark.parametrize("below", ["", "\n\nBelow."])
def test_what_others_wrote_stays(below: str) -> None:
    first = merge_description("My run.\n\nTwo.", ["old"], 1000)
    assert first is not None
    assert first.startswith("My run.\n\nTwo.\n\n<!-- azureml-strategy -->\nold\n")
    again = merge_description(first + below, ["a", "b"], 1000)
    assert again == f"My run.\n\nTwo.\n\n{OURS}{below}"
    assert merge_description(again, ["a", "b"], 1000) == again


def test_a_cut_end_of_our_part() -> None:
    assert merge_description("Mine.\n<!-- azureml-strategy -->\nrest", ["a"], 1000) == (
        "Mine.\n\n<!-- azureml-strategy -->\na\n<!-- end of azureml-strategy -->\n\nrest"
    )


@pytest.mark.parametrize("present", ["", "Mine."])
def test_whole_lines_within_the_limit(present: str) -> None:
    lines = [f"line {number} {'x' * 40}" for number in range(50)]
    for limit in range(60, 1000, 7):
        merged = merge_description(present, lines, limit)
        assert merged is None or (len(merged) <= limit and present in merged)
        if merged is not None:
            kept = [each for each in merged.splitlines() if each.startswith("line")]
            assert kept == lines[: len(kept)]
            assert len(merged) + len(lines[0]) + 3 > limit
    assert merge_description("x" * 990, lines, 1000) is None
