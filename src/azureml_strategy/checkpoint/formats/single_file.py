"""Lightning's single file, as DDP writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from azureml_strategy.checkpoint.formats.format import CheckpointFormat, CheckpointFormatError
from azureml_strategy.checkpoint.formats.pickles import read_file


def _read(path: Path, trust_pickles: bool) -> dict[str, Any]:
    checkpoint: dict[str, Any] = read_file(path, trust_pickles)
    if "state_dict" not in checkpoint:
        raise CheckpointFormatError(
            f"{path} holds no `state_dict`, so Lightning did not save it as a checkpoint. A file inside a sharded "
            "checkpoint is one part of it: give the whole folder."
        )
    return checkpoint


SINGLE_FILE = CheckpointFormat("a single Lightning file", Path.is_file, _read)
