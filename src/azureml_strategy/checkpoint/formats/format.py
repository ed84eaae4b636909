"""What a layout of checkpoints must offer to be consolidated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class CheckpointFormatError(ValueError):
    """A checkpoint that cannot be read; the message says what was found and what to give instead."""


@dataclass(frozen=True)
class CheckpointFormat:
    """A layout of checkpoints on disk.

    Args:
        name: for messages, as in "is DeepSpeed ZeRO shards".
        found: whether a path is of this layout, by the names of files alone. At most one layout may answer yes.
        reader: reads a checkpoint; see `read`.
    """

    name: str
    found: Callable[[Path], bool]
    reader: Callable[[Path, bool], dict[str, Any]]

    def read(self, path: Path, trust_pickles: bool = False) -> dict[str, Any]:
        """Read a whole checkpoint, as Lightning's single file has it.

        Args:
            path: of this layout.
            trust_pickles: run whatever code the files ask for.

        Returns:
            `state_dict` with full CPU tensors under the names of the unsharded module, beside `hyper_parameters` and
            the rest that Lightning saved.

        Raises:
            CheckpointFormatError: something is missing, or reading would run code.
        """
        return self.reader(path, trust_pickles)
