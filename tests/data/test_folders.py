"""Finding images, and the errors where there are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from azureml_strategy.data.folders import DataFolderError, resolve_place, scan_class_folders


def _touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_sorted_folders_are_the_labels(tmp_path: Path) -> None:
    _touch(tmp_path / "dog" / "b.jpg", tmp_path / "dog" / "a.JPEG", tmp_path / "cat" / "z.Png")
    _touch(tmp_path / "cat" / "notes.txt", tmp_path / "cat" / "._z.jpg", tmp_path / ".hidden" / "a.jpg")
    _touch(tmp_path / "top.jpg", tmp_path / "eel" / "e.webp", tmp_path / "eel" / "f.bmp", tmp_path / "eel" / "g.gif")
    with pytest.warns(UserWarning, match=r"5 images are read, and 3 other .*: top.jpg, cat/notes.txt, eel/g.gif"):
        found = scan_class_folders(tmp_path)
    assert found.classes == ("cat", "dog", "eel")
    assert [found.path(index) for index in range(5)] == [
        str(tmp_path / name) for name in ("cat/z.Png", "dog/a.JPEG", "dog/b.jpg", "eel/e.webp", "eel/f.bmp")
    ]
    assert found.labels.tolist() == [0, 1, 1, 2, 2]
    assert len(found.names) == 5


def test_any_file_name_survives(tmp_path: Path) -> None:
    _touch(tmp_path / "Käse" / "brötchen 1.jpg")
    assert Path(scan_class_folders(tmp_path).path(0)).is_file()


def test_a_linked_class_folder_counts(tmp_path: Path) -> None:
    _touch(tmp_path / "elsewhere" / "a.jpg")
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "cat").symlink_to(tmp_path / "elsewhere")
    assert scan_class_folders(tmp_path / "root").classes == ("cat",)


def test_an_empty_class_keeps_its_label_and_is_warned_of(tmp_path: Path) -> None:
    _touch(tmp_path / "b" / "x.jpg")
    (tmp_path / "a").mkdir()
    with pytest.warns(UserWarning, match="1 of 2 class folders .* have no image: a"):
        found = scan_class_folders(tmp_path)
    assert found.labels.tolist() == [1]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataFolderError, match=rf"There is no data folder {tmp_path}/absent\. .*inputs\.NAME"):
        scan_class_folders(tmp_path / "absent")
    assert issubclass(DataFolderError, FileNotFoundError)


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataFolderError, match=f"{tmp_path} has nothing in it, but no class folders"):
        scan_class_folders(tmp_path)


def test_images_without_class_folders_are_pointed_at(tmp_path: Path) -> None:
    _touch(tmp_path / "a.jpg")
    with pytest.raises(DataFolderError, match=rf"{tmp_path} has only files \(a\.jpg\)"):
        scan_class_folders(tmp_path)


def test_class_folders_without_images_are_pointed_at(tmp_path: Path) -> None:
    _touch(tmp_path / "train" / "readme.md")
    (tmp_path / "val").mkdir()
    with pytest.raises(DataFolderError, match=r"2 class folders \(train, val\), none with an image"):
        scan_class_folders(tmp_path)


def test_the_root_is_taken_as_given(tmp_path: Path) -> None:
    assert resolve_place(tmp_path, None, {}) == str(tmp_path)


def test_an_input_is_found_where_it_is_mounted() -> None:
    assert resolve_place(None, "images", {"AZURE_ML_INPUT_images": "/mnt/x"}) == "/mnt/x"


def test_an_unknown_input_lists_the_known_ones() -> None:
    environ = {"AZURE_ML_INPUT_b": "/b", "AZURE_ML_INPUT_a": "/a", "OTHER": ""}
    with pytest.raises(DataFolderError, match=r"AZURE_ML_INPUT_images is not set.*has the inputs a, b"):
        resolve_place(None, "images", environ)
    with pytest.raises(DataFolderError, match="no Azure ML inputs"):
        resolve_place(None, "images", {})


@pytest.mark.parametrize(("root", "name", "seen"), [(None, None, "neither"), ("/x", "y", "both root='/x'")])
def test_exactly_one_source_is_needed(root: str | None, name: str | None, seen: str) -> None:
    with pytest.raises(ValueError, match=f"either `root` or `input_name`, and {seen}"):
        resolve_place(root, name, {})
