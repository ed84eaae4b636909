"""What a job's folder of code holds: the files that azure-ai-ml is about to upload."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from azureml_strategy.jobs.errors import JobError

# Beyond these an upload takes minutes, and each start of the job unpacks it again: choices of ours.
MANY_FILES = 2000
MANY_BYTES = 100 * 2**20
# What hardly ever belongs to a job's code; the first part of a path, or any.
_UNWANTED = (
    *(".git", ".venv", "venv", "site-packages", "__pycache__", ".env"),
    *("outputs", "multirun", "mlruns", "mlflow.db"),
)


@dataclass(frozen=True)
class Snapshot:
    """The files of a folder of code.

    Attributes:
        folder: the folder.
        files: their paths in it, with slashes, without what `.amlignore`, or else `.gitignore`, leaves out.
        size: all of them together, in bytes.
    """

    folder: str
    files: tuple[str, ...]
    size: int

    def unwanted(self) -> list[str]:
        """What of it is likely to be there by mistake: version control, installed packages, results, secrets."""
        parts = {part for file in self.files for part in file.split("/")}
        return [name for name in _UNWANTED if name in parts]

    def describe(self) -> str:
        """How much it is, in one line."""
        return f"code: {self.folder}, {len(self.files):,} files, {self.size / 2**20:,.1f} MB"

    def advice(self) -> str | None:
        """What to do where something should be left out; None where nothing is to be said."""
        unwanted = self.unwanted()
        if not unwanted and len(self.files) <= MANY_FILES and self.size <= MANY_BYTES:
            return None
        what = f", {', '.join(unwanted)} among them" if unwanted else ""
        return f"The job gets all of it{what}. Name what it does not need in {self.folder}/.amlignore."


def list_snapshot(folder: str) -> Snapshot:
    """List what azure-ai-ml uploads as a job's code, by its own rules.

    Args:
        folder: whose `.amlignore`, or else `.gitignore`, says what stays here.

    Raises:
        JobError: nothing is left to upload.
    """
    from azure.ai.ml._utils._asset_utils import get_ignore_file, get_upload_files_from_folder

    # Its annotation says a list of texts; it returns a path here and a name in the snapshot for each file.
    pairs: Any = get_upload_files_from_folder(folder, ignore_file=get_ignore_file(folder))
    if not pairs:
        raise JobError(f"job.code is {folder}, which holds no file, or only such as its .amlignore leaves out.")
    return Snapshot(folder, tuple(name for _, name in pairs), sum(os.path.getsize(path) for path, _ in pairs))
