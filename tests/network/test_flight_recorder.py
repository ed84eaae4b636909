from __future__ import annotations

from pathlib import Path

import pytest
from torch._C import _distributed_c10d

from azureml_strategy.network.flight_recorder import recorder_settings

FOLDER = Path("/logs/nccl")


def values(configured: dict[str, str], folder: Path | None = FOLDER) -> dict[str, str]:
    found = {name: (value, "environment") for name, value in configured.items()}
    return {setting.variable: setting.value for setting in recorder_settings(found, folder)}


def test_it_is_switched_on_and_kept() -> None:
    assert values({}) == {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": "/logs/nccl/flight_recorder.rank_",
    }
    assert values({}, folder=None) == {"TORCH_FR_BUFFER_SIZE": "2000"}


def test_older_releases_have_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(_distributed_c10d, "_dump_fr_trace")
    assert values({}) == {
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/logs/nccl/flight_recorder.rank_",
    }


@pytest.mark.parametrize("name", ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"])
def test_what_the_user_has_set_stays(name: str) -> None:
    assert values({name: "0", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_FR_DUMP_TEMP_FILE": "/mine"}) == {}
