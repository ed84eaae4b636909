"""What a folder of data is like."""

from __future__ import annotations

from pathlib import Path

import pytest

from azureml_strategy.jobs.errors import JobError
from azureml_strategy.jobs.survey import DataSurvey, survey_data


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["a/1.JPG", "b/2.png", "labels.txt"], DataSurvey(3, 3, 3, "images in folders")),
        (["0000.tar", "0001.tar", "index.json"], DataSurvey(3, 3, 1, "shards")),
        (["1.jpg", "2.jpg"], DataSurvey(2, 2, 1, "files")),
        (["tokens.bin"], DataSurvey(1, 1, 1, "files")),
        (["notes.txt"], DataSurvey(1, 1, 1, "files")),
    ],
)
def test_a_folder(tmp_path: Path, files: list[str], expected: DataSurvey) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert survey_data(tmp_path) == expected


def test_a_file_and_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "1.jpg").write_text("four")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link").symlink_to(tmp_path / "real")
    assert survey_data(tmp_path / "data").files == 1
    assert survey_data(tmp_path / "real" / "1.jpg") == DataSurvey(1, 4, 1, "files")


def test_many_small_files_are_remarked_on() -> None:
    advice = DataSurvey(1_281_167, 140_000_000_000, 1000, "images in folders").advice
    assert advice is not None
    assert "1,281,167 files of 109 KB" in advice
    assert DataSurvey(1_281_167, 140_000_000_000, 1, "shards").advice is None
    assert DataSurvey(1000, 100_000, 10, "images in folders").advice is None


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="There is no "):
        survey_data(tmp_path / "none")
    with pytest.raises(JobError, match="There are no files"):
        survey_data(tmp_path)
