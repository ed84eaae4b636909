from __future__ import annotations

import pytest

from azureml_strategy.jobs.inputs import (
    ACCESS_PATTERNS,
    access_patterns,
    data_runtime_variables,
    job_inputs,
    job_outputs,
    path_overrides,
)
from azureml_strategy.jobs.resources import find_size, offered_sizes
from azureml_strategy.jobs.service_errors import JobError
from azureml_strategy.jobs.settings import InputSettings, JobSettings, OutputSettings

GIB = 2**30
H100 = find_size("nd96isr_h100_v5")


def test_images_of_many_epochs_stay_on_the_disk() -> None:
    assert data_runtime_variables(["epochs", "epochs"], H100) == {
        "DATASET_MOUNT_BLOCK_BASED_CACHE_ENABLED": "true",
        "DATASET_MOUNT_CACHE_SIZE": str(921 * GIB),  # 1,024 without a tenth
    }


def test_one_pass_keeps_nothing() -> None:
    once = {
        "DATASET_MOUNT_BLOCK_BASED_CACHE_ENABLED": "true",
        "DATASET_MOUNT_BLOCK_FILE_CACHE_ENABLED": "false",
        "DATASET_MOUNT_MEMORY_CACHE_SIZE": "0",
    }
    assert data_runtime_variables(["once"], H100) == once
    assert data_runtime_variables(["once_large"], None) == {**once, "DATASET_MOUNT_READ_BUFFER_BLOCK_COUNT": "80"}


def test_random_places_need_whole_files() -> None:
    assert data_runtime_variables(["random"], find_size("nc24ads_a100_v4")) == {
        "DATASET_MOUNT_BLOCK_BASED_CACHE_ENABLED": "false",
        "DATASET_MOUNT_CACHE_SIZE": str(32 * GIB),  # half of a disk of 64
    }


@pytest.mark.parametrize("pattern", ACCESS_PATTERNS)
def test_the_cache_leaves_room_on_every_disk(pattern: str) -> None:
    for size in offered_sizes():
        cache = data_runtime_variables([pattern], size).get("DATASET_MOUNT_CACHE_SIZE")
        if cache is not None:
            assert size.local_disk_gib is not None
            assert 0 < int(cache) <= (size.local_disk_gib - 32) * GIB


def test_without_a_disk_that_is_known_the_runtime_decides() -> None:
    assert "DATASET_MOUNT_CACHE_SIZE" not in data_runtime_variables(["epochs"], None)
    assert "DATASET_MOUNT_CACHE_SIZE" not in data_runtime_variables(["epochs"], find_size("nd128isr_gb300_v6"))


def test_nothing_is_mounted() -> None:
    assert data_runtime_variables([], H100) == {}


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        (["epoch"], "no access pattern 'epoch'. Known: epochs, once"),
        (["once", "epochs"], "epochs, once.*mode: download"),
    ],
)
def test_patterns_that_cannot_be(patterns: list[str], words: str) -> None:
    with pytest.raises(JobError, match=words):
        data_runtime_variables(patterns, H100)


def test_inputs_and_outputs_in_the_words_of_azure_ai_ml() -> None:
    images, table = InputSettings("azureml:a@latest"), InputSettings("azureml:t:1", "mltable", "eval_mount", "once")
    found = job_inputs({"images": images, "table": table})
    images_there = found["images"]
    assert (images_there.path, images_there.type, images_there.mode) == ("a@latest", "uri_folder", "ro_mount")
    assert found["table"].mode == "eval_mount"
    output = job_outputs({"run": OutputSettings("azureml://datastores/d/paths/p", mode="upload")})["run"]
    assert (output.path, output.mode) == ("azureml://datastores/d/paths/p", "upload")


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("images", InputSettings(), r"has no path.* job.inputs.images.path=azureml:NAME@latest.*'~job.inputs.images'"),
        ("my-images", InputSettings("a"), "job.inputs.my-images has a name that Azure ML refuses"),
        ("images", InputSettings("a", mode="mount"), "mode is 'mount'. Known: ro_mount, download"),
        ("images", InputSettings("a", mode="eval_mount"), "Known: ro_mount, download"),
        ("images", InputSettings("a", type="folder"), "type is 'folder'. Known: uri_folder"),
    ],
)
def test_inputs_that_cannot_be(name: str, settings: InputSettings, words: str) -> None:
    with pytest.raises(JobError, match=words):
        job_inputs({name: settings})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (OutputSettings(mode="ro_mount"), "Known: rw_mount, upload"),
        (OutputSettings(type="mltable"), "Known: uri_folder"),
    ],
)
def test_outputs_that_cannot_be(settings: OutputSettings, words: str) -> None:
    with pytest.raises(JobError, match=words):
        job_outputs({"run": settings})


def test_only_what_is_mounted_has_an_access_pattern() -> None:
    inputs = {"a": InputSettings("a", access="once"), "b": InputSettings("b", mode="download", access="random")}
    assert access_patterns(inputs) == ["once"]


def test_paths_go_where_they_are_wanted() -> None:
    job = JobSettings(
        inputs={"images": InputSettings("a", sets="data.root"), "other": InputSettings("b")},
        outputs={"run": OutputSettings(sets="output_dir")},
    )
    assert path_overrides(job, ["seed=1"]) == ["data.root=${{inputs.images}}", "output_dir=${{outputs.run}}"]


@pytest.mark.parametrize(
    ("overrides", "sets", "words"),
    [
        (["data.root=/here"], "data.root", "job.inputs.a sets data.root .* the override 'data.root=/here' sets it too"),
        (["++data.root=/here"], "data.root", "job.inputs.a.sets=null"),
        ([], "output_dir", "job.outputs.run sets output_dir .* job.inputs.a sets it too"),
    ],
)
def test_a_key_has_one_path(overrides: list[str], sets: str, words: str) -> None:
    job = JobSettings(inputs={"a": InputSettings("a", sets=sets)}, outputs={"run": OutputSettings(sets="output_dir")})
    with pytest.raises(JobError, match=words):
        path_overrides(job, overrides)
