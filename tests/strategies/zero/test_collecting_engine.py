"""What a checkpoint of ZeRO has in memory before it is written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from azureml_strategy.strategies.zero.collecting_engine import collect


class Writer:
    """DeepSpeed's own engine for files, as far as it is asked."""

    def save(self, content: str, path: str) -> None:
        Path(path).write_text(content)


def test_no_folder_is_there_while_the_files_wait_to_be_written(tmp_path: Path) -> None:
    """A rank that is killed then would leave it in memory."""
    engine: Any = SimpleNamespace(checkpoint_engine=Writer())
    folders = []

    def save(folder: str) -> None:
        folders.append(Path(folder))
        (Path(folder) / "latest").write_text("step_8")
        engine.checkpoint_engine.create(SimpleNamespace(save_dir=folder))
        engine.checkpoint_engine.save("states", f"{folder}/step_8/rank_0.pt")

    files, write = collect(engine, save)
    assert not folders[0].exists()
    write(files, tmp_path / "checkpoint")
    assert (tmp_path / "checkpoint" / "latest").read_text() == "step_8"
    assert (tmp_path / "checkpoint" / "step_8" / "rank_0.pt").read_text() == "states"


def test_no_folder_stays_of_a_checkpoint_that_cannot_be_made() -> None:
    engine: Any = SimpleNamespace(checkpoint_engine=Writer())
    own, folders = engine.checkpoint_engine, []

    def save(folder: str) -> None:
        folders.append(Path(folder))
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        collect(engine, save)
    assert not folders[0].exists()
    assert engine.checkpoint_engine is own
