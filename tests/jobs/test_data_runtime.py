from __future__ import annotations

import pytest

from azureml_strategy.jobs.data_runtime import ACCESS_PATTERNS, data_runtime_variables
from azureml_strategy.jobs.errors import JobError
from azureml_strategy.jobs.sizes import find_size, offered_sizes

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
