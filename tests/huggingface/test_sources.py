"""Where a model's files are found, and what is said if they are not."""

from __future__ import annotations

import json
from pathlib import Path

import mlflow
import pytest
from tests.tiny_model import save_tiny_model

from azureml_strategy.huggingface.sources import PretrainedModelError, Source, find_source


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def test_a_folder_is_its_own_source(folder: Path) -> None:
    source = find_source(folder)
    assert source == Source(str(folder), None, folder)
    assert [file.name for file in source.weight_files()] == ["model.safetensors"]


def test_several_files_are_those_that_the_index_names(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    parts = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    for name in parts.values():
        (tmp_path / name).touch()
    assert [file.name for file in find_source(tmp_path).weight_files()] == sorted(parts.values())
    (tmp_path / parts["b"]).unlink()
    with pytest.raises(PretrainedModelError, match=r"incomplete: .* names model-00002-of-00002.safetensors"):
        find_source(tmp_path).weight_files()


def test_weights_of_another_format_are_refused_with_how_to_convert_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(PretrainedModelError, match=r"holds pytorch_model.bin.*save_pretrained\(NEW_FOLDER\)"):
        find_source(tmp_path).weight_files()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("{folder}/nothing", "There is no folder"),
        ("{folder}", "it holds notes.txt, but no config.json"),
        ("azureml:model", "names no version of a model. Write azureml:NAME:VERSION"),
    ],
)
def test_what_is_no_model_is_named(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(PretrainedModelError, match=words):
        find_source(name.format(folder=tmp_path))


def test_a_hub_id_without_a_network_says_what_to_give_instead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(PretrainedModelError, match=r"meta-llama/gated is no folder here.*HF_TOKEN.*Give a folder"):
        find_source("meta-llama/gated")


def test_a_registered_model_is_downloaded_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    client = mlflow.MlflowClient()
    client.create_registered_model("tiny")
    client.create_model_version("tiny", str(folder))
    source = find_source("azureml:tiny:1")
    assert source.weight_files()[0].read_bytes() == (folder / "model.safetensors").read_bytes()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/another.db")
    assert find_source("azureml:tiny:1") == source
    with pytest.raises(PretrainedModelError, match=r"azureml:tiny:2 could not be downloaded"):
        find_source("azureml:tiny:2")
