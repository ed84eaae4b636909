"""A checkpoint of one file, written so that it is complete or not there."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.fabric.utilities.types import _PATH
from typing_extensions import override

from azureml_strategy.checkpoint.manifest import sync_folder


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's own, but what it writes survives the end of the process and of the machine.

    Stock Lightning collects the file in memory, writes it into the system's temporary folder and copies it from there,
    which on a mount is no atomic step. Here it goes straight into a temporary name beside its place, is synchronized
    with the disk, and renamed.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: _PATH, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} writes to mounted folders and takes no storage_options.")
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(target.name + ".part")
        try:
            with open(part, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, target)
        except BaseException:
            part.unlink(missing_ok=True)  # a full disk must not stay full
            raise
        sync_folder(target.parent)
