"""Lightning's single file, as DDP writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from azureml_strategy.checkpoint.formats.format import CheckpointFormat, CheckpointFormatError


def _read(path: Path) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    if "state_dict" not in checkpoint:
        raise CheckpointFormatError(
            f"{path} holds no `state_dict`, so Lightning did not save it as a checkpoint. A file inside a sharded "
            "checkpoint is one part of it: give the whole folder."
        )
    return checkpoint


SINGLE_FILE = CheckpointFormat("a single Lightning file", Path.is_file, _read)
