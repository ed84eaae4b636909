"""Which names of files are taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from azureml_strategy.files import OutsideError, name_within

NAMES = ["a b.tar", "a\u00a0b.tar", "\u732b\u3000\u72ac.tar", "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645.tar"]


@pytest.mark.parametrize("name", NAMES)
def test_spaces_and_joined_letters_of_any_script_are_taken(name: str, tmp_path: Path) -> None:
    assert name_within(tmp_path, f"train/{name}") == tmp_path / "train" / name


@pytest.mark.parametrize("name", ["a\nb", "a\0b", "a\u2028b", "a\x85b", "a\x1bb", "a\udc80b", "../a", "/a", "a//b", ""])
def test_what_is_no_line_or_leads_out_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(OutsideError):
        name_within(tmp_path, name)
